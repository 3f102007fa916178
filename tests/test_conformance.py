"""What every head in the catalogue must do, crossed with the same tests. A new head is tested by being listed."""

from __future__ import annotations

import dataclasses
import re

import checkpoint_families
import pytest
import tiny
import torch
from devices import Devices, on_device

from headtrain.config import TargetSection
from headtrain.export.core import export_head
from headtrain.export.engines import ENGINES, ExportError, serves
from headtrain.export.folder import verify_folder
from headtrain.heads.catalog import HEADS, build_head, parse_head
from headtrain.heads.io import head_metadata, head_tensors, load_head, save_head
from headtrain.shift import pair_mask
from headtrain.target.load import load_target
from headtrain.types import Batch, Row

VARIANTS = {
    "eagle1": [  # noise would make two runs differ: it has tests of its own
        {"depth": 3, "noise": 0.0},
        {"depth": 3, "steps": 2, "topk_weight": 1.0, "bias": True, "noise": 0.0},
        {"depth": 2, "draft_vocab_size": 64, "noise": 0.0},
    ],
    "eagle3": [{"depth": 3, "draft_vocab_size": 64}, {"depth": 2, "draft_vocab_size": None, "fc_norm": True}],
    "mtp": [
        {"depth": 3},
        {"depth": 2, "context": "own", "labels": "soft", "start": "normed", "recycle": "raw", "draft_vocab_size": 64},
        {"depth": 2, "concat": "embed_first", "own_lm_head": True, "attention_bias": True, "qk_norm": True},
        {"depth": 3, "modules": 3},
    ],
    "mtp-checkpoint": [
        {"depth": 3},
        {"depth": 2, "context": "own", "labels": "soft", "draft_vocab_size": 64},
        {"depth": 2, "recycle": "normed"},
    ],
    "medusa": [{"num_heads": 2}, {"num_heads": 3, "draft_vocab_size": 64, "labels": "soft"}, {"own_lm_head": False}],
}
# where a head needs a target of another family than Llama, that of each variant
FAMILIES = {"mtp-checkpoint": ["mimo", "deepseek", "qwen3-next"]}
CASES = [(kind, n) for kind in HEADS for n in range(len(VARIANTS[kind]))]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request):
    return request.param


@pytest.fixture(scope="module")
def targets():
    return {}


@pytest.fixture
def target(case, targets, tiny_folder, tmp_path_factory):
    kind, number = case
    name = FAMILIES[kind][number] if kind in FAMILIES else "llama"
    if name not in targets:
        folder = tiny_folder
        if name != "llama":
            folder = tmp_path_factory.mktemp(name)
            checkpoint_families.save(folder, name, tokenizer=tiny.tokenizer(), vocab_size=384)
        targets[name] = load_target(TargetSection(path=str(folder)))
    return targets[name]


@pytest.fixture
def head(case, target):
    kind, number = case
    config = parse_head({"kind": kind, **VARIANTS[kind][number]})
    size = HEADS[kind].uses_draft_vocab(config, target.shape)
    ids = None if size is None else torch.randperm(target.shape.vocab_size)[:size].sort().values
    torch.manual_seed(1)
    head = build_head(config, target.shape, ids)
    head.attach(target.weights())
    head.init_from_target(target.weights())
    return head


def run(head, target, rows):
    batch = Batch.pack(rows)
    return head.loss(batch, target.features(batch, head.wants()), target.teacher(), head.wants().depth)


def test_every_head_has_variants():
    assert VARIANTS.keys() == HEADS.keys()


def test_only_the_heads_parameters_move(head, target):
    before = {n: t.clone() for n, t in target.model.state_dict().items()}
    own = {n: p.detach().clone() for n, p in head.named_parameters()}
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(2):  # a parameter behind one that starts at zero has no gradient in the first step
        optimizer.zero_grad()
        run(head, target, tiny.rows((24, 9, 33))).total.backward()
        optimizer.step()
    assert all(torch.equal(t, before[n]) for n, t in target.model.state_dict().items())
    still = [n for n, p in head.named_parameters() if torch.equal(p, own[n])]
    assert not still, f"never trained: {still}"


def test_what_a_head_makes_is_made_on_its_device(head, target):
    """Training, its count of operations, and drafting, as on an accelerator (see ``devices``)."""
    batch, depth = Batch.pack(tiny.rows((24, 9, 33))), head.wants().depth
    features, teacher = target.features(batch, head.wants()), target.teacher()
    on_device(head, batch, features, teacher)
    with Devices():
        for training in (True, False):
            head.train(training).loss(batch, features, teacher, depth)
        head.flops(batch, depth)
        head.chain_hits(batch, features, depth)
        with torch.no_grad():
            session = head.session(64)
            first = session.extend(batch.ids[1:5], features.layers[:4], features.final[:4])
            best = first.topk(2).indices
            tokens = best if head.draft_ids is None else head.draft_ids[best]
            session.expand(torch.tensor([-1, -1]), tokens)
            session.extend(batch.ids[5:7], features.layers[4:6], features.final[4:6])


def test_training_lowers_the_loss(head, target):
    rows = tiny.rows((24, 9, 33))
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        sums = run(head, target, rows)
        (sums.total / sums.count).backward()
        optimizer.step()
        losses.append(sums.total.item())
    assert losses[-1] < 0.97 * losses[0]  # soft labels: most of it is the entropy of a random target


