"""The two verbs as a user types them: values, files, JSON, and one-line refusals."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace

import pytest
import tiny
import torch
import typer
from transformers import (
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
)
from typer.testing import CliRunner

from headtrain.commands import common
from headtrain.commands.advise import advise
from headtrain.commands.serving import alphas_of, read_cache, read_experts, read_target
from headtrain.commands.speedup import speedup
from headtrain.config import RecipeError
from headtrain.decode.generate import Round
from headtrain.evaluate.results import Evaluation, PromptResult, Side
from headtrain.evaluate.roofline import DEVICES, PLAIN, Draft, Model, Plan, Setup, dense_parameters
from headtrain.evaluate.speedup_report import report
from headtrain.evaluate.sweep import Sweep
from headtrain.target.shape import shape_from_config

app = typer.Typer()
app.command()(speedup)
app.command()(advise)
LLAMA = "recipes/llama-3.1-8b-eagle3.yaml"
GPU = ("--target", LLAMA, "--device", "h100", "--draft-parameters", "350000000")


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "80"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments):
    with pytest.raises(RecipeError) as error:
        run(*arguments)
    return str(error.value)


def case(drafter, k, rounds, mode="decode", prompts=6, c=0.1, verify=1.2, route="code"):
    results = []
    for n in range(prompts):
        tokens = 1 + sum(r.committed for r in rounds)
        plain = Side(tokens, "length", 0.0, 0.0, 0.01 * (tokens - 1), 0.0)
        times = (0.01 * c * sum(r.drafted for r in rounds), 0.01 * verify * len(rounds), 0.0)
        results.append(PromptResult(f"{route}-{n}", route, 4, plain, Side(tokens, "length", 0.0, *times), rounds))
    settings = {"k": k, "temperature": 0.0, "mode": mode, "tree": ""}
    return Evaluation({}, drafter, settings, {}, results)


HEAD = {"kind": "eagle3", "family": "head", "label": "the head", "parameters": 10}
NGRAM = {"kind": "ngram", "family": "lookup", "label": "n-gram lookup", "parameters": 0}
ROUNDS = [Round(3, a, a + 1, 3) for a in (3, 3, 1, 0, 2, 3, 1, 3)] * 5
FOUND = [Round(0, 0, 1, 0), Round(3, 1, 2, 3)] * 20


@pytest.fixture
def evaluated(tmp_path):
    target = {"name": "t", "dtype": "float32", "parameters": 8_030_261_248, "model_type": "llama"}
    sweep = Sweep(target, {"torch": "x"}, [case(HEAD, 3, ROUNDS), case(NGRAM, 3, FOUND, c=0.0)])
    for each in sweep.cases:
        each.target = target
    (tmp_path / "run" / "eval").mkdir(parents=True)
    sweep.write(tmp_path / "run" / "eval" / "eval.json")
    return tmp_path / "run"


# -- speedup -----------------------------------------------------------------------------------------------------


def test_the_papers_numbers_are_printed():
    text = run("speedup", "--alpha", "0.8", "--cost-ratio", "0", "--k", "5")
    assert re.search(r"^ 5\s+3\.69\s+1\.00\s+3\.69x", text, re.M)
    assert "best k: 5" in text and "a draft step 0 of a target step (given)" in text


def test_json_holds_what_the_library_computes():
    data = json.loads(run("speedup", "--alpha", "0.8,0.5", "--cost-ratio", "0.1", "--verify-cost", "3:1.4", "--json"))
    assert [p["speedup"] for p in data["points"]] == pytest.approx([1.8 / 1.3, 2.2 / 1.6])
    assert data["best"]["k"] == 1 and data["batches"] == [] and data["served"] is None


@pytest.fixture
def terminal(monkeypatch):
    """80 columns wide, not a pipe."""
    monkeypatch.setattr(common.out, "width", 80)


@pytest.mark.usefixtures("terminal")
def test_with_a_device_the_costs_are_the_rooflines_and_the_load_is_counted(tmp_path):
    to = tmp_path / "page.html"
    words = ("speedup", "--alpha", "0.75,0.65,0.6", *GPU, "--slo-ms", "8", "--users", "500")
    data = json.loads(run(*words, "--json", "--out", to))
    target = read_target(LLAMA, None, 2.0, 2.0)
    setup = Setup(target, DEVICES["h100"], Draft(Model(350_000_000, 1, 32, 8, 128)))
    plan = Plan.chain([0.75, 0.65, 0.6], 3)
    p, b = data["points"][2], data["batches"][4]
    assert (p["tau"], p["speedup"]) == pytest.approx((plan.tau, setup.speedup(plan, 1)))
    assert p["cost"] == pytest.approx(setup.round_seconds(plan, 1) / setup.round_seconds(PLAIN, 1))
    assert (b["batch"], b["fixed"]) == (16, pytest.approx(setup.speedup(plan, 16)))
    by = {b["batch"]: b for b in data["batches"]}
    assert by[500]["fixed"] == pytest.approx(setup.speedup(plan, 500))  # a row for the users that were asked about
    wide = by[512]
    top = setup.best([Plan.chain([0.75, 0.65, 0.6], k) for k in (1, 2, 3)], 512)
    assert top != plan and (wide["best"], wide["speedup"]) == (top.name, pytest.approx(setup.speedup(top, 512)))
    held = json.loads(run("speedup", "--alpha", "0.75,0.65", *GPU, "--k", "3", "--hold-last", "--json"))
    assert [p["extrapolated"] for p in held["points"]] == [False, False, True]
    assert any("beyond k 2 nothing was measured" in line for line in held["lines"])
    assert b["memory_gb"] == pytest.approx(setup.memory_bytes(plan, 16) / 1e9)
    assert data["without"]["gpus"] > data["served"]["gpus"] >= 1
    assert any("does not shrink the cache" in note for note in data["notes"])
    page = to.read_text()
    assert page.count("<svg") == 2 and "<script" not in page and "GPUs for the load" in page
    text = run(*words)
    assert "saves" in text and max(map(len, text.split("best k")[0].splitlines())) <= 80


def test_an_slo_that_cannot_be_met_is_said():
    text = run("speedup", "--alpha", "0.5", *GPU, "--slo-ms", "0.1", "--users", "5")
    assert "this SLO cannot be met on this device" in text and "cannot" in text
    assert "do not fit" in run("speedup", "--alpha", "0.5", *GPU, "--memory-gb", "8", "--slo-ms", "9", "--users", "5")
    loose = run("speedup", "--alpha", "0.8", *GPU, "--slo-ms", "4", "--users", "5")
    assert "only speculation meets this SLO" in loose


def test_a_tree_stands_beside_the_chains():
    words = ("speedup", "--alpha", "0.8", "--cost-ratio", "0.1", "--tree-nodes", "20", "--tree-depth", "4")
    words += ("--tau", "3.6")
    data = json.loads(run(*words, "--verify-cost", "21:1.6", "--json"))
    assert data["tree_speedup"] == pytest.approx(3.6 / (1.6 + 0.4))
    assert "tree 20" in json.loads(run(*words[:3], *words[5:], *GPU, "--json"))["lines"][1]
    assert "a tree: give" in refused(*words[:-2])


def test_acceptance_and_costs_of_an_evaluation(evaluated):
    data = json.loads(run("speedup", "--eval", evaluated, "--json"))
    tau = sum(r.committed for r in ROUNDS) / len(ROUNDS)
    assert data["points"][2]["tau"] == pytest.approx(tau) and data["c"] == pytest.approx(0.1)
    assert data["points"][2]["speedup"] == pytest.approx(tau / (0.3 + 1.2))
    # a lookup without a match commits one token: misses are counted, so that tau is the measured one
    data = json.loads(run("speedup", "--eval", evaluated / "eval" / "eval.json", "--drafter", "n-gram", "--json"))
    assert data["points"][2]["tau"] == pytest.approx(1.5)
    assert alphas_of(case(NGRAM, 3, FOUND), "all") == [0.5, 0.0, 0.0]
    # timed with 3 drafted tokens, replayed with 5: the cost of verifying 6 tokens is not known here
    sweep = Sweep.read(evaluated / "eval" / "eval.json")
    deep = [Round(5, r.accepted, r.committed, 5) for r in ROUNDS]
    Sweep(sweep.target, {}, [*sweep.cases, case(HEAD, 5, deep, "replay")]).write(evaluated / "eval.json")
    data = json.loads(run("speedup", "--eval", evaluated / "eval.json", "--json"))
    assert [p["k"] for p in data["points"]] == [1, 2, 3]
    assert "measured to 4 tokens" in refused("speedup", "--eval", evaluated / "eval.json", "--k", "5")
    assert "no route 'maths'" in refused("speedup", "--eval", evaluated, "--route", "maths")
    assert "it has: the head, n-gram lookup" in refused("speedup", "--eval", evaluated, "--drafter", "other")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --alpha"),
        (("--alpha", "1.2", "--cost-ratio", "0.1"), "alpha_1 1.2"),
        (("--alpha", "nan", "--cost-ratio", "0.1"), "alpha_1 nan"),
        (("--alpha", "x"), "expected 0.8"),
        (("--alpha", "0.8"), "give --cost-ratio"),
        (("--alpha", "0.8", "--cost-ratio", "-1"), "cost ratio -1"),
        (("--alpha", "0.8,0.7", "--cost-ratio", "0.1", "--k", "4"), "--hold-last"),
        (("--alpha", "0.8", "--device", "h100"), "give --target"),
        (("--alpha", "0.8", "--target", LLAMA), "give --device"),
        (("--alpha", "0.8", "--target", LLAMA, "--device", "h1000"), "known are h100"),
        (("--alpha", "0.8", "--target", LLAMA, "--tflops", "10"), "--gbps, --memory-gb too"),
        (("--alpha", "0.8", *GPU, "--slo-ms", "0", "--users", "1"), "--slo-ms 0"),
        (("--alpha", "0.8", *GPU, "--users", "1"), "without an SLO"),
        (("--alpha", "0.8", *GPU, "--slo-ms", "5", "--requests-per-second", "1"), "--output-tokens"),
        (("--alpha", "0.8", *GPU, "--verify-cost", "3:1"), "give --cost-ratio too"),
        (("--alpha", "0.8", "--cost-ratio", "0.1", "--slo-ms", "5", "--users", "1"), "a load needs"),
        (
            ("--alpha", "0.8", "--cost-ratio", "0.1", "--k", "200000"),
            "--k 200000: expected a finite number of at least",
        ),
        (("--alpha", "0.8", "--cost-ratio", "0.1", "--verify-cost", "1:9"), "T(1) / T(1)"),
        (("--alpha", "0.8", "--cost-ratio", "0.1", "--verify-cost", "9:0.1"), "verify cost of 9 tokens 0.1"),
        (("--alpha", "0.8", "--cost-ratio", "1e300"), "cost ratio 1e+300"),
        (("--alpha", "0.8", *GPU, "--tflops", "1e300"), "tflops 1e+300"),
        (("--alpha", "0.8", *GPU, "--gbps", "1e-300"), "gbps 1e-300"),
        (("--alpha", "0.8", *GPU, "--weight-bytes", "1e300"), "weight_bytes 1e+300"),
        (("--alpha", "0.8", *GPU, "--kv-bytes", "nan"), "kv_bytes nan"),
        (("--alpha", "0.8", *GPU, "--efficiency", "nan"), "efficiency nan"),
        (("--alpha", "0.8", *GPU, "--slo-ms", "nan", "--users", "1"), "--slo-ms nan"),
        (("--alpha", "0.8", *GPU, "--slo-ms", "-5", "--users", "1"), "--slo-ms -5"),
        (("--alpha", "0.8", *GPU, "--slo-ms", "5", "--users", "nan"), "--users nan"),
        (
            ("--alpha", "0.8", *GPU, "--slo-ms", "5", "--requests-per-second", "-2", "--output-tokens", "-3"),
            "--requests-per-second -2",
        ),
        (("--alpha", "0.8", "--cost-ratio", "0.1", "--tau", "3"), "a tree: give"),
        (("--eval", "nowhere"), "no such file or folder: nowhere"),
    ],
)
def test_what_cannot_be_is_refused_in_words(words, message):
    assert message in refused("speedup", *words)


def rewrite(evaluated, cases):
    sweep = Sweep.read(evaluated / "eval" / "eval.json")
    Sweep(sweep.target, {}, cases).write(evaluated / "eval" / "eval.json")


def test_rounds_that_an_accepted_end_of_text_ended_commit_no_token_more(evaluated):
    ended = [Round(3, 3, 4, 3), Round(3, 1, 2, 3), Round(2, 2, 2, 3)] * 4  # the third: its second token ends the text
    rewrite(evaluated, [case(HEAD, 3, ended)])
    data = json.loads(run("speedup", "--eval", evaluated, "--json"))
    assert [p["tau"] for p in data["points"]] == pytest.approx([(2 + 2 + 2) / 3, (3 + 2 + 2) / 3, (4 + 2 + 2) / 3])
    assert any("24 of them ended with an accepted end of text" in note for note in data["notes"])
    assert "accepted end of text" not in run("speedup", "--alpha", "0.5", "--cost-ratio", "0.1")


def test_an_evaluation_of_trees_alone_says_what_was_measured(evaluated):
    tree = case(HEAD, 3, ROUNDS)
    tree.settings["tree"] = "tree of 20"
    rewrite(evaluated, [tree])
    text = refused("speedup", "--eval", evaluated)
    gain = tree.summary().speedup
    assert "only trees were evaluated here (the head, tree of 20: 3.00 tokens a round" in text
    assert f"timed at {gain:.2f}x" in text and "headtrain advise" in text


def test_lossless_chains_are_taken_before_typical_ones_and_those_are_named(evaluated):
    loose = case(HEAD, 5, [Round(5, 5, 6, 5)] * 30)
    loose.settings["acceptance"] = "typical"
    rewrite(evaluated, [loose, case(HEAD, 3, ROUNDS)])
    assert len(json.loads(run("speedup", "--eval", evaluated, "--json"))["points"]) == 3
    rewrite(evaluated, [loose])
    assert "not distributed as the target's" in run("speedup", "--eval", evaluated)


def test_a_drafter_that_says_all_depths_at_once_is_charged_once(evaluated):
    rewrite(evaluated, [case({**HEAD, "parallel": True}, 3, ROUNDS)])  # 0.3 plain steps a round
    data = json.loads(run("speedup", "--eval", evaluated, "--json"))
    assert data["c"] == pytest.approx(0.3) and data["points"][2]["cost"] == pytest.approx(0.3 + 1.2)
    given = json.loads(run("speedup", "--alpha", "0.8", "--cost-ratio", "0.2", "--parallel-draft", "--json"))
    assert [p["cost"] for p in given["points"]] == pytest.approx([1.2] * 8)
    tree = ("--tree-nodes", "20", "--tree-depth", "4", "--tau", "3")
    given = json.loads(run("speedup", "--alpha", "0.8", "--cost-ratio", "0.2", "--parallel-draft", *tree, "--json"))
    assert given["tree_speedup"] == pytest.approx(3 / 1.2)
    # on a device the evaluated drafter is the one that drafts
    data = json.loads(run("speedup", "--eval", evaluated, *GPU[:4], "--json"))
    setup = Setup(read_target(LLAMA, None, 2.0, 2.0), DEVICES["h100"], Draft(Model(10, 1, 32, 8, 128), True))
    assert data["points"][2]["speedup"] == pytest.approx(setup.speedup(Plan(3, data["points"][2]["tau"], 3), 1))


def test_nothing_fits_is_not_read_as_it_always_pays():
    text = run("speedup", "--alpha", "0.8", *GPU, "--memory-gb", "8")
    assert "do not fit into memory: nothing to serve" in text and "pays up to" not in text


def test_a_damaged_file_is_one_line_that_names_it(evaluated):
    path = evaluated / "eval" / "eval.json"
    good = json.loads(path.read_text())

    def damage(change, reason=""):
        data = json.loads(json.dumps(good))
        change(data)
        path.write_text(json.dumps(data))
        for verb in (("speedup", "--eval", evaluated), ("advise", evaluated)):
            text = refused(*verb)
            assert "\n" not in text and str(path) in text and "headtrain eval" in text and reason in text

    damage(lambda d: d["cases"][0]["drafter"].pop("label"), "label")
    damage(lambda d: d["cases"][0]["drafter"].pop("kind"))
    damage(lambda d: d.update(target=None))
    damage(lambda d: d["cases"][0]["results"][0].update(route=None))
    damage(lambda d: d["cases"][0]["results"][0]["rounds"].__setitem__(0, [3, -1, 0, 3]))
    damage(lambda d: d["cases"][0]["results"][0]["rounds"].__setitem__(0, [3, math.nan, 0, 3]))
    path.write_bytes(b"\xff\xfe")
    assert "is no evaluation" in refused("advise", evaluated)


def test_neither_costs_nor_a_device():
    with pytest.raises(ValueError, match="not known"):
        report("x", [0.5])


def mixture():
    sizes = dict(vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    return Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=2)


def test_experts_are_read_from_a_config():
    config = mixture()
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    experts = read_experts(config, 3)
    real = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert (experts.count, experts.per_token, experts.parameters) == (8, 2, real)
    assert read_experts(tiny.config(), 8) is None


# Published sizes; each as its own config class gives them, at a context where windows matter.
DEEPSEEK = dict(num_hidden_layers=61, kv_lora_rank=512, qk_rope_head_dim=64)
NEXT = dict(num_hidden_layers=48, num_key_value_heads=2, head_dim=256)
GEMMA = dict(num_hidden_layers=34, num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=1024)


def test_caches_of_the_families_by_hand():
    def kept(config, context):
        shape = shape_from_config(config)
        cache, notes = read_cache(config, shape)
        model = Model.of(shape, 10**12, cache=cache, notes=notes)
        return model.kv_of(context), " ".join(notes)

    size, notes = kept(DeepseekV3Config(**DEEPSEEK), 5000)
    assert size == 5000 * 61 * (512 + 64) * 2 and "latent attention" in notes
    assert read_cache(DeepseekV3Config(**DEEPSEEK), shape_from_config(DeepseekV3Config()))[0].width == 512 + 64 + 512
    size, notes = kept(Qwen3NextConfig(**NEXT), 5000)
    assert size == 5000 * 12 * 2 * 2 * 256 * 2 and "36 of 48 layers keep a recurrent" in notes
    size, notes = kept(Gemma3Config(text_config=Gemma3TextConfig(**GEMMA)), 5000)
    full = sum(n % 6 == 5 for n in range(34))  # five windows, then a full layer
    assert size == (5000 * full + 1024 * (34 - full)) * 2 * 4 * 256 * 2 and "last 1024 positions" in notes
    assert kept(Gemma3Config(text_config=Gemma3TextConfig(**GEMMA)), 500)[0] == 500 * 34 * 2 * 4 * 256 * 2
    size, notes = kept(GptOssConfig(), 5000)
    assert size == (5000 * 18 + 128 * 18) * 2 * 8 * 64 * 2 and "last 128 positions" in notes
    size, notes = kept(MistralConfig(sliding_window=4096), 5000)
    assert size == 4096 * 32 * 2 * 8 * 128 * 2
    sizes = dict(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, hidden_size=512)
    assert kept(Qwen2Config(**sizes, sliding_window=64), 5000) == (5000 * 4 * 2 * 2 * 64 * 2, "")
    assert kept(tiny.config(), 10)[1] == ""
    off = tiny.config()
    off.sliding_window, off.use_sliding_window = 64, False  # a window that the model does not use
    assert kept(off, 5000) == kept(tiny.config(), 5000) and kept(off, 5000)[0] == 5000 * kept(off, 1)[0]
    odd = tiny.config()
    odd.layer_types = ["odd_attention"] * odd.num_hidden_layers
    assert "odd_attention are counted as if they kept every position" in kept(odd, 10)[1]
    odd.layer_types, odd.num_kv_shared_layers = ["full_attention"] * odd.num_hidden_layers, 1
    assert read_cache(odd, shape_from_config(odd))[0].full == odd.num_hidden_layers - 1


def test_a_recipe_alone_says_what_was_assumed(evaluated, tmp_path):
    model = read_target("recipes/deepseek-v3-eagle3.yaml", None, 2.0, 2.0)
    assert "taken as keys and values of all 61 layers" in model.notes[0] and "taken as a dense target" in model.notes[1]
    assert model.parameters == 671026404352
    text = run("speedup", "--alpha", "0.8", *GPU)
    assert "has no config at hand, only target.expect" in text
    assert "assumed: recipes/llama" in run("advise", evaluated, *GPU[:4])
    DeepseekV3Config(**DEEPSEEK).save_pretrained(tmp_path / "v3")
    words = ("--target", tmp_path / "v3", "--parameters", "671026404352", "--device", "h200", "--gpus", "8")
    text = run("speedup", "--alpha", "0.8", *words)
    assert "KV cache 70.3 kB a position" in text and "keeps 512 + 64 values" in text


def test_sizes_of_a_local_folder_and_of_a_mixture(tmp_path):
    config = tiny.config()
    config.save_pretrained(tmp_path / "dense")
    counted = read_target(str(tmp_path / "dense"), None, 2.0, 2.0).parameters
    assert counted == dense_parameters(shape_from_config(config))
    mixture().save_pretrained(tmp_path / "moe")
    with pytest.raises(RecipeError, match="mixture of experts: give --parameters"):
        read_target(str(tmp_path / "moe"), None, 2.0, 2.0)
    words = ("--target", tmp_path / "moe", "--parameters", "500000", "--device", "h100")
    assert "of 8 experts a layer in expectation" in run("speedup", "--alpha", "0.8", *words)


def varied(alphas=(0.7, 0.5, 0.4, 0.3, 0.2), prompts=8, drafter=HEAD):
    """A replay whose prompts differ, so that intervals are no points."""
    rng, made = random.Random(3), case(drafter, len(alphas), ROUNDS, "replay", prompts)
    for n, r in enumerate(made.results):
        accepted = [next((j for j, a in enumerate(alphas) if rng.random() > a), len(alphas)) for _ in range(30)]
        made.results[n] = replace(r, rounds=[Round(5, a, a + 1, 5) for a in accepted])
    return made


@pytest.mark.usefixtures("terminal")
def test_advise_and_speedup_name_one_k_and_one_interval_for_one_load(evaluated):
    big = {**HEAD, "parameters": 350_000_000}
    rewrite(evaluated, [varied(drafter=big), varied((0.3, 0.3), drafter={**NGRAM, "label": "lookup"})])
    differs = 0
    for users in (1, 7, 100, 300):
        words = (evaluated, *GPU[:4], "--route", "all", "--json")
        (advice,) = json.loads(run("advise", *words, "--concurrency", users))["routes"]
        made = json.loads(run("speedup", "--eval", *words, "--users", users, "--slo-ms", "50"))
        row = next(b for b in made["batches"] if b["batch"] == users)
        strategy = advice["strategy"]
        assert made["advised"][str(users)]["strategy"] == strategy
        if strategy is None:
            assert (row["best"], row["speedup"]) == ("none", 1)
        else:
            assert row["best"].endswith(f"k {strategy['k']}") and strategy["low"] < strategy["high"]
            assert (row["speedup"], row["low"], row["high"]) == tuple(strategy[n] for n in ("speedup", "low", "high"))
        if made["served"]["batch"] >= users:  # one replica holds them all
            assert made["served"]["plan"]["k"] == (strategy or {"k": 0})["k"]
        fastest = max(advice["candidates"], key=lambda c: c["speedup"])
        differs += strategy is not None and fastest["k"] != strategy["k"]
    assert differs  # the fastest by the model alone is another k
    text = run("speedup", "--eval", *words[:-1], "--users", 100, "--slo-ms", "50")
    assert "100 at once: " in text and max(map(len, text.split("one sequence at a time")[0].splitlines())) <= 80


def test_alone_too_timed_or_not(evaluated):
    for cases in ([case(HEAD, 3, ROUNDS), case(NGRAM, 3, FOUND, c=0.0)], [varied()]):
        rewrite(evaluated, cases)
        for more in (
            (),
            ("--cost-ratio", "0.2"),
            ("--cost-ratio", "0.2", "--verify-cost", "6:1.5"),
            ("--drafter", "head"),
        ):
            (advice,) = json.loads(run("advise", evaluated, "--json", *more))["routes"]
            made = json.loads(run("speedup", "--eval", evaluated, "--json", *more))
            strategy, k = advice["strategy"], advice["strategy"]["k"]
            assert made["advised"]["1"]["strategy"] == strategy and made["best"]["k"] == k
            p = made["points"][k - 1]
            assert (p["tau"], p["speedup"], p["low"], p["high"]) == tuple(
                strategy[n] for n in ("tau", "speedup", "low", "high")
            )
    # no interval and no advice for what was not evaluated
    made = json.loads(run("speedup", "--eval", evaluated, *GPU, "--json"))
    assert made["advised"] == {} and made["points"][0]["low"] is None
    assert any("this asks about a draft that was not evaluated" in note for note in made["notes"])


# -- advise ------------------------------------------------------------------------------------------------------


def test_advice_is_a_table_and_reasons(evaluated):
    text = run("advise", evaluated)
    tau = sum(r.committed for r in ROUNDS) / len(ROUNDS)
    assert f"{tau / 1.5:.2f}x" in text and "vLLM >=0.32" in text
    assert "code: the head, k 3" in text and "assumed: speeds marked timed" in text
    data = json.loads(run("advise", evaluated, "--json"))
    (route,) = data["routes"]
    assert route["strategy"]["label"] == "the head" and route["strategy"]["speedup"] == pytest.approx(tau / 1.5)


def test_advice_on_one_route_and_each_engines_note_once(evaluated):
    two = case(HEAD, 3, ROUNDS)
    two.results += case(HEAD, 3, ROUNDS, route="maths").results
    two.target = {"parameters": 100}
    rewrite(evaluated, [two])
    text = run("advise", evaluated)
    assert text.count("topk 1") == 1 and "SGLang, head: topk 1" in text and "maths: the head, k 3" in text
    text = run("advise", evaluated, "--route", "maths")
    assert "maths: the head, k 3" in text and "code" not in text and "all:" not in text
    assert "no route 'x' in this evaluation; it has: code, maths, all" in refused("advise", evaluated, "--route", "x")


def test_advice_where_everything_is_refused_has_a_row_and_a_reason(evaluated):
    loose = case(HEAD, 3, ROUNDS)
    loose.settings["acceptance"] = "typical"
    rewrite(evaluated, [loose])
    text = run("advise", evaluated)
    assert re.search(r"code\s+0\s+no speculation", text) and "code: every way of drafting" in text
    assert "refused: the head, k 3: typical acceptance" in text and ">=0.32" not in text


def test_advice_under_other_conditions(evaluated):
    slow = run("advise", evaluated, "--cost-ratio", "head=2", "--cost-ratio", "n-gram=0", "--verify-cost", "4:2.5")
    assert "no speculation" in slow and "always" in slow
    many = run("advise", evaluated, *GPU[:4], "--concurrency", "8", "--context", "100")
    assert "roofline of H100" in many and "batch 8" in many
    assert "must be known" in refused("advise", evaluated, "--concurrency", "8")
    assert "no such drafter; the evaluation has: the head" in refused("advise", evaluated, "--cost-ratio", "x=1")
    assert "expected one number" in refused("advise", evaluated, "--cost-ratio", "x")
    assert "expected a part of a drafter's label" in refused("advise", evaluated, "--cost-ratio", "=0.05")
    assert "expected a part of a drafter's label" in refused("advise", evaluated, "--cost-ratio", " =0.05")
    assert "no engine named" in refused("advise", evaluated, "--engine", "none")
    (evaluated / "eval" / "eval.json").write_text("{")
    assert "is no evaluation" in refused("advise", evaluated)


@pytest.mark.parametrize("verb", [["advise"], ["speedup", "--eval"]])
def test_an_evaluation_of_another_target_is_refused(verb, evaluated):
    """Its acceptance and its drafter's size would be put on a target that was never measured."""
    file = evaluated / "eval" / "eval.json"
    data = json.loads(file.read_text())
    data["target"]["parameters"] = 134_515_008
    file.write_text(json.dumps(data))
    with pytest.raises(RecipeError, match="measured t .134,515,008 parameters"):
        CliRunner().invoke(app, [*verb, str(evaluated), *GPU[:4]], catch_exceptions=False)


def test_a_free_draft_is_said_to_be_one():
    assert "drafting is taken as free" in run("speedup", "--alpha", "0.8", *GPU[:4])
    assert "taken as free" not in run("speedup", "--alpha", "0.8", *GPU)
