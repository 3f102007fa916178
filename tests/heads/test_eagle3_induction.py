from __future__ import annotations

import pytest
import torch

from headtrain.capture import head_wants
from headtrain.config import Recipe, RecipeError
from headtrain.heads import eagle3_induction
from headtrain.heads.catalog import build_head, parse_head
from headtrain.heads.eagle3_induction import Moments, canonical, centred, moments, still
from headtrain.types import Batch, Features, Row, TargetShape, TargetWeights

H, V, DEPTH, LONG, THETA = 256, 300, 4, 200, 1e6
ROPE = {"rope_type": "default", "rope_theta": THETA}
SHAPE = TargetShape("LlamaForCausalLM", "llama", H, 64, 8, 4, 2, 64, V, max_positions=1024, rope=ROPE)


def same(x):
    return x


def target(tied=True, seed=0):
    """Embedding, lm_head, and features [n, 3, H] of tokens [n]: a noisy linear picture of each token in the first
    layer, and sizes as real ones have them (the deeper layers are larger and tell nothing here)."""
    g = torch.Generator().manual_seed(seed)
    embed = torch.randn(V, H, generator=g) * 0.1
    lm_head = embed if tied else torch.randn(V, H, generator=g)
    picture = torch.randn(H, H, generator=g) / H**0.5

    def features(ids):
        told = 10 * embed[ids] @ picture + 0.3 * torch.randn(len(ids), H, generator=g)
        return torch.stack([told, *(8 * torch.randn(2, len(ids), H, generator=g))], 1)

    return TargetWeights(embed, lm_head, torch.ones(H)), features


def packed(texts, features):
    batch = Batch.pack([Row(text, [0] * 2 + [1] * (len(text) - 2)) for text in texts])
    nothing = torch.arange(0)
    return batch, Features(features(batch.ids), nothing, torch.zeros(0, H))


