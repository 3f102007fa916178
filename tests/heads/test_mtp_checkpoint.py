from __future__ import annotations

import dataclasses
import math

import checkpoint_families as families
import pytest
import tiny
import torch
from checkpoint_families import KINDS, Module, config_of
from reference_recurrent import ahead, judged, raw
from transformers.modeling_layers import MtpModel

from headtrain.capture import capture, head_wants
from headtrain.config import Recipe, RecipeError, TargetSection, parse
from headtrain.heads.catalog import build_head, parse_head
from headtrain.heads.mtp_families import by_file_name, family_of
from headtrain.shift import pair_mask
from headtrain.target.load import load_target
from headtrain.target.shape import shape_from_config
from headtrain.teacher import Teacher
from headtrain.types import Batch, Features, TargetWeights

DEPTH, V, H = 3, 96, 32
ROWS = tiny.rows((24, 9, 33), vocab=V)


def shape_of(name: str, **changes):
    config = config_of(name, **changes)
    config.architectures = KINDS[name].rewrite.get("architectures", [KINDS[name].model])
    return shape_from_config(config)


def weights_of(module: Module, dtype=torch.float64, **more) -> TargetWeights:
    g = torch.Generator().manual_seed(5)
    embed, lm_head = (torch.randn(V, H, generator=g, dtype=dtype) for _ in range(2))
    return TargetWeights(embed, lm_head * 0.5, torch.ones(H, dtype=dtype), module=module.published() | more)


def make(name: str, dtype=torch.float64, **config):
    """The reference module, the head that was started from its published tensors, and the target's weights."""
    module = Module(name, config_of(name)).to(dtype)
    weights = weights_of(module, dtype)
    head = build_head(parse_head({"kind": "mtp-checkpoint", "depth": DEPTH, **config}), shape_of(name), None).to(dtype)
    head.attach(weights)
    head.init_from_target(weights)
    return module, head, weights


def data(weights: TargetWeights, rows=ROWS):
    batch = Batch.pack(rows)
    final = torch.randn(len(batch), H, generator=torch.Generator().manual_seed(2), dtype=weights.embed.dtype)
    argmax, lse = Teacher(weights.lm_head).summary(final)
    return batch, final, Features(raw(final), torch.arange(len(batch)), final, argmax, lse)


def steps(name: str, module: Module, weights: TargetWeights, batch: Batch, final, **more):
    state = raw(final)[:, 0] if KINDS[name].start == "raw" else final
    return module.steps(batch.ids, batch.doc, batch.pos, weights.embed, state, DEPTH, **more)


@pytest.mark.parametrize("name", KINDS)
def test_loss_and_gradients_equal_the_familys_own_layer(name):
    module, head, weights = make(name)
    batch, final, features = data(weights)
    ours = head.loss(batch, features, Teacher(weights.lm_head), DEPTH)
    beta = [0.6**s / (1 + 0.6 + 0.36) for s in range(DEPTH)]

    def row_loss(s, seen, logits, p, tokens):
        cross = torch.nn.functional.cross_entropy(logits, tokens, reduction="none")
        return cross, torch.ones_like(tokens, dtype=torch.bool), beta[s] * cross

    theirs = judged(head, batch, final, weights.lm_head, steps(name, module, weights, batch, final), row_loss)
    for key in ("hits", "pairs", "chain_hits", "chain_pairs", "loss_count"):
        assert torch.equal(getattr(ours, key), theirs[key]), key
    # norms and routers of transformers compute in float32 whatever they are given
    torch.testing.assert_close(ours.loss, theirs["loss"], rtol=1e-5, atol=0)
    ours.total.backward()
    theirs["total"].backward()
    want = module.published({n: p.grad for n, p in module.named_parameters()})
    own = {n: p.grad for n, p in head.named_parameters()}
    got = by_file_name(head.family, head.shape, own, want)
    assert got.keys() == want.keys()
    for key, gradient in want.items():
        worst = (got[key] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-3)
        assert worst < 2e-5, f"{key}: off by {worst:.1e} of its largest entry"


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_under_autocast_queries_keys_and_values_have_one_type(name):
    """Kernels take one; GLM's norm of queries and keys alone would give its weight's float32."""
    _, head, weights = make(name, torch.float32)
    batch, _, features = data(weights)
    with torch.autocast("cpu", torch.bfloat16):
        attention, angles = head.block.self_attn, head.rope(torch.arange(5))
        x = torch.randn(5, weights.embed.shape[1])
        types = {attention.queries(x, angles).dtype, attention.keys(x, angles).dtype, attention.values(x).dtype}
        assert types == {torch.bfloat16}
        assert head.loss(batch, features, Teacher(weights.lm_head), DEPTH).total.isfinite()


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_a_session_drafts_as_the_familys_own_layer(name):
    module, head, weights = make(name)
    batch, final, features = data(weights, tiny.rows((12,), vocab=V))
    wanted = [h @ weights.lm_head.t() for h in steps(name, module, weights, batch, final)]
    session, compared = head.session(len(batch)), 0
    for i in range(len(batch) - 1):
        logits = session.extend(batch.ids[i + 1 : i + 2], features.layers[i : i + 1], final[i : i + 1])
        for s in range(min(DEPTH, len(batch) - 2 - i)):
            if s:
                logits = session.expand(torch.tensor([s - 2]), batch.ids[i + 1 + s : i + 2 + s])[0]
            torch.testing.assert_close(logits.double(), wanted[s][i], rtol=1e-4, atol=1e-4)  # float32 by contract
            compared += 1
    assert compared == 10 + 9 + 8


