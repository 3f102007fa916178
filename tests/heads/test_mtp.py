from __future__ import annotations

import importlib

import checkpoint_families
import pytest
import reference_recurrent as reference
import tiny
import torch
import transformers as hf
from reference_recurrent import (
    PATTERNS,
    SHAPE,
    H,
    V,
    equal,
    fast,
    features_of,
    gradients,
    make,
    raw,
    tree_equals_chains,
)

from headtrain.config import RecipeError
from headtrain.heads.catalog import build_head, parse_head
from headtrain.heads.experts import Experts, expert_sizes
from headtrain.heads.mtp import Mtp
from headtrain.heads.recurrent import seen_positions
from headtrain.shift import pair_mask
from headtrain.target.model import Target
from headtrain.target.own_module import expert_settings
from headtrain.teacher import Teacher
from headtrain.types import Batch, Row, TargetWeights

DEPTH = 4
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "norm_topk_prob": True}
SHARED = EXPERTS | {"norm_topk_prob": False, "shared_expert_intermediate_size": 14}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GROUPED = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "norm_topk_prob": True,
    "n_shared_experts": 2, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
MIXTURES = {
    "qwen3_moe": SHAPE.replace(model_type="qwen3_moe", experts=EXPERTS),
    "qwen2_moe": SHAPE.replace(model_type="qwen2_moe", experts=SHARED),
    "mixtral": SHAPE.replace(model_type="mixtral", experts=MIXTRAL, intermediate_size=16),
    "deepseek_v3": SHAPE.replace(model_type="deepseek_v3", experts=GROUPED),
}
FORMS = {
    "mimo": {},
    "deepseek": {
        "concat": "embed_first",
        "start": "normed",
        "recycle": "raw",
        "labels": "soft",
        "zero_first_embedding": False,
    },
    "qwen2, own lm_head": {"attention_bias": True, "own_lm_head": True},
    "qwen3, reduced vocabulary": {"qk_norm": True, "draft_vocab_size": 40, "labels": "soft", "beta": 1.0},
    "reduced own lm_head, hard": {"own_lm_head": True, "draft_vocab_size": 40},
    "fastmtp": {"context": "own"},
    "fastmtp, raw, soft": {"context": "own", "recycle": "raw", "labels": "soft", "attention_bias": True},
    "chain": {"modules": DEPTH},
    "chain, deepseek": {
        "modules": DEPTH,
        "concat": "embed_first",
        "start": "normed",
        "recycle": "raw",
        "labels": "soft",
    },
    "chain, reduced": {"modules": DEPTH, "draft_vocab_size": 40, "own_lm_head": True, "zero_first_embedding": False},
    "qwen3 moe": {"shape": MIXTURES["qwen3_moe"], "balance": 0.3},
    "qwen2 moe, fastmtp": {"shape": MIXTURES["qwen2_moe"], "context": "own", "balance": 0.3, "labels": "soft"},
    "mixtral, chain": {"shape": MIXTURES["mixtral"], "modules": DEPTH, "balance": 0.3},
    "deepseek moe, chain": {"shape": MIXTURES["deepseek_v3"], "modules": DEPTH, "balance": 0.3},
}


def head_of(rows, dtype=torch.float64, **config):
    return make("mtp", rows, dtype, **{"depth": DEPTH, **config})


def check(case, own: bool, depth: int = DEPTH):
    ours, theirs = fast(*case, depth=depth), reference.mtp(*case, depth=depth, own=own)
    if case[0].config.labels == "hard":  # the target's distribution is not computed
        assert ours.accept.isnan().all()
        ours.accept, theirs["accept"] = theirs["accept"], theirs["accept"].clone()
    equal(ours, theirs, case[0])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("form", FORMS)
def test_loss_metrics_and_gradients_equal_the_dense_reference(pattern, form):
    """In training in the context asked for, in eval mode in that of decoding, whatever was asked for."""
    case = head_of(PATTERNS[pattern], **FORMS[form])
    check(case, own=case[0].config.own_context)
    case[0].eval()
    check(case, own=False)


@pytest.mark.parametrize("context", ["first", "own"])
def test_a_stage_of_the_depth_schedule_weighs_the_steps_that_it_has(context):
    case = head_of(PATTERNS["two turns"], context=context)
    for depth in (1, 3):
        check(case, own=context == "own", depth=depth)


