"""The loops: equal to the target alone at temperature 0, exact ends, honest counts."""

from __future__ import annotations

import math

import pytest
import torch
from fakes import FixedDrafter, MarkovTarget, ScriptedDrafter, counting
from rigs import PROMPT, head_for, overfit, reference_greedy, tiny_target

from headtrain.decode.drafters import HeadDrafter
from headtrain.decode.generate import Round, generate

SOME = list(range(3, 384, 6))  # a reduced draft vocabulary


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def text(target):
    return reference_greedy(target, PROMPT, 120)


# -- temperature 0 ---------------------------------------------------------------------------------------------


def test_plain_equals_whole_forwards(target, text):
    out = generate(target, PROMPT, max_new_tokens=120, eos_ids=())
    assert out.tokens == text and len(set(text)) > 80
    assert out.rounds == [Round(0, 0, 1)] * 119 and out.tau == 1.0 and out.stop == "length"
    assert len(out.gaps) == 120 and 0 < out.min_gap == min(out.gaps)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("eagle3", {"draft_ids": SOME, "depth": 5}),
        ("eagle3", {"depth": 5, "fc_norm": True, "norm_output": True}),
        ("medusa", {"num_heads": 5, "draft_ids": SOME}),
        ("medusa", {"num_heads": 5, "own_lm_head": False}),
    ],
)
def test_random_heads_leave_the_text_as_it_is(target, text, kind, more, k):
    drafter = HeadDrafter(head_for(target, kind, **more))
    out = generate(target, PROMPT, drafter=drafter, k=k, max_new_tokens=40, eos_ids=())
    assert out.tokens == text[:40], f"best two logits there: {min(out.gaps):.1e} apart"
    assert 1 + sum(r.committed for r in out.rounds) == 40


@pytest.mark.parametrize(("kind", "more"), [("eagle3", {"depth": 5}), ("medusa", {"num_heads": 5})])
def test_an_overfitted_head_accepts_much_and_leaves_the_text_as_it_is(target, text, kind, more):
    outside = set(text[20:120:20])  # never drafted, so that runs break off
    head = head_for(target, kind, draft_ids=[i for i in range(384) if i not in outside], **more)
    overfit(target, head, PROMPT + text, steps=40)
    for k in range(1, 6):
        out = generate(target, PROMPT, drafter=HeadDrafter(head), k=k, max_new_tokens=120, eos_ids=())
        assert out.tokens == text
        accepted = {r.accepted for r in out.rounds}
        assert max(accepted) >= min(k, 3) and min(accepted) < k and out.tau > min(1 + 0.25 * k, 1.5)
    assert len(accepted) > 2


def test_several_hundred_tokens_with_a_reduced_vocabulary(target):
    text = generate(target, PROMPT, max_new_tokens=300, eos_ids=()).tokens
    head = head_for(target, "medusa", num_heads=4, draft_ids=sorted(set(text[:250])))
    overfit(target, head, PROMPT + text)
    out = generate(target, PROMPT, drafter=HeadDrafter(head), k=4, max_new_tokens=300, eos_ids=())
    assert out.tokens == text and out.tau > 2


def test_bfloat16_head_on_a_float32_target(target, text):
    head = head_for(target, "eagle3", depth=3).to(torch.bfloat16)
    assert generate(target, PROMPT, drafter=HeadDrafter(head), k=3, max_new_tokens=20, eos_ids=()).tokens == text[:20]


def test_a_prompt_longer_than_one_prefill_chunk(target, monkeypatch):
    from headtrain.decode import generate as module

    want = generate(target, PROMPT * 3, max_new_tokens=12, eos_ids=()).tokens
    monkeypatch.setattr(module, "PREFILL_CHUNK", 4)
    drafter = HeadDrafter(head_for(target, "eagle3", depth=3))
    assert generate(target, PROMPT * 3, drafter=drafter, k=3, max_new_tokens=12, eos_ids=()).tokens == want


# -- ends and counts -------------------------------------------------------------------------------------------


COUNT = list(range(1, 200))  # the text of a target that counts, after the prompt [0]


def counts(out) -> list[tuple[int, int, int]]:
    return [(r.drafted, r.accepted, r.committed) for r in out.rounds]


def test_rounds_of_a_known_drafter():
    """Wrong at text positions 3 and 8: prefill gives 0, the rounds 1..3, 4..8, 9..13 and 14..15."""
    target, drafter = counting(), ScriptedDrafter(COUNT, wrong=(3, 8))
    out = generate(target, [0], drafter=drafter, k=4, max_new_tokens=16, eos_ids=())
    assert out.tokens == COUNT[:16]
    assert counts(out) == [(4, 2, 3), (4, 4, 5), (4, 4, 5), (1, 1, 2)]
    assert out.tau == 15 / 4 and out.stop == "length"
    assert drafter.asked == [4, 4, 4, 1]  # the last: two tokens were wanted, one of them the target's own
    assert target.forwards == 1 + 4


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 7, 8, 17])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_max_new_tokens_is_exact(limit, temperature):
    drafter = ScriptedDrafter(COUNT, wrong=(2, 9, 10))
    settings = dict(max_new_tokens=limit, temperature=temperature, eos_ids=(), seed=limit)
    out = generate(counting(256), [0], drafter=drafter, k=3, **settings)
    assert len(out.tokens) == limit and out.stop == "length"
    assert 1 + sum(r.committed for r in out.rounds) == limit
    assert math.isnan(out.tau) == (limit == 1)
    if temperature == 0:
        assert out.tokens == COUNT[:limit]


