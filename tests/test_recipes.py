"""Every recipe in recipes/ is parsed, compared with the target's published config, and dry-run without the Hub."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

from headtrain.capture import plan_rows
from headtrain.config import ExpectedShape, JointSection, Recipe, load_recipe
from headtrain.estimate import duration, estimate, plan_lines, scaled
from headtrain.heads.catalog import build_head, parse_head
from headtrain.target.load import load_tokenizer
from headtrain.target.shape import TargetError, shape_differences, shape_from_config
from headtrain.train import __main__ as command
from headtrain.types import Batch

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
DEEPSEEK_YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
SHORT = {"original_max_position_embeddings": 4096}
# What the published config.json files say (keys that a shape or a parameter count follows from), from the copies that
# the recipes name. experts: of one layer, and how many of them a token passes.
PUBLISHED = {
    "meta-llama/Llama-3.1-8B-Instruct": dict(
        model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
        rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=LLAMA3, tie_word_embeddings=False, vocab_size=128256,
    ),
    "meta-llama/Llama-3.3-70B-Instruct": dict(
        model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=8192, intermediate_size=28672,
        num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=131072,
        rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=LLAMA3, tie_word_embeddings=False, vocab_size=128256,
    ),
    "Qwen/Qwen3-8B": dict(
        model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_size=4096, intermediate_size=12288,
        num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6,
        max_position_embeddings=40960, rope_theta=1000000, rope_scaling=None, tie_word_embeddings=False,
        vocab_size=151936,
    ),
    "Qwen/Qwen3-30B-A3B": dict(
        model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], hidden_size=2048, intermediate_size=6144,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=40960,
        rope_theta=1000000.0, rope_scaling=None, tie_word_embeddings=False, vocab_size=151936,
    ),
    "google/gemma-3-4b-it": dict(
        model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"],
        text_config=dict(
            model_type="gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
            rope_scaling={"factor": 8.0, "rope_type": "linear"}, sliding_window=1024,
        ),
        vision_config=dict(
            model_type="siglip_vision_model", hidden_size=1152, intermediate_size=4304, num_attention_heads=16,
            num_hidden_layers=27, image_size=896, patch_size=14, vision_use_head=False,
        ),
    ),
    "openai/gpt-oss-20b": dict(
        model_type="gpt_oss", architectures=["GptOssForCausalLM"], attention_bias=True, hidden_size=2880,
        intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4, num_hidden_layers=24,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, max_position_embeddings=131072,
        rope_theta=150000, rope_scaling=YARN | SHORT, tie_word_embeddings=False, vocab_size=201088,
    ),
    "deepseek-ai/DeepSeek-V3": dict(
        model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], hidden_size=7168, intermediate_size=18432,
        moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
        first_k_dense_replace=3, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        max_position_embeddings=163840, rms_norm_eps=1e-6, rope_theta=10000, rope_scaling=DEEPSEEK_YARN | SHORT,
        tie_word_embeddings=False, vocab_size=129280,
    ),
    "XiaomiMiMo/MiMo-7B-RL": dict(  # transformers has no MiMo: its classes are Qwen2's, with a module beside them
        model_type="mimo", architectures=["MiMoForCausalLM"], attention_bias=True, head_dim=128, hidden_size=4096,
        intermediate_size=11008, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        num_nextn_predict_layers=1, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=640000,
        rope_scaling=None, tie_word_embeddings=False, vocab_size=151680,
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": dict(
        model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"], hidden_size=2048, intermediate_size=5120,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=512, num_experts_per_tok=10,
        num_hidden_layers=48, full_attention_interval=4, num_attention_heads=16, num_key_value_heads=2, head_dim=256,
        max_position_embeddings=262144, rms_norm_eps=1e-6, rope_theta=10000000, partial_rotary_factor=0.25,
        rope_scaling=None, tie_word_embeddings=False, vocab_size=151936,
    ),
}  # fmt: skip
EXPERTS = {
    "Qwen/Qwen3-30B-A3B": (128, 8),
    "openai/gpt-oss-20b": (32, 4),
    "deepseek-ai/DeepSeek-V3": (256, 8),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (512, 10),
}


def targets() -> set[str]:
    return {load_recipe(path).target.path for path in RECIPES}


def test_every_target_of_the_project_has_a_recipe():
    assert PUBLISHED.keys() | {"targets/smollm2-135m-instruct"} <= targets()


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_parses_and_dry_runs_without_the_hub(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    # a name that is no local folder: the recipe's own `expect` must be enough
    recipe = load_recipe(path, ["target.path=nobody/nothing"])
    assert recipe.name == path.stem and recipe.target.expect is not None
    plan = estimate(recipe)
    assert plan.head_parameters > 1e6 and plan.steps > 0 and plan.target_bytes > 1e8
    assert all(size > 0 for size in plan.training_bytes.values())
    assert (plan.feature_bytes > 0) == (recipe.features.mode == "offline") == (not plan.target_resident)
    # a token costs its head at least a forward and a backward pass of the weights that it meets at depth 1, but not
    # more than every weight and the lm_head at every depth
    trained = plan.steps * recipe.train.batch_tokens * recipe.train.accumulation
    shape = recipe.target.expect.shape()
    every = plan.head_parameters + 2 * shape.vocab_size * shape.hidden_size
    assert 0.05 * 6 * plan.head_parameters < plan.head_flops / trained < 6 * plan.wants.depth * every
    assert plan.target_flops > 2e9 / 8 * 1e5
    lines = plan_lines(recipe)
    assert lines[: len(plan.lines())] == plan.lines()
    assert {"target", "head", "engines", "steps", "arithmetic"} <= {line.partition(" ")[0] for line in plan.lines()}
    shown = yaml.safe_load(lines[-1])
    assert Recipe.model_validate(shown).train == recipe.train
    assert shown["head"] == parse_head(recipe.head).model_dump(mode="json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_expected_shapes_and_parameters_are_the_published_ones(name):
    """The real config gives exactly the recipe's shape, and the model built from it (without memory) its parameters."""
    import transformers

    class MiMoConfig(transformers.Qwen2Config):
        model_type = "mimo"

    values = dict(PUBLISHED[name])
    kind = values.pop("model_type")
    config = MiMoConfig(**values) if kind == "mimo" else transformers.AutoConfig.for_model(kind, **values)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0], transformers.Qwen2ForCausalLM)(config)
    size = {key: p.numel() for key, p in model.named_parameters()}  # a tied lm_head is listed once
    experts = sum(n for key, n in size.items() if ".experts." in key)
    of, used = EXPERTS.get(name, (1, 1))
    active = sum(size.values()) - experts + experts * used // of
    active -= sum(n for key, n in size.items() if "vision_tower" in key or "multi_modal_projector" in key)
    assert (experts > 0) == (name in EXPERTS)
    for path in RECIPES:
        recipe = load_recipe(path)
        if recipe.target.path != name:
            continue
        expect = recipe.target.expect
        assert shape_differences(expect.shape(), shape_from_config(config)) == [], path
        assert expect.parameters == sum(size.values())
        assert (expect.active_parameters or expect.parameters) == active


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_head_can_be_built_at_its_full_size(path):
    recipe = load_recipe(path)
    shape, config = recipe.target.expect.shape(), parse_head(recipe.head)
    with torch.device("meta"):
        head = build_head(config, shape, None)
    assert all(0 <= layer <= shape.num_layers for layer in head.wants().layers)
    assert recipe.eval.k <= (head.max_depth or recipe.eval.k)


