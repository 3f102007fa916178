"""Draft vocabularies: how they are chosen, checked and changed under a trained head."""

from __future__ import annotations

import json

import pytest
import tiny
import torch

from headtrain import vocab
from headtrain.config import RecipeError, TargetSection
from headtrain.heads.catalog import build_head, parse_head
from headtrain.heads.io import FILE, head_metadata, head_tensors, load_head, save_head, save_tensors
from headtrain.heads.resize import continue_from, draft_rows, with_draft_ids
from headtrain.target.load import load_target
from headtrain.types import Batch

V = 384
KINDS = [
    {"kind": "eagle3", "depth": 2, "draft_vocab_size": 64},
    {"kind": "medusa", "num_heads": 2, "draft_vocab_size": 64, "labels": "soft"},
    {"kind": "mtp", "depth": 2, "draft_vocab_size": 64, "labels": "soft"},
    {"kind": "eagle1", "depth": 2, "draft_vocab_size": 64},
    {"kind": "mtp", "depth": 2, "draft_vocab_size": 64, "own_lm_head": True},
]


@pytest.fixture(scope="module")
def target(tiny_folder):
    return load_target(TargetSection(path=str(tiny_folder)))


def trained(target, config: dict, ids: torch.Tensor | None):
    """A head whose every tensor is random: what a training might have left."""
    head = build_head(parse_head(config), target.shape, ids)
    head.attach(target.weights())
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return head


def some(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:size].sort().values


# -- choosing ------------------------------------------------------------------------------------------------------


def test_a_corpus_of_few_tokens_is_filled_with_the_lowest_unseen_ids_and_says_so():
    """CASES 16."""
    counts = torch.zeros(200, dtype=torch.int64)
    seen = torch.arange(100, 200, 10)
    counts[seen] = torch.arange(10, 0, -1)
    with pytest.warns(
        UserWarning, match="10 distinct supervised tokens, fewer than the draft vocabulary of 64.* 54 unseen"
    ):
        ids = vocab.choose(counts, 64)
    assert ids.tolist() == [*range(54), *seen.tolist()]


@pytest.mark.parametrize("size", [0, -1, 11])
def test_choose_refuses_a_size_that_the_target_has_not(size):
    with pytest.raises(ValueError, match=f"draft vocabulary of {size}: expected 1 to 10"):
        vocab.choose(torch.ones(10, dtype=torch.int64), size)


def test_a_larger_choice_from_the_same_counts_holds_the_smaller_one():
    counts = torch.randint(0, 5, (200,), generator=torch.Generator().manual_seed(1))
    for small, large in ((1, 2), (20, 60), (60, 200)):
        assert set(vocab.choose(counts, small).tolist()) < set(vocab.choose(counts, large).tolist())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, 3, 5], "strictly increasing"),
        ([5, 3], "strictly increasing"),
        ([0, 10], "outside the target's 0..9"),
        ([-1, 2], "outside"),
        ([], "expected an int64 vector"),
    ],
)
def test_ids_that_are_no_draft_vocabulary(ids, message):
    with pytest.raises(ValueError, match=message):
        vocab.validate(torch.tensor(ids, dtype=torch.int64), 10)


# -- changing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", KINDS, ids=lambda c: c["kind"] + "-own" * c.get("own_lm_head", False))
@pytest.mark.parametrize("size", [32, 64, 128, V])
def test_kept_tokens_keep_their_logits_and_new_ones_get_a_fresh_heads(target, config, size):
    """Against logits by token: kept tokens exactly as before, new ones by the rows that a fresh head starts with."""
    old = trained(target, config, some(64))
    ids = None if size == V else some(size, seed=5)
    new = with_draft_ids(old, ids, target.weights())
    assert new.draft_vocab_size == size and new.config.draft_vocab_size == (None if ids is None else size)
    fresh = build_head(new.config, target.shape, ids)
    fresh.attach(target.weights())
    fresh.init_from_target(target.weights())
    for name, tensor in old.state_dict().items():
        if name not in draft_rows(old):
            assert torch.equal(new.state_dict()[name], tensor), name
            assert tensor.shape == fresh.state_dict()[name].shape
    mine = list(range(V)) if ids is None else ids.tolist()
    before = old.draft_ids.tolist()
    for name in draft_rows(old):
        for row, token in enumerate(mine):
            where = (old, before.index(token)) if token in before else (fresh, row)
            assert torch.equal(new.state_dict()[name][row], where[0].state_dict()[name][where[1]]), (name, token)
    assert len(set(mine) & set(before)) > 0

    batch = Batch.pack(tiny.rows((24,)))
    features = target.features(batch, old.wants())
    sessions = [head.session(32) for head in (old, new)]
    layers, final = features.layers[:4], torch.randn(4, 64)
    logits = [session.extend(batch.ids[1:5], layers, final) for session in sessions]
    at = {token: row for row, token in enumerate(mine)}
    both = [token for token in before if token in at]
    # the products run over another number of rows
    torch.testing.assert_close(
        logits[1][[at[t] for t in both]], logits[0][[before.index(t) for t in both]], rtol=1e-4, atol=1e-5
    )
    loss = new.loss(batch, target.features(batch, new.wants()), target.teacher(), new.wants().depth)
    assert loss.total.isfinite() and loss.count > 0


