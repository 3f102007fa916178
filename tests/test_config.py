from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from headtrain.config import RecipeError, load_recipe
from headtrain.heads.catalog import parse_head

MINIMAL = {"name": "x", "target": {"path": "t"}, "data": {"train": ["a.jsonl"]}, "head": {"kind": "medusa"}}
RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


def write(tmp_path, **changes):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | changes))
    return path


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("train", {"lrr": 1.0}, "train.lrr: unknown key; did you mean `lr`?"),
        ("data", {"train": ["a"], "max_len": 5}, "data.max_len: unknown key; did you mean `max_length`?"),
        ("trian", {}, "trian: unknown key; did you mean `train`?"),
        ("train", {"schedule": "sinus"}, "train.schedule"),
        ("train", {"lr": -1}, "train.lr"),
        ("train", {"depth_schedule": [{"fraction": 0.5, "depth": 1}]}, "the fractions sum to 0.5, expected 1"),
        ("train", {"depth_schedule": [{"fraction": 1, "deep": 1}]}, "depth_schedule.0.deep: unknown key; did you mean"),
        ("head", {"num_heads": 3}, "needs `kind`"),
        ("target", {}, "target.path: required but not given"),
    ],
)
def test_mistakes_are_named_with_the_nearest_valid_key(tmp_path, section, value, message):
    with pytest.raises(RecipeError) as error:
        load_recipe(write(tmp_path, **{section: value}))
    assert message in str(error.value)


def test_unknown_heads_and_head_keys_name_the_nearest():
    with pytest.raises(RecipeError, match="did you mean 'medusa'"):
        parse_head({"kind": "medusaa"})
    with pytest.raises(RecipeError, match="num_head: unknown key; did you mean `num_heads`"):
        parse_head({"kind": "medusa", "num_head": 3})


def test_dotted_overrides_are_typed(tmp_path):
    path = write(tmp_path)
    recipe = load_recipe(path, ["train.lr=1e-4", "train.steps=7", "data.train=[b.jsonl,c]", "head.num_heads=2"])
    assert (recipe.train.lr, recipe.train.steps, recipe.data.train) == (1e-4, 7, ["b.jsonl", "c"])
    assert recipe.head["num_heads"] == 2
    for wrong in ("train.lr", "=3", "name.x=1"):
        with pytest.raises(RecipeError, match="override"):
            load_recipe(path, [wrong])


def test_files_that_are_no_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(RECIPES[0].parent.parent)
    with pytest.raises(RecipeError, match=r"did you mean recipes/quickstart.yaml"):
        load_recipe("recipes/quikstart.yaml")
    for text in ("- a\n", "a: [", "!!python/object/apply:os.system ['true']"):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(RecipeError, match="bad.yaml"):
            load_recipe(tmp_path / "bad.yaml")


def test_the_estimate_counts_real_rows_and_the_heads_own_size(tiny_folder, tmp_path):
    import json

    from headtrain.capture import capture
    from headtrain.estimate import estimate

    answer = {"role": "assistant", "content": "The quick brown fox jumps over the lazy dog."}
    row = {"messages": [{"role": "user", "content": "Hello!"}, answer]}
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(5)))
    recipe = load_recipe(
        write(tmp_path, target={"path": str(tiny_folder)}, data={"train": [str(data)]}, output=str(tmp_path / "run"))
    )
    plan = estimate(recipe)
    assert plan.counted and plan.rows == 5
    # 4 heads of an H x H block with bias and a V x H lm_head
    assert plan.head_parameters == 4 * (64 * 64 + 64 + 384 * 64)
    store = capture(recipe)
    size = sum(p.stat().st_size for p in (tmp_path / "run/features/train").glob("*.safetensors"))
    assert plan.tokens == store.manifest.tokens
    assert plan.feature_bytes == pytest.approx(size, rel=0.35)  # safetensors' headers weigh on five short rows