def test_published_weights():
    """FastMTP: beta .6 and three steps give .51 .31 .18."""
    case = head_of(PATTERNS["two turns"], depth=3)
    sums = fast(*case)
    weighted = (sums.loss * torch.tensor([0.5102, 0.3061, 0.1837])).sum()
    torch.testing.assert_close(sums.total, weighted, rtol=1e-4, atol=0)


def test_the_contexts_agree_at_depth_one_and_differ_below():
    first, own = (head_of(PATTERNS["two turns"], context=context) for context in ("first", "own"))
    for depth, same in ((1, True), (2, False)):
        a, b = (fast(*case, depth=depth).loss for case in (first, own))
        assert torch.allclose(a, b, rtol=1e-6) == same


@pytest.mark.parametrize("context", ["first", "own"])
def test_a_document_never_sees_another_at_any_step(context):
    """Not even at the end of the first, whose later steps are fed tokens of the second."""
    rows = [Row(list(range(3, 24)), [0] * 5 + [1] * 16), Row(list(range(40, 66)), [0] * 5 + [1] * 21)]
    head, batch, final, lm_head = head_of(rows, context=context)
    other = Batch(batch.ids.clone(), batch.doc, batch.pos, batch.turn, batch.cu)
    for document in (0, 1):
        start = pair_mask(batch, 1)[0].nonzero().squeeze(1)
        start = start[batch.doc[start] == document]
        changed, other.ids = final.clone(), batch.ids.clone()
        changed[batch.doc != document] += 1.0
        other.ids[batch.doc != document] += 20
        unroll = head.unroll if context == "first" else head.unroll_own_context
        steps = [unroll(b, x, start, DEPTH) for b, x in ((batch, final), (other, changed))]
        for s, (a, b) in enumerate(zip(*steps, strict=True)):
            counts = pair_mask(batch, s + 1)[s][start[: len(a)]]
            assert torch.equal(a[counts], b[counts]), f"step {s}"
            assert counts.any()


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_session_equals_the_reference_at_every_position_and_step(form):
    """Drafting is decoding's context whatever training's was; the embedding at position 0 is zero where asked for."""
    head, batch, final, lm_head = head_of([Row(list(range(3, 17)), [1] * 14)], **FORMS[form])
    ids = torch.arange(V) if head.draft_ids is None else head.draft_ids
    weight = head.lm_head.weight if head.config.own_lm_head else lm_head[ids]
    wanted = [h @ weight.t() for h in reference.mtp_hidden(head, batch, final, DEPTH, own=False)]
    session, compared = head.session(len(batch)), 0
    for i in range(len(batch) - 1):
        logits = session.extend(batch.ids[i + 1 : i + 2], raw(final[i : i + 1]), final[i : i + 1])
        for s in range(min(DEPTH, len(batch) - 2 - i)):
            if s:
                logits = session.expand(torch.tensor([s - 2]), batch.ids[i + 1 + s : i + 2 + s])[0]
            torch.testing.assert_close(logits.double(), wanted[s][i], rtol=1e-5, atol=1e-5)  # float32 by contract
            compared += 1
    assert compared == 12 + 11 + 10 + 9


@torch.no_grad()
@pytest.mark.parametrize("form", ["mimo", "deepseek", "chain, deepseek", "qwen3 moe"])
def test_a_tree_equals_its_chains(form):
    deeper = {"depth": 5, "modules": 5} if "chain" in form else {}  # the tree has guesses of depth 4
    tree_equals_chains(head_of([Row(list(range(3, 27)), [1] * 24)], **FORMS[form] | deeper))


@torch.no_grad()
@pytest.mark.parametrize("first", [1, 2, 5])
def test_a_chain_of_modules_takes_accepted_tokens_in_any_number_and_forgets_guesses(first):
    """Also where the text begins shorter than the chain is long."""
    head, batch, final, lm_head = head_of([Row(list(range(3, 20)), [1] * 17)], modules=DEPTH)

    def feed(session, a, b):
        return session.extend(batch.ids[a + 1 : b + 1], raw(final)[a:b], final[a:b])

    pieces, single, at = head.session(20), head.session(20), 0
    for n in (first, 3, 1, 1, 4):
        got = feed(pieces, at, at + n)
        for i in range(at, at + n):
            want = feed(single, i, i + 1)
        at += n
        for guesses in ([7], [8, 9], [10]):  # wide and deep, to be forgotten
            parents = torch.tensor([len(pieces.parents) - 1] * len(guesses))
            a, b = (x.expand(parents, torch.tensor(guesses)) for x in (pieces, single))
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="5 tokens drafted, but there are 4 modules"):
        pieces.expand(torch.tensor([3]), torch.tensor([5]))
    with pytest.raises(ValueError, match="more than 256 nodes"):
        pieces.expand(torch.tensor([-1] * 253), torch.arange(253) % V)