# -- the estimate --------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_recipe(tiny_folder, tmp_path) -> Recipe:
    answer = {"role": "assistant", "content": "The quick brown fox jumps over the lazy dog."}
    row = {"messages": [{"role": "user", "content": "Hello!"}, answer]}
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(6)))
    return Recipe(
        name="tiny",
        target={"path": str(tiny_folder)},
        data={"train": [str(tmp_path / "d.jsonl")]},
        head={"kind": "eagle3", "depth": 3, "draft_vocab_size": None},
        train={"steps": 5, "accumulation": 2, "batch_tokens": 120},
    )


@pytest.mark.parametrize("head", [{"kind": "eagle3", "depth": 3, "draft_vocab_size": None}, {"kind": "medusa"}])
def test_the_heads_arithmetic_is_its_own_count_over_the_stages(tiny_recipe, head):
    """Rows of one length: a micro-batch of the estimate is one of the run."""
    tiny_recipe.head = head
    rows = plan_rows(tiny_recipe, load_tokenizer(tiny_recipe.target))["train"].rows
    tiny_recipe.train.batch_tokens = 4 * len(rows[0])
    tiny_recipe.train.depth_schedule = [{"fraction": 0.25, "depth": 1}, {"fraction": 0.75, "depth": 3}]
    plan = estimate(tiny_recipe)
    batch = Batch.pack(rows[:4])
    built = build_head(parse_head(head), plan.shape, None)
    expected = 5 * 2 * (0.25 * built.flops(batch, 1) + 0.75 * built.flops(batch, 3))
    # supervised positions are those that drafting starts from, one or two less a row than the answer's tokens
    assert plan.head_flops == pytest.approx(expected, rel=0.15)
    tiny_recipe.train.batch_tokens += len(rows[0]) // 2  # half a row more: packed rows never fill a batch exactly
    more = tiny_recipe.train.batch_tokens / (4 * len(rows[0]))
    assert estimate(tiny_recipe).head_flops == pytest.approx(plan.head_flops * more)
    assert plan.target_flops is None and "an unknown number for the target" in plan.lines()[-1]