@pytest.mark.parametrize(
    ("end", "want"),
    [
        (1, []),  # prefill's own token
        (2, [(1, 1, 1)]),  # the first drafted: what was drafted after it could not count
        (4, [(3, 3, 3)]),
        (5, [(4, 4, 4)]),  # the last drafted: no token of the target's own after it
        (6, [(4, 4, 5)]),  # the target's own after a whole run
        (8, [(4, 4, 5), (4, 1, 2)]),  # the target's own after a rejection (position 7 is drafted wrong)
        (10, [(4, 4, 5), (4, 1, 2), (2, 2, 2)]),
    ],
)
def test_the_end_of_text_stops_exactly_there(end, want):
    drafter = ScriptedDrafter(COUNT, wrong=(7,))
    out = generate(counting(), [0], drafter=drafter, k=4, max_new_tokens=30, eos_ids=(end,))
    assert out.tokens == COUNT[:end] and out.stop == "eos"
    assert counts(out) == want


def test_the_targets_own_end_ids_are_the_default():
    target = counting()
    target.eos_ids = (39, 6)
    assert generate(target, [0], max_new_tokens=30).tokens[-1] == 6
    assert len(generate(target, [0], max_new_tokens=30, eos_ids=()).tokens) == 30


@pytest.mark.parametrize("context", [1, 2, 3, 6, 10])
def test_a_full_context_ends_the_text(context):
    """Positions 0..context-1 can be fed; the last of them still yields a token."""
    plain = generate(counting(context=context), [0], max_new_tokens=30, eos_ids=())
    drafter = ScriptedDrafter(COUNT, wrong=(4,))
    out = generate(counting(context=context), [0], drafter=drafter, k=4, max_new_tokens=30, eos_ids=())
    assert out.tokens == plain.tokens == COUNT[:context]
    assert out.stop == plain.stop == "context"


def test_a_drafter_may_propose_less_or_nothing():
    for short in (0, 2):
        out = generate(counting(), [0], drafter=ScriptedDrafter(COUNT, short=short), k=4, max_new_tokens=10, eos_ids=())
        assert out.tokens == COUNT[:10]
        assert {r.drafted for r in out.rounds[:-1]} == {short}
    settings = dict(k=4, max_new_tokens=10, temperature=0.5, eos_ids=())
    assert len(generate(counting(), [0], drafter=ScriptedDrafter(COUNT, short=0), **settings).tokens) == 10


def test_the_same_seed_gives_the_same_text_and_another_another():
    target = MarkovTarget(30)
    noisy = FixedDrafter(target.table * 0.7)

    def text(seed, drafter):
        return generate(target, [0], drafter=drafter, k=3, max_new_tokens=40, temperature=1.0, seed=seed).tokens

    for drafter in (None, noisy):
        assert text(1, drafter) == text(1, drafter) != text(2, drafter)


def test_times_add_up():
    out = generate(counting(), [0], drafter=ScriptedDrafter(COUNT), k=3, max_new_tokens=20)
    assert min(out.times.prefill, out.times.draft, out.times.verify, out.times.other) > 0
    assert out.tokens_per_second == 19 / (out.times.draft + out.times.verify + out.times.other)


# -- what cannot be decoded ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "empty"),
        ({"prompt_ids": [1] * 11}, "prompt has 11 tokens, the target's context 10"),
        ({"prompt_ids": [40]}, "another tokenizer"),
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"k": 0, "drafter": ScriptedDrafter(COUNT)}, "k 0"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=message):
        generate(counting(context=10), **{"prompt_ids": [0], **change})


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("drafter", [None, ScriptedDrafter(COUNT), FixedDrafter(torch.zeros(40, 40, 40))])
def test_logits_that_are_not_finite_stop(drafter, temperature):
    target = counting()
    target.rows = target.rows.clone()
    target.rows[:, 1:] = math.nan  # after any token but the prompt's, so that every path meets it
    with pytest.raises(ValueError, match="finite"):
        generate(target, [0], drafter=drafter, k=3, max_new_tokens=30, temperature=temperature, seed=2, eos_ids=())


def test_a_head_with_one_module_a_depth_refuses_a_longer_chain(target):
    drafter = HeadDrafter(head_for(target, "medusa", num_heads=3))
    assert drafter.max_k == 3
    with pytest.raises(ValueError, match="4 tokens deep .* drafts at most 3"):
        generate(target, PROMPT, drafter=drafter, k=4, max_new_tokens=4)


def test_a_recurrent_head_warns_past_its_trained_depth(target, text):
    drafter = HeadDrafter(head_for(target, "eagle3", depth=2), trained_depth=2)
    assert drafter.max_k is None
    expected = "drafting 4 tokens deep with .* trained to depth 2: .* acceptance usually falls off after depth 2"
    with pytest.warns(UserWarning, match=expected):
        out = generate(target, PROMPT, drafter=drafter, k=4, max_new_tokens=20, eos_ids=())
    assert out.tokens == text[:20]