def test_save_and_load_give_the_same_head(head, target, tmp_path):
    save_head(tmp_path, head, head_metadata(head, target.identity))
    again, metadata = load_head(tmp_path)
    mine, theirs = head_tensors(head), head_tensors(again)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)
    assert again.config == head.config and metadata.head.depth == head.trained_depth(head.wants().depth)
    again.attach(target.weights())
    rows = tiny.rows((24, 9))
    assert torch.equal(run(head, target, rows).total, run(again, target, rows).total)


def test_every_export_is_strict_and_repeatable(head, target, tmp_path):
    save_head(tmp_path / "head", head, head_metadata(head, target.identity))
    for name, engine in ENGINES.items():
        if not serves(engine, type(head)):
            continue
        try:
            head.export_spec(engine.dialect) if engine.dialect in type(head).dialects else None
        except ValueError as error:  # this configuration is refused by name, before anything is written
            with pytest.raises(ExportError, match=re.escape(str(error))):
                export_head(tmp_path / "head", name, tmp_path / name, weights=target.weights())
            assert not (tmp_path / name).exists()
            continue
        for copy in ("a", "b"):
            export_head(
                tmp_path / "head", name, tmp_path / name / copy, weights=target.weights(), target_folder=target.folder
            )
            verify_folder(tmp_path / name / copy)
        files = sorted(p.name for p in (tmp_path / name / "a").iterdir())
        for file in files:
            assert (tmp_path / name / "a" / file).read_bytes() == (tmp_path / name / "b" / file).read_bytes(), file
    for lost in head_tensors(head):
        tensors = head_tensors(head)
        del tensors[lost]
        from headtrain.heads.io import FILE, save_tensors

        save_tensors(tmp_path / "head" / FILE, tensors)
        with pytest.raises(ValueError, match=lost.replace(".", r"\.")):
            load_head(tmp_path / "head")


@pytest.mark.parametrize(
    "rows",
    [
        [Row([5, 6, 7, 8], [0] * 4)],
        [Row([5], [1])],
        [Row([5], [0])],
        [Row([5, 6], [0, 1])],
        [Row([4, 5, 6], [0, 0, 1])],
    ],
    ids=["all masked", "one supervised token", "one token", "two tokens", "only the first token of a turn"],
)
def test_rows_without_a_pair_give_a_finite_zero(head, target, rows):
    sums = run(head, target, rows)
    assert sums.total == 0 and sums.count == 0
    sums.total.backward()
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


def test_a_turn_shorter_than_the_depth_trains_what_there_is(head, target):
    head.eval()  # in training a head may leave out the depths that it does not train
    sums = run(head, target, [Row([5, 6, 7, 8], [0, 1, 1, 1])])
    assert sums.pairs.tolist() == [2.0, 1.0, 0.0, 0.0][: head.wants().depth]
    assert sums.total.isfinite()


def test_rows_of_any_packing_give_the_same_sums(head, target):
    rows = tiny.rows((24, 9, 33))
    together = run(head, target, rows)
    apart = [run(head, target, [row]) for row in rows]
    total = apart[0] + apart[1] + apart[2]
    assert torch.equal(together.pairs, total.pairs) and torch.equal(together.hits, total.hits)
    # fp32 sums in another order
    torch.testing.assert_close(together.total, total.total, rtol=1e-5, atol=0)


@torch.no_grad()
def test_chain_hits_are_those_of_a_session_at_every_position(head, target):
    """Half of the text is what the head itself drafts, so that there are hits at every depth to lose."""
    for parameter in head.parameters():  # what starts at zero, or alike at every depth, would hide faults
        parameter.add_(torch.randn_like(parameter) * 0.1)
    depth, rows = head.wants().depth, tiny.rows((21, 9, 26))
    for copies in range(3):  # a changed token changes later features: the last round counts
        batch = Batch.pack(rows)
        everywhere = dataclasses.replace(head.wants(), final="all")
        features, pairs = target.features(batch, everywhere), pair_mask(batch, depth)
        expected = torch.zeros_like(pairs)
        for d in range(len(rows)):
            a, b = batch.cu[d : d + 2].tolist()
            session = head.session(64)
            for i in range(a, b - 1):
                logits = session.extend(batch.ids[i + 1 : i + 2], features.layers[i : i + 1], features.final[i : i + 1])
                for k in range(1, depth + 1):
                    if not pairs[k - 1, i]:
                        break
                    if k > 1:
                        logits = session.expand(torch.tensor([k - 3]), batch.ids[i + k : i + k + 1])[0]
                    best = int(logits.argmax())
                    token = best if head.draft_ids is None else int(head.draft_ids[best])
                    expected[k - 1, i] = token == batch.ids[i + 1 + k]
                    if copies < 2 and i % (depth + 2) == 0:
                        rows[d].ids[i + 1 + k - a] = batch.ids[i + 1 + k] = token
    assert torch.equal(head.chain_hits(batch, features, depth), expected)
    assert all(0 < expected[k].sum() < pairs[k].sum() for k in range(depth))


def test_a_sequence_longer_than_the_session_is_an_error_or_fits(head, target):
    wants = head.wants()
    session = head.session(4)
    features = torch.zeros(5, len(wants.layers), target.shape.hidden_size), torch.zeros(5, target.shape.hidden_size)
    try:
        logits = session.extend(torch.arange(5), *features)
    except ValueError as error:
        assert "4 positions" in str(error)
    else:
        assert logits.isfinite().all()
