from __future__ import annotations

import json

import pytest
import torch

from headtrain.train.metrics import MetricsFile, flatten, report, scalars, unflatten, zeros
from headtrain.types import LossSums


def sums() -> LossSums:
    t = lambda *x: torch.tensor([float(v) for v in x])  # noqa: E731
    return LossSums(
        torch.tensor(30.0, requires_grad=True), torch.tensor(10.0),
        loss=t(20, 8, 0), loss_count=t(10, 8, 0), hits=t(5, 6, 0), accept=t(4, 2, 0), pairs=t(10, 8, 0),
        chain_hits=t(5, 2, 0), chain_pairs=t(10, 4, 0),
    )  # fmt: skip


def test_report():
    got = report(sums())
    assert got["loss"] == 3.0 and got["supervised"] == 10
    assert got["alpha"] == [0.5, 0.5, None] and got["cumulative"] == [0.5, 0.25, 0.0]
    assert got["tau"] == 1.75
    assert got["accuracy"] == [0.5, 0.75, None] and got["acceptance"] == [0.4, 0.25, None]
    assert got["depth_loss"] == [2.0, 1.0, None]
    json.dumps(got, allow_nan=False)
    assert report(zeros(2))["loss"] == 0.0 and report(zeros(2))["tau"] == 1.0
    assert scalars(got, "eval")["eval/alpha_2"] == 0.5 and "eval/alpha_3" not in scalars(got, "eval")


def test_ranks_add_up():
    flat = flatten(sums(), 5)
    assert flat.dtype == torch.float64 and flat.numel() == 2 + 7 * 5
    both = unflatten(flat + flat)
    assert float(both.count) == 20 and both.chain_pairs.tolist() == [20, 8, 0, 0, 0]
    assert report(both)["tau"] == 1.75


def test_file_truncates_to_a_step_and_forgets_half_a_line(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (2, 4, 5, 6):
        file.append({"step": step, "kind": "train"})
    with open(file.path, "a") as f:
        f.write('{"step": 8, "lo')
    assert file.truncate(5) == 0
    assert [x["step"] for x in file.read()] == [2, 4, 5]
    file.append({"step": 6, "kind": "eval"})
    lines = [f'{{"step": {step}, "kind": "train"}}\n' for step in (2, 4, 5)]
    assert file.path.read_text() == "".join(lines) + '{"step": 6, "kind": "eval"}\n'
    assert MetricsFile(tmp_path / "none").read() == []


@pytest.mark.parametrize(
    "torn",
    [
        b'{"step": 3, "kind": "\xff\xfe"}',
        b"\0\0\0\0",
        b'{"step": 3, "ki{"step": 4, "kind": "train"}',
        b"[3]",
        b'{"step": "3", "kind": "train"}',
        b"[" * 100_000,
    ],
)
def test_lines_that_a_dying_machine_left_are_passed_over_and_counted(tmp_path, torn):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    line = b'{"step": 2, "kind": "train"}'
    file.path.write_bytes(b"\n".join([line, torn, line.replace(b"2", b"5"), torn]))
    assert [x["step"] for x in file.read()] == [2, 5]
    assert file.truncate(5) == 1
    assert file.path.read_bytes() == line + b"\n" + line.replace(b"2", b"5") + b"\n"


@pytest.mark.parametrize("missing", [0, 1])
def test_truncate_without_file(tmp_path, missing):
    MetricsFile(tmp_path / "m.jsonl").truncate(missing)
    assert (tmp_path / "m.jsonl").read_text() == ""
