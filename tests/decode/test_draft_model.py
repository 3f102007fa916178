"""A separate draft model: its session against whole forwards, its tokenizer against the target's."""

from __future__ import annotations

import pytest
import tiny
import torch
from rigs import PROMPT, tiny_target

from headtrain.decode.draft_model import ModelDrafter, TokenizerMismatch
from headtrain.decode.generate import generate
from headtrain.decode.tree import DynamicTree, StaticTree
from headtrain.target.model import Target

STATIC = StaticTree.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


def with_tokenizer(target: Target, tokenizer=None) -> Target:
    target.tokenizer = tokenizer or tiny.tokenizer(370)
    return target


@pytest.fixture(scope="module")
def target():
    return with_tokenizer(tiny_target())


@pytest.fixture(scope="module")
def other():
    return with_tokenizer(tiny_target(seed=5, num_hidden_layers=2))


@pytest.fixture(scope="module")
def text(target):
    return generate(target, PROMPT, max_new_tokens=200, eos_ids=()).tokens


def test_the_target_drafting_for_itself_is_always_right(target, text):
    out = generate(target, PROMPT, drafter=ModelDrafter(target, target), k=4, max_new_tokens=200, eos_ids=())
    assert out.tokens == text
    # a near-tie may fall the other way in a forward of another length; not one in this text
    assert all(r.accepted == r.drafted for r in out.rounds)


@pytest.mark.parametrize("plan", [None, STATIC, DynamicTree(10, 4, 3)], ids=str)
def test_another_model_leaves_the_text_as_it_is(target, other, text, plan):
    drafter = ModelDrafter(other, target, plan)
    out = generate(target, PROMPT, drafter=drafter, k=3, max_new_tokens=200, eos_ids=())
    assert out.tokens == text and drafter.describe()["family"] == "draft model"


@pytest.mark.parametrize("plan", [STATIC, DynamicTree(10, 4, 3)], ids=str)
def test_the_sessions_logits_are_those_of_whole_forwards(target, other, plan):
    """Every node's distribution after a partly accepted round, by paths."""
    drafter = ModelDrafter(other, target)
    session = drafter.open(torch.tensor(PROMPT), 60)

    def whole(ids):
        with torch.no_grad():
            return other.model(torch.tensor([ids])).logits[0, -1]

    text = [*PROMPT, 40]
    root = session.extend(torch.tensor(text[1:]), None, None)
    torch.testing.assert_close(root, whole(text), rtol=1e-4, atol=1e-4)
    session.expand(torch.tensor([-1, -1]), torch.tensor([7, 8]))
    text += [8, 60]
    session.extend(torch.tensor([8, 60]), None, None)  # the guesses are forgotten
    first = session.expand(torch.tensor([-1, -1, 0]), torch.tensor([11, 12, 13]))
    second = session.expand(torch.tensor([1, 2]), torch.tensor([14, 15]))
    for got, path in zip([*first, *second], [[11], [12], [11, 13], [12, 14], [11, 13, 15]], strict=True):
        torch.testing.assert_close(got, whole(text + path), rtol=1e-4, atol=1e-4)


def test_another_tokenizer_is_refused_with_the_first_differences(target):
    words = tiny.tokenizer(370)
    words.add_tokens(["<extra>"])
    changed = with_tokenizer(tiny_target(seed=5), words)
    with pytest.raises(TokenizerMismatch, match=r"1 of 384 ids differ\n  id 370: target None, draft model '<extra>'"):
        ModelDrafter(changed, target)
    smaller = with_tokenizer(tiny_target(seed=5), tiny.tokenizer(vocab_size=300))
    with pytest.raises(TokenizerMismatch, match="ids differ"):
        ModelDrafter(smaller, target)
    nameless = tiny_target(seed=5)
    with pytest.raises(TokenizerMismatch, match="both tokenizers"):
        ModelDrafter(nameless, target)


@pytest.mark.parametrize("size", [380, 400])
def test_padded_vocabularies_of_other_sizes_work(target, text, size):
    """As within a family whose sizes pad their embeddings differently: ids beyond the shared ones are never drafted."""
    tokens = len(target.tokenizer.get_vocab())
    assert tokens == 370
    padded = with_tokenizer(tiny_target(seed=5, num_hidden_layers=2, vocab_size=size))
    for temperature in (0.0, 1.0):
        out = generate(target, PROMPT, drafter=ModelDrafter(padded, target), k=3, max_new_tokens=40,
                       temperature=temperature, eos_ids=())  # fmt: skip
        if temperature == 0:
            assert out.tokens == text[:40]
        assert len(out.tokens) == 40


def test_a_draft_model_with_a_shorter_context_says_so(target):
    short = with_tokenizer(tiny_target(seed=5, max_position_embeddings=32))
    with pytest.raises(ValueError, match="grow to 59 tokens, the draft model's context is 32"):
        generate(target, PROMPT, drafter=ModelDrafter(short, target), k=3, max_new_tokens=50)