@torch.no_grad()
@pytest.mark.parametrize("name", ["deepseek", "qwen3-next"])
def test_a_tree_equals_its_chains(name):
    _, head, weights = make(name)
    batch, final, features = data(weights, tiny.rows((12,), vocab=V))

    def fresh():
        session = head.session(20)
        session.extend(batch.ids[1:9], features.layers[:8], final[:8])
        return session

    parents, tokens = [-1, -1, 0, 1, 0, 3], [7, 20, 33, 5, 61, 40]
    tree = fresh()
    got = [tree.expand(torch.tensor(parents[a:b]), torch.tensor(tokens[a:b])) for a, b in ((0, 2), (2, 5), (5, 6))]
    for node, logits in enumerate(torch.cat(got)):
        path, at = [], node
        while at >= 0:
            path.insert(0, tokens[at])
            at = parents[at]
        chain = fresh()
        for depth, token in enumerate(path):
            want = chain.expand(torch.tensor([depth - 1]), torch.tensor([token]))[0]
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_the_table_is_that_of_the_families(name):
    kind, family = KINDS[name], family_of(shape_of(name))
    assert family.hidden_first == (kind.order == "hidden first")
    assert (family.start, family.recycle, family.zero_first) == (kind.start, kind.recycle, kind.zero_first)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deepseek", {"recycle": "normed"}),  # as vLLM, SGLang and transformers serve it
        ("qwen3.5", {"recycle": "raw", "zero_first_embedding": True}),
    ],
)
def test_a_recipe_may_choose_another_recursion(name, options):
    module, head, weights = make(name, **options)
    assert {**head.config.model_dump(), **options} == head.config.model_dump()
    batch, final, features = data(weights)
    more = {"recycle": options["recycle"], "zero_first": options.get("zero_first_embedding")}
    with torch.no_grad():
        hidden = steps(name, module, weights, batch, final, **more)
        ours = head.loss(batch, features, Teacher(weights.lm_head), DEPTH)
    pairs = pair_mask(batch, DEPTH)
    for s, seen in enumerate(hidden):
        losses = torch.nn.functional.cross_entropy(
            seen @ weights.lm_head.t(), ahead(batch.ids, 2 + s), reduction="none"
        )
        torch.testing.assert_close(ours.loss[s].double(), losses[pairs[s]].sum(), rtol=1e-5, atol=0)
    default = make(name)[1].loss(batch, features, Teacher(weights.lm_head), DEPTH)
    assert not torch.equal(default.loss[1], ours.loss[1])


@pytest.mark.parametrize("name", ["deepseek", "qwen3-next"])
def test_own_context_is_fastmtps_in_training_and_decodings_in_evaluation(name):
    module, head, weights = make(name, context="own")
    batch, final, features = data(weights)
    pairs = pair_mask(batch, DEPTH)
    for training in (True, False):
        with torch.no_grad():
            ours = head.train(training).loss(batch, features, Teacher(weights.lm_head), DEPTH)
            hidden = steps(name, module, weights, batch, final, own=training)
        for s, seen in enumerate(hidden):
            logits = seen @ weights.lm_head.t()
            losses = torch.nn.functional.cross_entropy(logits, ahead(batch.ids, 2 + s), reduction="none")
            torch.testing.assert_close(ours.loss[s].double(), losses[pairs[s]].sum(), rtol=1e-5, atol=0)