def test_the_target_runs_once_over_stored_features_and_every_epoch_without(tiny_recipe):
    expect = dict(vars(estimate(tiny_recipe).shape)) | {"parameters": 1000, "active_parameters": 10}
    target = {"path": tiny_recipe.target.path, "expect": expect}
    made = Recipe.model_validate(tiny_recipe.model_dump() | {"target": target})
    plan = estimate(made)
    assert plan.target_flops == 2 * 10 * plan.tokens
    made.features.mode = "online"
    assert estimate(made).target_flops == 2 * 10 * 5 * 2 * 120
    made.target.expect.active_parameters = None
    assert estimate(made).target_flops == 2 * 1000 * 5 * 2 * 120
    made.train.joint = JointSection(heads_first=0.25, base_loss="ce")
    assert estimate(made).target_flops == 2 * 1000 * 5 * 2 * 120 * (1 + 0.75)  # and the activations' gradient
    made.train.joint.base_loss = "kl"
    assert estimate(made).target_flops == 2 * 1000 * 5 * 2 * 120 * (1 + 0.75 * 2)  # and the forward to compare with
    made.train.joint = None
    made.target.expect.hidden_size = 65
    with pytest.raises(TargetError, match="hidden_size: expected 65, found 64"):
        estimate(made)


def test_the_dry_run_counts_what_is_left_out_by_reason(tiny_recipe, tmp_path):
    """The counts are the rows that training would not see; what is not known is not called none."""
    tiny_recipe.data.max_length, tiny_recipe.data.bad_lines = 200, "skip"
    answers = ["word " * 400] * 3 + ["", "fine, thank you"]
    rows = [[("user", "Hello!"), ("assistant", answer)] for answer in answers]
    rows += [[("user", "nobody answers")], [("narrator", "once")], [("assistant", "unasked")]]
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in row]}) for row in rows]
    (tmp_path / "mixed.jsonl").write_text("\n".join([*lines, "{broken", '"no object"']) + "\n")
    tiny_recipe.data.eval, tiny_recipe.data.train = tiny_recipe.data.train, [str(tmp_path / "mixed.jsonl")]
    plan = estimate(tiny_recipe)
    assert plan.rows == 1 and plan.dropped["eval"] == {}
    assert plan.dropped["train"] == {
        "longer than data.max_length=200": 3, "no assistant turn": 2, "damaged": 2, "unknown role 'narrator'": 1,
        "no user turn left": 1,
    }  # fmt: skip
    (line,) = [x for x in plan.lines() if x.startswith("left out")]
    assert line.startswith("left out    9 rows of data.train: 3 longer than data.max_length=200, 2 ")
    tiny_recipe.data.train, tiny_recipe.data.eval = tiny_recipe.data.eval, tiny_recipe.data.train
    assert [x for x in estimate(tiny_recipe).lines() if x.startswith("left out")] == [
        line.replace("data.train", "data.eval")
    ]
    tiny_recipe.data.eval = []
    assert "left out    no row" in estimate(tiny_recipe).lines()
    tiny_recipe.target.expect = ExpectedShape(**vars(plan.shape))
    tiny_recipe.target.path = "nobody/nothing"
    unknown = "\n".join(estimate(tiny_recipe).lines())
    assert "left out    not known" in unknown and "as target.expect says" in unknown