def test_a_chain_drafts_no_deeper_than_it_has_modules():
    head, batch, final, lm_head = head_of(PATTERNS["two turns"], depth=2, modules=2)
    assert head.max_depth == 2
    for call in (head.loss, lambda b, f, _, depth: head.chain_hits(b, f, depth)):
        with pytest.raises(ValueError, match="depth 3, but there are 2 modules"):
            call(batch, features_of(batch, final, lm_head), Teacher(lm_head), 3)


def test_the_embedding_at_position_zero_is_zero_only_where_asked_for():
    rows = [Row(list(range(3, 15)), [1] * 12)]
    for zero in (True, False):
        head, batch, final, lm_head = head_of(rows, zero_first_embedding=zero)
        before = fast(head, batch, final, lm_head, depth=1).total
        with torch.no_grad():
            head.embed = head.embed.index_add(0, batch.ids[1:2], torch.ones(1, H, dtype=torch.float64))
        assert torch.equal(before, fast(head, batch, final, lm_head, depth=1).total) == zero


def test_frozen_tensors_get_no_gradient_and_are_not_saved():
    head, batch, final, lm_head = head_of(PATTERNS["two turns"])
    weights = TargetWeights(head.embed.clone().requires_grad_(), lm_head.clone().requires_grad_(), torch.ones(H))
    head.attach(weights)
    fast(head, batch, final, lm_head).total.backward()
    assert head.input_proj.weight.grad.any() and weights.embed.grad is None and weights.lm_head.grad is None
    assert set(head.state_dict()) == {n for n, _ in head.named_parameters()}
    assert "lm_head.weight" not in head.state_dict()


QWEN = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip


MOE = QWEN | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MODELS = {
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**QWEN)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**QWEN)),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**MOE)),
    "qwen2_moe": lambda: hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**MOE, shared_expert_intermediate_size=40)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**QWEN, num_local_experts=4)),
}


def family(name: str) -> Target:
    torch.manual_seed(0)
    if name == "llama":
        return Target.of(tiny.model())
    model = MODELS[name]()
    with torch.no_grad():  # biases and norms are zero and one at random start: nothing would be seen of them
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.2)
    return Target.of(model.eval())