# -- real files --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=KINDS)
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    module = families.save(folder, request.param, torch.bfloat16, tiny.tokenizer(), vocab_size=384)
    return request.param, module, folder, load_target(TargetSection(path=str(folder)))


def test_the_module_is_read_from_the_files_and_trains(loaded):
    name, module, folder, target = loaded
    head = build_head(parse_head({"kind": "mtp-checkpoint", "depth": 2}), target.shape, None)
    head.check_start(target.weights())
    head.attach(target.weights())
    head.init_from_target(target.weights())
    held = by_file_name(head.family, head.shape, head.state_dict(), target.weights().module)
    for key, tensor in module.published().items():
        stored = tensor if key.endswith("e_score_correction_bias") else tensor.bfloat16()
        assert torch.equal(held[key], stored.float()), key
    batch = Batch.pack(tiny.rows((24, 9, 33)))
    features = target.features(batch, head.wants())
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        sums = head.loss(batch, features, target.teacher(), 2)
        (sums.total / sums.count).backward()
        optimizer.step()
        losses.append(float(sums.total))
    assert losses[-1] < losses[0]


@torch.no_grad()
def test_transformers_own_mtp_model_drafts_the_same(loaded):
    """transformers 5.24 runs DeepSeek's and GLM's modules (at one step, without the zero at position 0)."""
    name, _, folder, target = loaded
    if name not in ("deepseek", "glm"):
        pytest.skip("transformers has no class for it")
    target.model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3.*"]  # it knows the published numbers only
    theirs = MtpModel.from_pretrained(target.model)
    head = build_head(parse_head({"kind": "mtp-checkpoint", "zero_first_embedding": False}), target.shape, None)
    head.attach(target.weights())
    head.init_from_target(target.weights())
    batch = Batch.pack(tiny.rows((14,)))
    features = target.features(batch, dataclasses.replace(head.wants(), final="all"))
    positions = torch.arange(13)[None]
    seen = theirs.forward_layer(0, features.final[None, :13], positions, None, input_ids=batch.ids[None, 1:])
    want = theirs._project_to_logits(seen)[0]
    session = head.session(20)
    for i in range(13):
        got = session.extend(batch.ids[i + 1 : i + 2], features.layers[i : i + 1], features.final[i : i + 1])
        torch.testing.assert_close(got, want[i].float(), rtol=1e-4, atol=1e-4)


# -- what cannot be fine-tuned -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (
            shape_from_config(tiny.config()),
            ["'llama'", "no MTP module", "DeepSeek-V3/R1", "MiMo", "kind=mtp"],
        ),
        (shape_of("mimo", num_nextn_predict_layers=0), ["MiMo", "announces no MTP modules", "expected one"]),
        (shape_of("mimo", num_nextn_predict_layers=2), ["announces 2 MTP modules", "expected one"]),
        (shape_of("deepseek", v_head_dim=14), ["v_head_dim 14", "a key (12)"]),
    ],
    ids=["another family", "none announced", "two", "large values"],
)
def test_a_target_without_one_module_is_refused_by_name(shape, words):
    with pytest.raises(RecipeError) as error:
        build_head(parse_head({"kind": "mtp-checkpoint"}), shape, None)
    assert all(word in str(error.value) for word in words)


def test_the_kept_config_without_a_count_means_one_module():
    assert shape_of("qwen3-next").module["count"] == 1
    assert shape_from_config(tiny.config()).module is None


def broken(how: str) -> tuple[dict, list[str]]:
    module = Module("deepseek", config_of("deepseek"))
    tensors = weights_of(module, torch.float32).module
    lm_head, name = weights_of(module, torch.float32).lm_head, "model.layers.3.eh_proj.weight"
    if how == "none":
        return {}, ["lacks the MTP module", "`model.layers.3.`", "published safetensors"]
    if how == "missing":
        return {n: t for n, t in tensors.items() if n != name}, ["missing", name]
    if how == "unknown":
        return tensors | {"model.layers.3.more.weight": lm_head}, ["not known", "model.layers.3.more.weight"]
    if how == "quantised":
        return tensors | {f"{name}_scale_inv": lm_head}, ["quantised", "convert the checkpoint to bf16"]
    if how == "misshapen":
        return tensors | {name: tensors[name][:-1]}, [name, "(31, 64)", "(32, 64)"]
    if how == "integers":
        return tensors | {name: tensors[name].to(torch.int8)}, [name, "int8", "floats"]
    return tensors | {"model.layers.3.shared_head.head.weight": lm_head + 1}, ["shared_head.head", "own lm_head"]