@pytest.mark.parametrize("size", [1, 2])
def test_the_smallest_vocabularies(target, size):
    old = trained(target, KINDS[0], some(64))
    new = with_draft_ids(old, old.draft_ids[:size], target.weights())
    assert draft_rows(new) == ["lm_head.weight"]
    assert torch.equal(new.lm_head.weight, old.lm_head.weight[:size])


def test_all_ids_are_the_whole_vocabulary(target):
    whole = with_draft_ids(trained(target, KINDS[0], some(64)), torch.arange(V), target.weights())
    assert whole.draft_ids is None and whole.config.draft_vocab_size is None and whole.draft_vocab_size == V


def test_there_and_back_is_the_same_head(target):
    old = trained(target, KINDS[0], some(64))
    grown = with_draft_ids(old, None, target.weights())
    back = with_draft_ids(grown, old.draft_ids, target.weights())
    mine, theirs = head_tensors(old), head_tensors(back)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)
    assert back.config == old.config


def test_what_has_no_vocabulary_to_change(target):
    eagle1 = trained(target, {"kind": "eagle1", "depth": 2}, None)
    assert draft_rows(eagle1) == []
    shared = trained(target, {"kind": "medusa", "num_heads": 2, "own_lm_head": False}, None)
    with pytest.raises(RecipeError, match="needs own_lm_head=true"):
        with_draft_ids(shared, some(8), target.weights())
    with pytest.raises(ValueError, match=f"outside the target's 0..{V - 1}"):
        with_draft_ids(trained(target, KINDS[0], some(64)), torch.tensor([1, V]), target.weights())


def test_heads_of_another_form_do_not_fit(target):
    old = trained(target, KINDS[0], some(64))
    other = build_head(parse_head(KINDS[0] | {"fc_norm": True, "intermediate_size": 48}), target.shape, some(64))
    with pytest.raises(ValueError, match=r"there: .*gate_proj.weight: shape.*missing fc_norm.0.weight"):
        continue_from(other, old, "there")


# -- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", KINDS, ids=lambda c: c["kind"] + "-own" * c.get("own_lm_head", False))
def test_a_reduced_vocabulary_without_its_map_is_an_error(target, config, tmp_path):
    """CASES 17: never "the first N ids"."""
    head = trained(target, config, some(64))
    save_head(tmp_path, head, head_metadata(head, target.identity))
    tensors = head_tensors(head)
    del tensors["draft_ids"]
    save_tensors(tmp_path / FILE, tensors)
    with pytest.raises(ValueError, match="draft vocabulary of 64 without its map"):
        load_head(tmp_path)
    meta = json.loads((tmp_path / "headtrain.json").read_text())
    meta["draft_vocab"]["sha256"] = None  # the record lost it, too
    (tmp_path / "headtrain.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="asks for a draft vocabulary of 64.*map `draft_ids` of no ids"):
        load_head(tmp_path)


def test_a_map_that_the_record_does_not_know(target, tmp_path):
    head = trained(target, KINDS[0], some(64))
    metadata = head_metadata(head, target.identity)
    metadata.draft_vocab.sha256 = None
    save_head(tmp_path, head, metadata)
    with pytest.raises(ValueError, match="they must agree"):
        load_head(tmp_path)
    metadata.draft_vocab.sha256 = vocab.sha256(some(64, seed=9))
    save_head(tmp_path, head, metadata)
    with pytest.raises(ValueError, match="is not the one that headtrain.json names"):
        load_head(tmp_path)
    save_tensors(tmp_path / FILE, head_tensors(head) | {"draft_ids": torch.arange(64) + V - 63})
    with pytest.raises(ValueError, match=f"outside the target's 0..{V - 1}"):
        load_head(tmp_path)