def test_data_that_is_not_there_is_named(tiny_recipe, tmp_path):
    """Where the target is not at hand, so that rows are not read."""
    tiny_recipe.target.expect = ExpectedShape(**vars(estimate(tiny_recipe).shape))
    tiny_recipe.target.path = "nobody/nothing"
    tiny_recipe.data.train += [str(tmp_path / "typo.jsonl"), "hub:some/set"]
    plan = estimate(tiny_recipe)
    assert plan.absent == ["hub:some/set", f"no file {tmp_path / 'typo.jsonl'}"] and not plan.tokens_known
    assert f"data        not at hand (hub:some/set, no file {tmp_path / 'typo.jsonl'})" in "\n".join(plan.lines())


def test_units():
    assert [scaled(x) for x in (2.5e6, 1.5e13, 9.99e17, 4e21)] == ["2.5 M", "15 T", "999 P", "4e+03 E"]
    assert [duration(x) for x in (0.5, 119, 120, 7200, 172800)] == ["0.5 s", "119 s", "2 min", "2 h", "2 days"]


def test_the_dry_run_prints_the_estimate_first(tiny_recipe, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(tiny_recipe.model_dump(mode="json")))
    app = typer.Typer()
    app.command()(command.main)
    got = CliRunner().invoke(app, [str(path), "--dry-run"])
    assert got.exit_code == 0 and got.output.startswith("target      LlamaForCausalLM")
    assert yaml.safe_load(got.output.split("\n\n", 1)[1])["name"] == "tiny"
    assert not (tmp_path / "runs").exists()


# -- recipes/README.md ---------------------------------------------------------------------------------------------


def keys_script():
    spec = importlib.util.spec_from_file_location("recipe_keys", ROOT / "scripts/recipe_keys.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_lists_every_key_and_every_recipe():
    script = keys_script()
    readme = script.README.read_text()
    assert script.rewritten(readme) == readme, "stale tables: run `python scripts/recipe_keys.py`"
    for path in RECIPES:
        assert f"| `{path.name}` |" in script.recipes()


def test_the_tables_say_what_the_models_say():
    script = keys_script()
    names = dict(script.sections())
    assert {"", "target.expect", "train.depth_schedule[]", "head, kind: eagle3"} <= names.keys()
    train = "\n".join(script.table(names["train"]))
    assert "| `lr` | number, above 0 | `0.001` |" in train and "| `betas` | [number, number] | `[0.9, 0.95]` |" in train
    assert "| `steps` | integer or null, at least 1 | `null` |" in train
    assert "| `train` | list of text | required |" in "\n".join(script.table(names["data"]))
    assert "| `quickstart.yaml` | targets/smollm2-135m-instruct | eagle3 | The quickstart: " in script.recipes()