@pytest.mark.parametrize("how", ["none", "missing", "unknown", "quantised", "misshapen", "integers", "other lm_head"])
def test_a_module_that_is_not_as_expected_is_refused(how):
    tensors, words = broken(how)
    weights = weights_of(Module("deepseek", config_of("deepseek")), torch.float32)
    weights.module = tensors
    head = build_head(parse_head({"kind": "mtp-checkpoint"}), shape_of("deepseek"), None)
    for step in (head.check_start, head.init_from_target):  # the first one runs before anything is captured
        with pytest.raises(ValueError) as error:
            step(weights)
        assert all(word in str(error.value) for word in words), error.value


def test_equal_copies_of_embedding_and_lm_head_are_accepted_and_not_trained():
    weights = weights_of(Module("deepseek", config_of("deepseek")), torch.float32)
    copies = {"embed_tokens.weight": weights.embed, "shared_head.head.weight": weights.lm_head}
    weights.module = weights.module | {f"model.layers.3.{n}": t.bfloat16() for n, t in copies.items()}
    weights.embed, weights.lm_head = weights.embed.bfloat16().float(), weights.lm_head.bfloat16().float()
    head = build_head(parse_head({"kind": "mtp-checkpoint"}), shape_of("deepseek"), None)
    head.init_from_target(weights)
    assert not any(V in p.shape for p in head.parameters())
    assert not any(n.endswith(tuple(copies)) for n in head.checkpoint_tensors(weights.module))


def test_a_checkpoint_without_its_module_stops_before_anything_is_captured(tmp_path):
    """Files without the tensors, as transformers writes them back."""
    families.save(tmp_path / "whole", "mimo", tokenizer=tiny.tokenizer(), vocab_size=384)
    target = load_target(TargetSection(path=str(tmp_path / "whole")))
    target.model.save_pretrained(tmp_path / "saved again")
    target.tokenizer.save_pretrained(tmp_path / "saved again")
    config = (tmp_path / "whole" / "config.json").read_text()
    (tmp_path / "saved again" / "config.json").write_text(config)
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    recipe = parse(
        Recipe,
        {
            "name": "x",
            "target": {"path": str(tmp_path / "saved again")},
            "data": {"train": [str(tmp_path / "rows.jsonl")]},
            "head": {"kind": "mtp-checkpoint"},
            "output": str(tmp_path / "run"),
        },
        "test",
    )
    with pytest.raises(RecipeError, match="saved again: this MiMo checkpoint lacks the MTP module"):
        capture(recipe)
    assert not (tmp_path / "run").exists()
    head_wants(recipe, target.shape, target.weights())  # the whole one passes


def test_joint_training_is_refused():
    """The adapted target is not the checkpoint that the module belongs into."""
    recipe = Recipe(
        name="x",
        target={"path": "x"},
        data={"train": ["x"]},
        features={"mode": "online"},
        head={"kind": "mtp-checkpoint"},
        train={"joint": {}},
    )
    with pytest.raises(RecipeError, match="train.joint: .*'mtp-checkpoint'.*Train it alone"):
        head_wants(recipe, shape_of("mimo"))


def test_a_random_start_is_random_and_finite():
    """transformers leaves experts uninitialised and routers at zero."""
    torch.manual_seed(0)
    head = build_head(parse_head({"kind": "mtp-checkpoint"}), shape_of("deepseek"), None)
    for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"):
        assert 0.01 < head.block.get_parameter(name).std() < 0.03, name


def test_costs_count_the_experts_of_one_token():
    _, head, _ = make("deepseek")
    sizes = {n: p.numel() for n, p in head.block.named_parameters() if p.ndim > 1}
    experts = sum(s for n, s in sizes.items() if ".experts." in n)
    assert experts == 4 * 3 * 12 * H
    keys = (12 + 4) * H + 12 * 4 * (8 + 6)
    assert head.key_weights() == keys
    assert head.row_weights() == sum(sizes.values()) - keys - experts // 2
    assert head.mlp_width() == 2 * 12 + 12
    assert head.key_shape == (4, 12)
    assert head.scale == pytest.approx(12**-0.5 * (0.1 * math.log(4) + 1) ** 2)  # YaRN's, by its factor of 4
