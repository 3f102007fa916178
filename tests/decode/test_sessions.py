"""Drafting sees what training saw: the session against the training unroll, chains against trees, and the state after
a partly accepted round against a fresh session."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rigs import PROMPT, head_for, overfit, tiny_target

from headtrain.decode.drafters import HeadDrafter, Sampling
from headtrain.decode.generate import generate
from headtrain.decode.tree import DynamicTree, StaticTree
from headtrain.shift import pair_mask
from headtrain.types import Batch, Row

SOME = list(range(3, 384, 4))
VARIANTS = [
    {"depth": 5},
    {"depth": 5, "draft_ids": SOME, "norm_output": True, "fc_norm": True},
    {"depth": 5, "norm_before_residual": True, "norm_before_fc": True},
]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def at(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def everywhere(target, length=24):
    """One row with every position supervised, and its features with a final at every position."""
    ids = torch.randint(3, 384, (length,), generator=torch.Generator().manual_seed(3)).tolist()
    batch = Batch.pack([Row(ids, [1] * length)])
    return batch


@pytest.mark.parametrize("more", VARIANTS)
@torch.no_grad()
def test_session_equals_the_training_unroll(target, more):
    """Logits of every position and step. Not bit for bit: training projects the two halves of q/k/v apart and merges
    two attention calls; 1e-5 is some hundred times float32's rounding at these sizes, relative to logits near 1."""
    head, batch, depth = head_for(target, "eagle3", **more), everywhere(target), 5
    features = target.features(batch, head.wants())
    start = pair_mask(batch, depth)[0].nonzero().squeeze(1)
    steps = [head.lm_head(hidden) for hidden in head._unroll(batch, features, start, depth)]
    session, compared = head.session(len(batch)), 0
    for row, i in enumerate(start.tolist()):
        logits = session.extend(batch.ids[i + 1 : i + 2], features.layers[i : i + 1], features.final[:1])
        for step in range(depth):
            if row >= steps[step].shape[0]:
                break
            if step:
                logits = session.expand(at(step - 2), batch.ids[i + 1 + step : i + 2 + step])[0]
            torch.testing.assert_close(logits, steps[step][row], rtol=1e-5, atol=1e-5)
            compared += 1
    assert compared == sum(s.shape[0] for s in steps) == 22 + 21 + 20 + 19 + 18


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
@torch.no_grad()
def test_extending_at_once_equals_extending_one_by_one(target, kind):
    head, batch = head_for(target, kind), everywhere(target)
    features = target.features(batch, head.wants())
    final = target.model.model(batch.ids[None]).last_hidden_state[0]
    one, many = head.session(30), head.session(30)
    for i in range(20):
        stepwise = one.extend(batch.ids[i + 1 : i + 2], features.layers[i : i + 1], final[i : i + 1])
        one.expand(at(-1), at(7))  # a guess, to be forgotten
    at_once = many.extend(batch.ids[1:21], features.layers[:20], final[:20])
    torch.testing.assert_close(stepwise, at_once, rtol=1e-5, atol=1e-5)
    assert not torch.equal(at_once, many.extend(batch.ids[21:22], features.layers[20:21], final[20:21]))


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
@pytest.mark.parametrize("one_call_a_level", [True, False])
@torch.no_grad()
def test_a_tree_equals_its_chains(target, kind, one_call_a_level):
    """Two children for each node, three levels: every path gives what a chain of its tokens gives."""
    head, batch = head_for(target, kind), everywhere(target)
    features = target.features(batch, head.wants())
    final = target.model.model(batch.ids[None]).last_hidden_state[0]

    def fresh():
        session = head.session(30)
        session.extend(batch.ids[1:13], features.layers[:12], final[:12])
        return session

    tree, paths, logits, level = fresh(), {-1: ()}, {}, [-1]
    for depth in range(3):
        parents = [p for p in level for _ in range(2)]
        tokens = [10 + 20 * depth + 3 * n for n in range(len(parents))]
        numbers = list(range(len(logits), len(logits) + len(parents)))
        groups = [range(len(parents))] if one_call_a_level else [[n] for n in range(len(parents))]
        for group in groups:
            out = tree.expand(at(*(parents[n] for n in group)), at(*(tokens[n] for n in group)))
            for n, row in zip(group, out, strict=True):
                logits[numbers[n]] = row
        paths.update({numbers[n]: (*paths[parents[n]], tokens[n]) for n in range(len(parents))})
        level = numbers
    assert len(logits) == 2 + 4 + 8
    for node, got in logits.items():
        chain = fresh()
        for depth, token in enumerate(paths[node]):
            want = chain.expand(at(depth - 1), at(token))[0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    if kind == "eagle3":  # other tokens on the way must matter, or the comparison shows nothing
        assert (logits[6] - logits[13]).abs().max() > 1e-2


class Watched(HeadDrafter):
    """Keeps what it was fed, and compares each proposal with that of a fresh session fed with all of it at once."""

    def start(self, prompt, max_length):
        super().start(prompt, max_length)
        self.fed, self.length = [], max_length

    def draft(self, next_tokens, layers, final, k, sampling):
        self.fed.append((next_tokens, layers, final))
        again = torch.Generator()
        again.set_state(sampling.generator.get_state())
        mine = super().draft(next_tokens, layers, final, k, sampling)
        used, self.session = self.session, self.head.session(self.length)
        fresh = super().draft(*self.everything(), k, replace(sampling, generator=again))
        self.session = used
        assert torch.equal(mine.tokens, fresh.tokens)
        if mine.q is not None:
            torch.testing.assert_close(mine.q, fresh.q, rtol=1e-4, atol=1e-6)
        return mine

    def everything(self):
        return [torch.cat(parts) for parts in zip(*self.fed, strict=True)]


STATIC = StaticTree.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize("plan", [None, STATIC, DynamicTree(9, 4, 3)], ids=["chain", "static", "dynamic"])
@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize(("kind", "more"), [("eagle3", {"layers": [1, 2, 3]}), ("medusa", {})])
def test_after_a_partly_accepted_round_the_session_is_as_fresh(target, kind, more, temperature, plan):
    """And what it was fed is what one whole forward of the target over the text gives."""
    text = generate(target, PROMPT, max_new_tokens=60, temperature=temperature, eos_ids=()).tokens
    outside = set(text[7:60:12])  # never drafted, so that runs break off
    head = head_for(target, kind, draft_ids=[i for i in range(384) if i not in outside], **more)
    overfit(target, head, PROMPT + text, steps=20)
    drafter = Watched(head, plan)
    out = generate(target, PROMPT, drafter=drafter, k=4, max_new_tokens=60, temperature=temperature, eos_ids=())
    accepted = {r.accepted for r in out.rounds}
    assert accepted & {1, 2, 3}, "no partly accepted round: the test shows nothing"
    following, layers, final = drafter.everything()
    ids = PROMPT + out.tokens
    assert following.tolist() == ids[1 : 1 + following.numel()]
    with torch.no_grad():
        whole = target.model.model(torch.tensor([ids]), output_hidden_states=True)
    n = following.numel()
    for column, index in enumerate(drafter.layers):
        torch.testing.assert_close(layers[:, column], whole.hidden_states[index][0, :n], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final, whole.last_hidden_state[0, :n], rtol=1e-4, atol=1e-4)


def test_drafts_lie_in_the_draft_vocabulary_and_q_is_their_distribution(target):
    head = head_for(target, "eagle3", draft_ids=SOME)
    session_length, prompt = 40, torch.tensor(PROMPT)
    _, layers, final = target.step(prompt[None], target.new_cache(), head.wants().layers)
    drafter = HeadDrafter(head)
    for temperature, top_k in ((0.0, 0), (0.7, 0), (0.7, 3)):
        drafter.start(prompt, session_length)
        sampling = Sampling(temperature, 1.0, top_k, torch.Generator().manual_seed(1))
        proposal = drafter.draft(torch.cat([prompt[1:], at(9)]), layers, final, 4, sampling)
        assert proposal.tokens.shape == (4,) and set(proposal.tokens.tolist()) <= set(SOME)
        if temperature == 0:
            assert proposal.q is None
            continue
        inside = torch.zeros(384, dtype=torch.bool)
        inside[SOME] = True
        assert proposal.q.shape == (4, 384) and proposal.q[:, ~inside].abs().max() == 0
        torch.testing.assert_close(proposal.q.sum(1), torch.ones(4))
        assert bool((proposal.q.gather(1, proposal.tokens[:, None]) > 0).all())
        if top_k:
            assert ((proposal.q > 0).sum(1) == top_k).all()