@pytest.mark.parametrize("name", ["llama", *MODELS])
def test_the_block_is_of_the_targets_kind_and_starts_as_its_last_layer(name):
    """With its two branches opened again, the head's layer is the target's last layer on any input."""
    target = family(name)
    weights, size = target.weights(), target.shape.hidden_size
    head = build_head(parse_head({"kind": "mtp"}), target.shape, None)
    said = head.init_from_target(weights)
    assert said[2] == "decoder layer = the target's last layer, with o_proj and down_proj zero"
    assert torch.equal(head.final_layernorm.weight, weights.final_norm)
    assert ("block.self_attn.q_proj.bias" in head.state_dict()) == (name in ("qwen2", "qwen2_moe"))
    assert ("block.self_attn.q_norm.weight" in head.state_dict()) == (name in ("qwen3", "qwen3_moe"))
    assert isinstance(head.block.mlp, Experts) == (name in MIXTURES)
    e, h = torch.randn(9, size), torch.randn(9, size)
    x = head.fuse(e, h)[1]
    torch.testing.assert_close(x, torch.nn.functional.rms_norm(h, (size,), None, target.shape.rms_norm_eps))
    with torch.no_grad():
        assert torch.equal(head.block.finish(torch.randn(9, target.shape.num_heads, target.shape.head_dim), x), x)
        for name, p in head.block.named_parameters():
            p.copy_(weights.last_layer[name])
        read, residual = head.fuse(e, h)
        attention, angles = head.block.self_attn, head.rope(torch.arange(9))
        q, k, v = attention.queries(read, angles), attention.keys(read, angles), attention.values(read)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mine = head.block.finish(attended[0].transpose(0, 1), residual)
        body = target.model.model
        angles = body.rotary_emb(x[None], torch.arange(9)[None])
        mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
        theirs = body.layers[-1](x[None], position_embeddings=angles, attention_mask=mask)[0]
    torch.testing.assert_close(mine, theirs.view_as(mine), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("deepseek", "DeepseekV3MoE"),
        ("glm", "Glm4MoeMoE"),
        ("qwen3-next", "Qwen3NextSparseMoeBlock"),
        ("qwen3.5-moe", "Qwen3_5MoeSparseMoeBlock"),
    ],
)
def test_the_mixture_of_families_with_another_attention_is_their_own(name, layer):
    """Names, values and gradients of transformers' layer, with more than one group of experts where there are some."""
    config = checkpoint_families.config_of(name)
    package = checkpoint_families.KINDS[name].package
    models = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    theirs = getattr(models, layer)(config).double()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(std=0.3)
    shape = SHAPE.replace(model_type=config.model_type, experts=expert_settings(config))
    mine = Experts(config.hidden_size, expert_sizes(shape), config.hidden_act).double()
    mine.load_state_dict({n: t for n, t in theirs.state_dict().items() if not n.endswith("e_score_correction_bias")})
    x = torch.randn(1, 40, config.hidden_size, dtype=torch.float64)
    weigh, found = torch.randn_like(x), []
    for module, out in ((mine, mine(x[0])[None]), (theirs, theirs(x))):
        (out * weigh).sum().backward()
        found.append({"out": out} | {n: p.grad for n, p in module.named_parameters()})
    assert found[0].keys() == found[1].keys()
    for key, value in found[1].items():
        assert value.norm() > 0, key
        # the routers compute in float32
        torch.testing.assert_close(found[0][key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_at_first_it_drafts_from_the_targets_own_feature():
    """Raw start, closed branches, the target's final norm: the module's output is the target's final feature."""
    target = family("qwen2")
    head = build_head(parse_head({"kind": "mtp"}), target.shape, None)
    head.attach(target.weights())
    head.init_from_target(target.weights())
    batch = Batch.pack([Row(list(range(3, 15)), [1] * 12)])
    features = target.features(batch, head.wants())
    assert torch.equal(features.final_at, torch.arange(11)) and features.layers.shape == (12, 1, 32)
    logits = head.session(12).extend(batch.ids[1:], features.layers[:11], features.final)
    # the stream is small here, so that the norms' epsilon, which enters twice, is seen: 1e-3 of logits near 1
    torch.testing.assert_close(logits, target.teacher().logits(features.final[-1:])[0], rtol=1e-3, atol=1e-3)


def test_a_target_whose_layer_does_not_fit_is_said():
    target = family("qwen3")
    head = build_head(parse_head({"kind": "mtp", "attention_bias": True}), target.shape, None)
    assert "does not fit (self_attn.q_proj.bias" in head.init_from_target(target.weights())[2]
    plain = build_head(parse_head({"kind": "mtp", "qk_norm": False}), target.shape, None)
    assert "without self_attn.k_norm.weight, self_attn.q_norm.weight" in plain.init_from_target(target.weights())[2]


def test_an_own_lm_head_starts_as_the_targets_rows_of_the_draft_vocabulary():
    target = family("llama")
    ids = torch.arange(0, 384, 6)
    config = parse_head({"kind": "mtp", "own_lm_head": True, "draft_vocab_size": 64})
    assert Mtp.uses_draft_vocab(config, target.shape) == 64
    head = build_head(config, target.shape, ids)
    assert head.init_from_target(target.weights())[-1] == "lm_head = the target's rows"
    assert torch.equal(head.lm_head.weight, target.weights().lm_head[ids])
    frozen = build_head(parse_head({"kind": "mtp", "draft_vocab_size": 64}), target.shape, ids)
    frozen.attach(target.weights())
    assert torch.equal(frozen.lm_head_weight(), target.weights().lm_head[ids])


@pytest.mark.parametrize("context", ["first", "own"])
def test_one_text_learned_by_heart_is_drafted_to_its_depth(context):
    """Also what was trained in FastMTP's context drafts deep in decoding's, if less well."""
    target = Target.of(tiny.model(num_hidden_layers=4, tie_word_embeddings=False, initializer_range=0.2))
    ids = torch.randint(3, 384, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    batch = Batch.pack([Row(ids, [1] * 30)])
    torch.manual_seed(2)
    config = parse_head({"kind": "mtp", "depth": 3, "labels": "soft", "context": context})
    head = build_head(config, target.shape, None)
    head.attach(target.weights())
    head.init_from_target(target.weights())
    features = target.features(batch, head.wants())
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(40):
        optimizer.zero_grad()
        sums = head.loss(batch, features, target.teacher(), 3)
        (sums.total / sums.count).backward()
        optimizer.step()
    head.eval()
    sums = head.loss(batch, features, target.teacher(), 3)
    tau = 1 + (sums.chain_hits / sums.chain_pairs).cumprod(0).sum()
    assert tau > 2.5


def test_bf16_autocast_stays_near_fp32():
    case = head_of(tiny.rows((40, 30), vocab=V), dtype=torch.float32, qk_norm=True)
    exact = fast(*case)
    with torch.autocast("cpu", torch.bfloat16):
        rough = fast(*case)
    # bf16 keeps 8 bits: the mean of some 150 losses moves by less than 2 %
    torch.testing.assert_close(rough.total, exact.total, rtol=0.02, atol=0)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients(case[0], rough.total).values())


def test_another_teacher_is_not_answered_from_the_first_ones_rows():
    head, batch, final, lm_head = head_of(PATTERNS["two turns"], labels="soft", draft_vocab_size=40)
    other = lm_head.flip(0)
    fast(head, batch, final, lm_head)
    features = features_of(batch, final, other)
    mine = head.loss(batch, features, Teacher(other), DEPTH).total
    head._teacher = None
    assert torch.equal(mine, head.loss(batch, features, Teacher(other), DEPTH).total)


def test_no_other_engine_loads_it_and_contradictions_are_refused():
    head = build_head(parse_head({"kind": "mtp"}), SHAPE, None)
    assert head.max_depth is None
    for call in (lambda: head.export_spec("sglang"), lambda: Mtp.expected_tensors("sglang", {})):
        with pytest.raises(KeyError):
            call()
    with pytest.raises(RecipeError, match="needs the target's distribution"):
        parse_head({"kind": "mtp", "loss": "tv"})


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        (SHAPE, {"modules": 3}, "head.modules=3 .its class .* runs one module at every step, head.modules=1"),
        (MIXTURES["qwen3_moe"], {}, "a mixture of experts .*head.block=dense.*a target of type 'qwen3_moe'"),
        (SHAPE, {"intermediate_size": 20}, r"head.intermediate_size=20 \(the target's: 48\)"),
    ],
)
def test_the_engines_form_has_one_dense_module(shape, options, said):
    head = build_head(parse_head({"kind": "mtp", **options}), shape, None)
    with pytest.raises(ValueError, match=said):
        head.export_spec("vllm")


