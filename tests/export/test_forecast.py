"""The dry-run's forecast of engines is what an export of the trained head does."""

from __future__ import annotations

from pathlib import Path

import export_cases as cases
import pytest

from headtrain.config import load_recipe
from headtrain.estimate import estimate
from headtrain.export.core import export_head
from headtrain.export.engines import NATIVE, ExportError
from headtrain.export.forecast import lines, refusals
from headtrain.heads.catalog import outline, parse_head
from headtrain.heads.io import load_head

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.mark.parametrize("name", sorted(cases.HEADS))
def test_it_says_what_the_export_says(name, tmp_path):
    """``ENGINES_OF``: the exports that test_forms makes and reads back."""
    folder = cases.checkpoint(tmp_path / "c", name)
    config = load_head(folder)[0].config
    found = refusals(outline(config, cases.SHAPE))
    assert [NATIVE, *(engine for engine, why in found.items() if not why)] == list(cases.ENGINES_OF[name])
    for engine, why in found.items():
        if why:
            with pytest.raises(ExportError) as refused:
                export_head(folder, engine, tmp_path / engine, weights=cases.weights())
            assert why in str(refused.value) or why.startswith("no version has a form")


@pytest.mark.parametrize(
    ("recipe", "good", "bad"),
    [
        ("llama-3.1-8b-eagle3", ["vllm", "speculators", "sglang", "trtllm"], {"hf": "plain RoPE"}),
        ("gemma-3-4b-eagle3", [], {"vllm": "silu", "sglang": "silu"}),
        ("smollm2-135m-eagle1", [], {"vllm": "headtrain vocab", "trtllm": "no version has a form"}),
        ("llama-3.1-8b-eagle1", ["vllm", "sglang"], {"speculators": "no version has a form"}),
        ("llama-3.1-8b-medusa", ["vllm", "trtllm", "hf"], {"sglang": "no version has a form"}),
        ("qwen3-8b-mtp", [], {"vllm": "norms of queries and keys"}),
        ("smollm2-135m-mtp", [], {"vllm": "headtrain vocab"}),
    ],
)
def test_the_dry_run_names_the_engines_of_a_recipe(recipe, good, bad):
    of = load_recipe(RECIPES / f"{recipe}.yaml")
    config = parse_head(of.head)
    found = refusals(outline(config, of.target.expect.shape()))
    assert [name for name, why in found.items() if not why] == good
    for engine, why in bad.items():
        assert why in found[engine]
    text = "\n".join(estimate(of, 1000).lines())
    assert f"engines     {', '.join(good) or 'none'} will load it as it is trained" in text


def test_a_checkpoints_own_module_is_stitched():
    of = load_recipe(RECIPES / "mimo-7b-mtp.yaml")
    config = parse_head(of.head)
    said = lines(outline(config, of.target.expect.shape()))
    assert len(said) == 1 and "headtrain stitch" in said[0]