def texts(count, length, seed=1):
    """No token twice."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randperm(V, generator=g)[:length].tolist() for _ in range(count)]


def made(weights, draft_ids=None, **config):
    size = None if draft_ids is None else len(draft_ids)
    torch.manual_seed(0)
    head = build_head(
        parse_head({"kind": "eagle3", "depth": DEPTH, "draft_vocab_size": size, **config}), SHAPE, draft_ids
    )
    head.attach(weights)
    return head


THREE = {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True}


@pytest.fixture
def loud(monkeypatch):
    """What is copied outweighs the residual, which is random yet."""
    monkeypatch.setattr(eagle3_induction, "COPY", 3.0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("switches", [{}, THREE, {"fc_norm": True, "norm_output": True}], ids=["plain", "3", "fc_norm"])
def test_it_copies_what_a_text_repeats_before_any_training(loud, switches, tied):
    """A text of random tokens that is said twice: nothing but copying can say its second half."""
    weights, features = target(tied)
    head = made(weights, **switches)
    head.init_for_induction(weights)
    twice = [text * 2 for text in texts(3, LONG)]
    batch, seen = packed(twice, features)
    again = batch.pos >= LONG + 1

    def share():
        hits = head.chain_hits(batch, seen, DEPTH)
        return [float(hits[s, again].float().sum() / again[: len(again) - s].sum()) for s in range(DEPTH)]

    assert max(share()) < 0.1
    sample = [packed(texts(4, 150, seed), features) for seed in range(2, 12)]
    said = head.fit_induction(iter(sample), same, 2 * LONG)
    assert "6,000 tokens" in said[0]
    deep = DEPTH if switches else 1  # without any norm the copy stays in the state that is fed back
    assert min(share()[:deep]) > 0.9, share()


def test_a_draft_vocabulary_is_copied_from_alone(loud):
    weights, features = target(tied=False)
    draft_ids = torch.arange(0, V, 2)
    head = made(weights, draft_ids, **THREE)
    head.init_for_induction(weights)
    head.fit_induction([packed(texts(4, 150, seed), features) for seed in range(2, 12)], same, 2 * LONG)
    batch, seen = packed([text * 2 for text in texts(3, LONG)], features)
    hits = head.chain_hits(batch, seen, 1)[0]
    may = (batch.pos >= LONG + 1) & (torch.roll(batch.ids, -2) % 2 == 0)
    assert float(hits[may].float().mean()) > 0.8
    assert not hits[torch.roll(batch.ids, -2) % 2 == 1].any()
    # 150 rows in 256 dimensions: what the lm_head does not read is not written, and leaves room to what it reads
    unread = torch.linalg.svd(head.lm_head.weight)[2][150:]
    written = head.midlayer.self_attn.o_proj.weight
    assert (unread @ written).norm() < 1e-3 * written.norm()


def test_canonical_correlations_are_those_of_the_definition():
    g = torch.Generator().manual_seed(0)
    e = torch.randn(4000, 5, generator=g, dtype=torch.float64)
    x = torch.cat(
        [e[:, :2] @ torch.randn(2, 4, generator=g, dtype=torch.float64), torch.randn(4000, 3, generator=g)], 1
    )
    x = x + 0.5 * torch.randn(4000, 7, generator=g, dtype=torch.float64)
    found = Moments(4000, e.T @ e, e.T @ x, x.T @ x, 0.0)
    a, b, r = canonical(found, 4)
    assert a.shape == (5, 4) and b.shape == (7, 4) and r[1] > 0.7 and r[3] < 0.1
    # 1 % of ridge on the diagonal keeps the variances just below 1
    for side in (e @ a, x @ b):
        torch.testing.assert_close(side.T @ side / 4000, torch.eye(4, dtype=torch.float64), rtol=0, atol=0.02)
    torch.testing.assert_close((e @ a).T @ (x @ b) / 4000, torch.diag(r), rtol=0, atol=1e-9)
    # slow and obvious: no other direction of x correlates better with any of e
    ee, xx, ex = e.T @ e / 4000, x.T @ x / 4000, e.T @ x / 4000
    best = torch.linalg.eigvals(torch.linalg.solve(ee, ex) @ torch.linalg.solve(xx, ex.T)).real.sort().values
    torch.testing.assert_close(r.square().flip(0), best[-4:], rtol=0.05, atol=1e-3)


def test_moments_add_up_over_ranks_and_see_differences_within_documents_alone():
    weights, features = target()
    head = made(weights, **THREE)
    sample = [packed(texts(3, 40, seed), features) for seed in (2, 3)]
    whole = moments(head, sample, same)
    parts = [moments(head, [part], same) for part in sample]
    for name in ("count", "embeddings", "cross", "features", "log_size"):
        total = getattr(parts[0], name) + getattr(parts[1], name)
        torch.testing.assert_close(torch.as_tensor(total), torch.as_tensor(getattr(whole, name)))
    assert whole.count == 240
    batch = sample[0][0]
    x = torch.randn(len(batch), 6)
    shifted = x + torch.randn(3, 6)[batch.doc]
    torch.testing.assert_close(centred(shifted, batch), centred(x, batch), rtol=0, atol=1e-5)
    for d in range(3):
        assert centred(x, batch)[batch.doc == d].mean(0).abs().max() < 1e-6


def test_only_what_rope_hardly_turns_is_used():
    weights, _ = target()
    head = made(weights)
    angles = THETA ** (-torch.arange(32) / 32)
    for window in (64, 1000):
        expected = [i for i in range(32) if angles[i] * window <= 1]
        assert still(head, window).tolist() == expected + [i + 32 for i in expected]


def test_a_window_in_which_rope_turns_everything_is_refused():
    weights, features = target()
    head = made(weights, **THREE)
    with pytest.raises(ValueError, match="window of 1,000,000,000 tokens"):
        head.fit_induction([packed(texts(2, 50), features)], same, 1_000_000_000)


def test_heads_without_it_say_so():
    recipe = Recipe(
        name="x",
        target={"path": "x"},
        data={"train": ["x"]},
        head={"kind": "medusa"},
        train={"init": "induction"},
    )
    with pytest.raises(RecipeError, match=r"kind 'medusa' has no such start \(kinds that have: eagle3\)"):
        head_wants(recipe, SHAPE)