def test_flops_and_kept_values_grow_with_depth_and_context():
    batch = Batch.pack(PATTERNS["two turns"])
    first, own = (build_head(parse_head({"kind": "mtp", "context": c}), SHAPE, None) for c in ("first", "own"))
    assert first.flops(batch, 1) == own.flops(batch, 1)
    assert first.flops(batch, 1) < first.flops(batch, 3) < own.flops(batch, 3)
    assert first.kept_values(66, 30, 3) < own.kept_values(66, 30, 3)


@pytest.mark.parametrize("mixture", [False, True])
def test_every_module_of_a_chain_starts_as_one_alone(mixture):
    target = family("qwen3_moe" if mixture else "qwen3")
    weights = target.weights()
    heads = [build_head(parse_head({"kind": "mtp", "depth": 3, "modules": n}), target.shape, None) for n in (1, 3)]
    said = [head.init_from_target(weights) for head in heads]
    assert said[1] == [*said[0], "3 modules, all alike"]
    alone, chain = (head.state_dict() for head in heads)
    assert chain.keys() == alone.keys() | {f"later.{k}.{name}" for k in range(2) for name in alone}
    assert all(torch.equal(chain[f"later.{k}.{name}"], tensor) for k in range(2) for name, tensor in alone.items())


def test_a_stage_of_the_depth_schedule_leaves_the_later_modules_alone():
    case = head_of(PATTERNS["two turns"], depth=3, modules=3)
    fast(*case, depth=2).total.backward()
    grads = {n: p.grad for n, p in case[0].named_parameters()}
    assert all((g is None) == n.startswith("later.1.") for n, g in grads.items())


