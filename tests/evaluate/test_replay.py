"""One batched pass and a walk over the text give the rounds of separate decodings, exactly."""

from __future__ import annotations

import pytest
import tiny
import torch

from headtrain.decode.draft_model import ModelDrafter
from headtrain.decode.drafters import HeadDrafter
from headtrain.decode.generate import Round, generate
from headtrain.decode.lookup import LookupDrafter
from headtrain.evaluate.acceptance import Case, Prompt, Settings, measure
from headtrain.evaluate.replay import Matches, replay
from headtrain.heads.catalog import build_head, parse_head
from headtrain.target.model import Target
from headtrain.types import Batch, Row

PROMPTS = [Prompt([5, 17, 230 + n, 41, 8, 99 + n, 7], "a", str(n)) for n in range(4)]
HEADS = [
    {"kind": "eagle3", "depth": 8, "draft_vocab_size": None},
    {"kind": "medusa", "num_heads": 8},
    {"kind": "eagle1", "depth": 8},
    {"kind": "mtp", "depth": 8},
]


@pytest.fixture(scope="module")
def target():
    lively = {"tie_word_embeddings": False, "num_hidden_layers": 4, "initializer_range": 0.2}
    target = Target.of(tiny.model(0, **lively, max_position_embeddings=60))
    target.tokenizer = tiny.tokenizer()
    return target


def drafter_of(target, config) -> HeadDrafter:
    """A head that knows some of the texts to come, so that rounds of every length occur."""
    torch.manual_seed(3)
    head = build_head(parse_head(config), target.shape, None)
    head.attach(target.weights())
    head.init_from_target(target.weights())
    rows = []
    for prompt in PROMPTS[:2]:
        text = generate(target, prompt.ids, max_new_tokens=40, eos_ids=()).tokens
        rows.append(Row(prompt.ids + text, [0] * len(prompt.ids) + [1] * len(text)))
    batch = Batch.pack(rows)
    features = target.features(batch, head.wants())
    optimizer = torch.optim.AdamW(head.trainable().values(), lr=5e-3)
    for _ in range(60):
        sums = head.loss(batch, features, target.teacher(), min(head.wants().depth, 4))
        (sums.total / sums.count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return HeadDrafter(head.requires_grad_(False))


def compared(target, drafter, ks, **settings):
    cases = [Case(drafter, k, replay=replay) for k in ks for replay in (False, True)]
    sweep = measure(target, cases, PROMPTS, Settings(**settings), quiet=True)
    for decoded, replayed in zip(sweep.cases[::2], sweep.cases[1::2], strict=True):
        assert [r.rounds for r in replayed.results] == [r.rounds for r in decoded.results]
        assert decoded.summary().identical == len(PROMPTS) and replayed.summary().alpha == decoded.summary().alpha
    return sweep


@pytest.mark.parametrize("config", HEADS, ids=lambda c: c["kind"])
def test_every_k_equals_separate_decodings(target, config):
    drafter = drafter_of(target, config)
    ends = generate(target, PROMPTS[0].ids, max_new_tokens=30, eos_ids=()).tokens[17:18]
    for settings in ({"max_new_tokens": 30, "eos_ids": ends}, {"max_new_tokens": 99, "eos_ids": ()}):
        sweep = compared(target, drafter, (1, 2, 8, 3, 5), **settings)
        accepted = {x.accepted for case in sweep.cases for r in case.results for x in r.rounds}
        assert len(accepted) > 3, "no rounds of different lengths: the test shows nothing"


def test_lookup_and_draft_models_are_replayed_by_drafting_at_every_token(target):
    target_like = tiny.model(0, tie_word_embeddings=False, num_hidden_layers=4, initializer_range=0.2)
    with torch.no_grad():
        target_like.lm_head.weight += 0.05 * torch.randn(384, 64, generator=torch.Generator().manual_seed(1))
    near = Target.of(target_like)
    near.tokenizer = tiny.tokenizer()
    for drafter in (LookupDrafter("text", 2, 1), ModelDrafter(near, target)):
        compared(target, drafter, (1, 3), max_new_tokens=30)


def test_rounds_by_hand():
    """Answer of 7 tokens, the last ends the text."""
    matches = Matches(proposed=[3] * 7, right=[2, 0, 0, 3, 2, 1, 0])
    assert replay(matches, 3, prompt=4, limit=99) == [Round(3, 2, 3, 3), Round(3, 3, 3, 3)]
    assert replay(matches, 1, prompt=4, limit=99) == [
        Round(1, 1, 2, 1),
        Round(1, 0, 1, 1),
        Round(1, 1, 2, 1),
        Round(1, 1, 1, 1),
    ]
    cut = replay(matches, 3, prompt=4, limit=7)  # the last but one leaves room for fewer
    assert cut == [Round(3, 2, 3, 3), Round(2, 2, 3, 2)]
    assert replay(matches, 3, prompt=4, context=10) == cut
    assert replay(Matches([0, 0], [0, 0]), 3, prompt=4, limit=9) == [Round(0, 0, 1, 0)]
    assert replay(Matches([3], [0]), 3, prompt=4, limit=9) == []
