"""Copies of what followed an earlier occurrence, against a search written out."""

from __future__ import annotations

import pytest
import torch
from fakes import counting
from rigs import PROMPT, tiny_target

from headtrain.decode.drafters import Sampling
from headtrain.decode.generate import generate
from headtrain.decode.lookup import LookupDrafter

GREEDY = Sampling(0.0, 1.0, 0, torch.Generator())


def search(text: list[int], begin: int, end: int, longest: int, shortest: int, k: int) -> list[int]:
    """The most recent earlier occurrence of the longest suffix that occurs in text[begin:end] with a token after."""
    for m in range(longest, shortest - 1, -1):
        for after in range(end - 1, begin + m - 1, -1):
            if len(text) >= m and text[after - m : after] == text[len(text) - m :]:
                return text[after : min(after + k, end)]
    return []


@pytest.mark.parametrize("where", ["text", "prompt", "answer"])
@pytest.mark.parametrize(("longest", "shortest"), [(3, 1), (4, 2), (1, 1)])
def test_copies_equal_a_plain_search(where, longest, shortest):
    g = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, 4, (12,), generator=g)
    answer = torch.randint(0, 4, (60,), generator=g).tolist()
    drafter = LookupDrafter(where, longest, shortest)
    drafter.start(prompt, 100)
    text, pending, empty, drafted = prompt.tolist(), prompt[1:].tolist(), 0, 0
    while answer:
        taken, answer = answer[:3], answer[3:]
        text += taken
        pending += taken
        proposal = drafter.draft(torch.tensor(pending), None, None, 5, GREEDY)
        begin, end = {"text": (0, len(text)), "prompt": (0, 12), "answer": (12, len(text))}[where]
        want = search(text, begin, end, longest, shortest, 5)
        assert (proposal.tokens.tolist() if proposal else []) == want
        drafted, empty, pending = drafted + bool(want), empty + (not want), []
    assert drafted > 3


def test_nothing_is_drafted_where_nothing_is_found():
    drafter = LookupDrafter("text", 3, 2)
    drafter.start(torch.tensor([1, 2, 3]), 10)
    assert drafter.draft(torch.tensor([2, 3, 4]), None, None, 4, GREEDY) is None


def test_an_occurrence_that_begins_in_the_prompt_is_none_in_the_answer():
    drafter = LookupDrafter("answer", 2, 2)
    drafter.start(torch.tensor([9, 1]), 20)
    assert drafter.draft(torch.tensor([1, 2, 5, 1, 2]), None, None, 3, GREEDY) is None


def test_branches_are_distinct_and_share_their_beginnings():
    drafter = LookupDrafter("text", 2, 1, branches=3, nodes=7)
    prompt = [1, 2, 9, 5, 1, 2, 7, 8, 1, 2, 7, 6, 3]
    drafter.start(torch.tensor(prompt), 50)
    proposal = drafter.draft(torch.tensor([*prompt[1:], 1, 2]), None, None, 3, GREEDY)
    # most recent first: 7 6 3; 7 8 1; 9 5 1
    assert proposal.tokens.tolist() == [7, 6, 3, 8, 1, 9, 5] and proposal.parents == [-1, 0, 1, 0, 3, -1, 5]


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("where", ["text", "prompt", "answer"])
def test_lookup_leaves_the_text_as_it_is(where, branches):
    """On a target whose text repeats itself."""
    target = tiny_target(initializer_range=0.05)
    plain = generate(target, PROMPT, max_new_tokens=300, eos_ids=())
    drafter = LookupDrafter(where, 3, 1, branches=branches, nodes=12)
    out = generate(target, PROMPT, drafter=drafter, k=5, max_new_tokens=300, eos_ids=())
    assert out.tokens == plain.tokens
    if where == "text":
        assert out.tau > 2


def test_lookup_at_a_temperature_finds_a_counting_text():
    out = generate(counting(30), [*range(12), 0], drafter=LookupDrafter("prompt", 2, 1), k=4, max_new_tokens=9,
                   temperature=0.05, eos_ids=())  # fmt: skip
    assert out.tokens == list(range(1, 10)) and out.tau > 2


def test_settings_that_cannot_be():
    for bad in (dict(longest=1, shortest=2), dict(shortest=0), dict(branches=0), dict(nodes=0)):
        with pytest.raises(ValueError, match="expected"):
            LookupDrafter(**bad)
    with pytest.raises(ValueError, match="does not fit the target's context of 8"):
        generate(counting(context=8), [0], drafter=LookupDrafter(branches=2, nodes=8), max_new_tokens=2)