def test_experts_cost_what_one_token_passes():
    batch, plain = Batch.pack(PATTERNS["two turns"]), {"kind": "mtp", "qk_norm": False, "attention_bias": False}
    queries = int(pair_mask(batch, 3).sum())
    dense = build_head(parse_head(plain | {"block": "dense"}), SHAPE, None)
    for name, active, router in (
        ("qwen3_moe", 2 * 10, 6 * H),
        ("qwen2_moe", 2 * 10 + 14, 6 * H + H),  # and the shared expert's gate
        ("mixtral", 2 * 16, 4 * H),
        ("deepseek_v3", 2 * 10 + 20, 6 * H),
    ):
        head = build_head(parse_head(plain | {"block": "moe"}), MIXTURES[name], None)
        more = 3 * H * (active - SHAPE.intermediate_size) + router
        assert head.flops(batch, 3) - dense.flops(batch, 3) == 6 * queries * more, name
        routed = 4 * (active - SHAPE.intermediate_size) + 2 * head.block.mlp.sizes.count + 2 * 2 * H
        assert head.kept_values(60, 30, 3) - dense.kept_values(60, 30, 3) == 30 * 3 * routed, name


def test_a_chain_costs_its_own_projection_of_the_embedding_at_each_step():
    batch, options = Batch.pack(PATTERNS["two turns"]), {"kind": "mtp", "depth": 3, "context": "own"}
    shared, chain = (build_head(parse_head(options | {"modules": n}), SHAPE, None) for n in (1, 3))
    start = pair_mask(batch, 1)[0].nonzero().squeeze(1)
    assert chain.flops(batch, 3) - shared.flops(batch, 3) == 2 * 2 * 2 * seen_positions(batch, start) * H * H
    assert chain.kept_values(60, 30, 3) == shared.kept_values(60, 30, 3)


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        (SHAPE, {"block": "moe"}, "family 'llama' has experts of no kind that is built here .*head.block=dense"),
        (SHAPE.replace(model_type="qwen3_moe"), {"block": "moe"}, "gives no sizes of its experts .*expect.experts"),
        (
            SHAPE.replace(model_type="qwen3_moe", experts={"num_experts": 6}),
            {},
            r"lack 'num_experts_per_tok': found \['num_experts'\].*head.block=dense",
        ),
        (SHAPE.replace(model_type="deepseek_v3", module={"count": 1}), {"block": "moe"}, "head.kind=mtp-checkpoint"),
        (SHAPE, {"modules": 2}, "modules=2 with depth=3.*head.depth=2 .or head.modules=3.*head.modules=1"),
        (SHAPE, {"modules": 3, "context": "first"}, "context=first with modules=3.*leave head.context out"),
        (SHAPE, {"block": "moe", "intermediate_size": 8}, "intermediate_size=8 with block=moe.*head.block=dense"),
    ],
)
def test_what_cannot_be_built_is_refused_with_what_can(shape, options, said):
    with pytest.raises(RecipeError, match=said):
        build_head(parse_head({"kind": "mtp", **options}), shape, None)


def test_a_dense_layer_is_built_where_the_mixture_is_not_known_or_not_wanted():
    for shape, options in (
        (SHAPE.replace(model_type="gpt_oss", experts={"num_local_experts": 4}), {}),
        (MIXTURES["qwen3_moe"], {"block": "dense"}),
        (MIXTURES["qwen3_moe"], {"intermediate_size": 20}),
    ):
        head = build_head(parse_head({"kind": "mtp", **options}), shape, None)
        assert head.block.mlp.gate_proj.out_features == options.get("intermediate_size", shape.intermediate_size)
        said = head.init_from_target(TargetWeights(torch.randn(V, H), torch.randn(V, H), torch.ones(H)))
        unknown = "dense MLP in place of the target's mixture of experts: that of family 'gpt_oss'"
        assert any(unknown in line for line in said) == (shape.model_type == "gpt_oss")
