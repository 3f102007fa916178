from __future__ import annotations

import pytest
import reference_recurrent as reference
import tiny
import torch
from reference_recurrent import PATTERNS, SHAPE, H, V, equal, fast, features_of, gradients, make, tree_equals_chains

from headtrain.config import RecipeError
from headtrain.data.loader import Loader
from headtrain.data.store import FeatureStore
from headtrain.heads.catalog import build_head, parse_head
from headtrain.heads.eagle1 import Eagle1
from headtrain.shift import pair_mask
from headtrain.target.model import Target
from headtrain.teacher import Teacher
from headtrain.types import Batch, Features, Row, TargetWeights

DEPTH = 4
FORMS = {
    "eagle": {},
    "with bias": {"bias": True, "regression_weight": 0.5, "classification_weight": 0.3},
    "hass": {"steps": 3, "topk_weight": 1.0, "topk": 5},
    "all steps": {"steps": 4, "bias": True, "regression_weight": 0.0},
    "reduced vocabulary": {"draft_vocab_size": 40, "steps": 2, "topk_weight": 1.0, "topk": 5},
}


def head_of(rows, dtype=torch.float64, **config):
    return make("eagle1", rows, dtype, **{"depth": DEPTH, "noise": 0.0, **config})


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("form", FORMS)
def test_loss_metrics_and_gradients_equal_the_dense_reference(pattern, form):
    """In training the steps that train, in eval mode every depth. float64 throughout, except that losses and the
    teacher's logits are fp32 by contract: hence 1e-5."""
    case = head_of(PATTERNS[pattern], **FORMS[form])
    head, steps = case[0], case[0].config.steps
    equal(fast(*case), reference.eagle1(*case, depth=steps, steps=steps), head)
    head.eval()
    equal(fast(*case), reference.eagle1(*case, depth=DEPTH, steps=steps), head)


def test_a_stage_of_the_depth_schedule_trains_fewer_steps():
    case = head_of(PATTERNS["two turns"], steps=3)
    equal(fast(*case, depth=2), reference.eagle1(*case, depth=2, steps=2), case[0])


def test_hass_cuts_the_gradient_between_steps():
    """And the cut matters: the reference without it has other gradients."""
    case = head_of(PATTERNS["two turns"], steps=2)
    head, batch, final, lm_head = case
    mine = gradients(head, fast(*case).total)["fc.weight"]
    start = pair_mask(batch, 1)[0].nonzero().squeeze(1)
    through = head.unroll(batch, final, start, 2, detach=False)[1]
    cut = head.unroll(batch, final, start, 2, detach=True)[1]
    assert torch.equal(through, cut)
    a, b = (torch.autograd.grad(x.square().sum(), head.fc.weight)[0] for x in (through, cut))
    assert (a - b).abs().max() > 1e-2 * a.abs().max() and mine.any()


def test_chunks_of_the_top_k_loss_do_not_change_it(monkeypatch):
    case = head_of(tiny.rows((40, 30), vocab=V), steps=2, topk_weight=1.0)
    whole = fast(*case).total
    expected = gradients(case[0], whole)
    for module in ("losses", "heads.eagle1"):
        monkeypatch.setattr(f"headtrain.{module}.CHUNK_LOGITS", 1)  # the smallest chunk: 16 rows
    parts = fast(*case).total
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0)
    for name, gradient in gradients(case[0], parts).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


def test_the_regression_target_is_the_next_feature_and_nothing_of_another_document():
    """With the layer and fc made to pass the embedding, the prediction is known; the loss is then by hand."""
    rows = [Row([3, 4, 5, 6, 7], [0, 0, 1, 1, 1]), Row([8, 9, 10], [1, 1, 1])]
    head, batch, final, lm_head = head_of(rows, classification_weight=0.0, depth=1)
    with torch.no_grad():
        for p in head.parameters():
            p.zero_()
        head.fc.weight[:, :H] = torch.eye(H)  # pred_i = embed(t_{i+1})
    total = torch.zeros((), dtype=torch.float64)
    for i in (1, 2, 5):  # token i+1 and i+2 in one turn: 2 (5|6), 3 (6|7); and 8 | 9, 10 of the second document
        error = (head.embed[batch.ids[i + 1]] - final[i + 1]).abs()
        total = total + torch.where(error < 1, 0.5 * error**2, error - 0.5).mean()
    sums = fast(head, batch, final, lm_head)
    assert sums.count == 3
    torch.testing.assert_close(sums.total.double(), total, rtol=1e-6, atol=0)
    changed = final.clone()
    changed[[0, 1, 5]] += 1.0  # no pair's next feature; the inputs have no weight here
    assert torch.equal(fast(head, batch, changed, lm_head).total, sums.total)


def test_a_document_never_sees_another_at_any_step():
    head, batch, final, _ = head_of(tiny.rows((21, 26), vocab=V))
    start = pair_mask(batch, 1)[0].nonzero().squeeze(1)
    start = start[batch.doc[start] == 1]
    changed = final.clone()
    changed[batch.doc == 0] += 1.0
    for a, b in zip(*(head.unroll(batch, x, start, DEPTH) for x in (final, changed)), strict=True):
        assert torch.equal(a, b)


def test_noise_is_the_published_one_in_training_only_and_follows_the_seed():
    rows = [Row(list(range(3, 67)), [1] * 64), Row(list(range(3, 19)), [1] * 16)]
    head, batch, final, lm_head = make("eagle1", rows, depth=1, noise=0.1)
    torch.manual_seed(5)
    noise = head._noise(batch, final)
    for document, bound in ((0, 0.1 * 512 / 64), (1, 0.1 * 512 / 16)):
        of = noise[batch.doc == document]
        assert of.abs().max() <= bound and of.abs().max() > 0.95 * bound
        assert abs(of.mean()) < 0.1 * bound  # a uniform mean of 512 values and more: 0.026 of the bound by chance
    totals = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        totals.append(fast(head, batch, final, lm_head).total)
    assert torch.equal(totals[0], totals[1]) and not torch.equal(totals[0], totals[2])
    quiet = make("eagle1", rows, depth=1, noise=0.0)[0]
    start = pair_mask(batch, 1)[0].nonzero().squeeze(1)  # the noise is in the input, never in what is predicted
    error = head.unroll(batch, final + noise, start, 1)[0] - final[start + 1]
    head.config.classification_weight, head.config.regression_weight = 0.0, 1.0
    torch.manual_seed(5)
    regression = fast(head, batch, final, lm_head).total
    expected = torch.nn.functional.smooth_l1_loss(error, torch.zeros_like(error), reduction="none").mean(-1).sum()
    torch.testing.assert_close(regression.double(), expected, rtol=1e-5, atol=0)
    quiet.config = head.config.model_copy(update={"noise": 0.0})
    head.eval(), quiet.eval()
    assert torch.equal(fast(head, batch, final, lm_head).total, fast(quiet, batch, final, lm_head).total)


def test_the_frozen_embedding_and_lm_head_get_no_gradient_and_are_not_saved():
    head, batch, final, lm_head = head_of(PATTERNS["two turns"], steps=2, topk_weight=1.0)
    weights = TargetWeights(head.embed.clone().requires_grad_(), lm_head.clone().requires_grad_(), torch.ones(H))
    head.attach(weights)
    fast(head, batch, final, lm_head).total.backward()
    assert head.fc.weight.grad.any() and weights.embed.grad is None and weights.lm_head.grad is None
    names = set(head.state_dict())
    assert names == {n for n, _ in head.named_parameters()}
    assert not any("embed" in n or "lm_head" in n or "input_layernorm" in n or n == "norm.weight" for n in names)


@torch.no_grad()
def test_session_equals_the_reference_at_every_position_and_step():
    head, batch, final, lm_head = head_of([Row(list(range(3, 27)), [1] * 24)], dtype=torch.float64)
    wanted = [h @ lm_head.t() for h in reference.eagle1_hidden(head, batch, final, DEPTH)]
    start = pair_mask(batch, 1)[0].nonzero().squeeze(1)
    unrolled = head.unroll(batch, final, start, DEPTH)
    session, compared = head.session(len(batch)), 0
    for i in range(len(batch) - 1):
        logits = session.extend(batch.ids[i + 1 : i + 2], final.new_zeros(1, 0, H), final[i : i + 1])
        for s in range(DEPTH):
            if i + 2 + s >= len(batch):
                break
            if s:
                logits = session.expand(torch.tensor([s - 2]), batch.ids[i + 1 + s : i + 2 + s])[0]
            # logits are float32 by contract, as are the rotation's angles
            torch.testing.assert_close(logits.double(), wanted[s][i], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(unrolled[s][i] @ lm_head.t(), wanted[s][i], rtol=1e-5, atol=1e-5)
            compared += 1
    assert compared == 22 + 21 + 20 + 19


@torch.no_grad()
def test_a_tree_equals_its_chains():
    tree_equals_chains(head_of([Row(list(range(3, 27)), [1] * 24)]))


@torch.no_grad()
def test_extending_at_once_equals_one_by_one_and_forgets_guesses():
    head, batch, final, _ = head_of([Row(list(range(3, 27)), [1] * 24)])
    one, many, nothing = head.session(30), head.session(30), final.new_zeros(12, 0, H)
    for i in range(12):
        stepwise = one.extend(batch.ids[i + 1 : i + 2], nothing[:1], final[i : i + 1])
        one.expand(torch.tensor([-1]), torch.tensor([7]))
    torch.testing.assert_close(stepwise, many.extend(batch.ids[1:13], nothing, final[:12]), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="30 positions is full"):
        many.extend(torch.arange(19), final.new_zeros(19, 0, H), final[:19])
    with pytest.raises(ValueError, match="more than 256 nodes"):
        small = head.session(1)
        small.extend(batch.ids[1:2], nothing[:1], final[:1])
        for _ in range(5):
            small.expand(torch.full((64,), -1), torch.arange(64))


def test_features_at_supervised_positions_only_are_refused():
    head, batch, final, lm_head = head_of(PATTERNS["two turns"])
    at = torch.arange(3, len(batch))
    whole = features_of(batch, final, lm_head)
    some = Features(whole.layers, at, final[at], whole.argmax[at], whole.lse[at])
    with pytest.raises(ValueError, match="63 of 66 positions.*final=.all"):
        head.loss(batch, some, Teacher(lm_head), 1)
    with pytest.raises(ValueError, match="63 of 66 positions"):
        head.chain_hits(batch, some, 1)


def test_stored_features_of_every_position_give_the_loss_of_fresh_ones(tiny_folder, tmp_path):
    """Through capture, store and loader: the first head that reads ``final`` everywhere."""
    import io
    import json

    from rich.console import Console

    from headtrain.capture import capture, head_wants, plan_rows
    from headtrain.config import Recipe
    from headtrain.target.load import load_target

    chats = [[("user", "Hello! How are you?"), ("assistant", f"I am fine, thank you {n}.")] for n in range(5)]
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in chat]}) for chat in chats]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    recipe = Recipe(
        name="tiny",
        target={"path": str(tiny_folder)},
        data={"train": [str(tmp_path / "rows.jsonl")]},
        features={"dir": str(tmp_path / "f"), "dtype": "float32", "shard_tokens": 150, "batch_tokens": 120},
        head={"kind": "eagle1", "depth": 2, "noise": 0.0},
    )
    target = load_target(recipe.target)
    rows = plan_rows(recipe, target.tokenizer)["train"].rows
    capture(recipe, target=target, console=Console(file=io.StringIO()))
    wants = head_wants(recipe, target.shape)
    assert wants.final == "all" and wants.layers == ()
    store = FeatureStore(tmp_path / "f" / "train", rows=rows)
    assert store.manifest.unmet(wants) == []
    head = build_head(parse_head(recipe.head), target.shape, None).eval()
    head.attach(target.weights())
    head.init_from_target(target.weights())
    seen = 0
    for batch, features in Loader(store, 100).batches(0, 3):
        assert torch.equal(features.final_at, torch.arange(len(batch)))
        fresh = target.features(batch, wants)
        torch.testing.assert_close(features.final, fresh.final, rtol=1e-5, atol=1e-5)
        stored, online = (head.loss(batch, f, target.teacher(), 2) for f in (features, fresh))
        torch.testing.assert_close(stored.total, online.total, rtol=1e-5, atol=0)
        seen += int(stored.count)
    assert seen > 20


def test_init_from_target_copies_the_last_layer_and_passes_the_feature():
    target = Target.of(tiny.model())
    weights = target.weights()
    head = build_head(parse_head({"kind": "eagle1", "bias": True}), target.shape, None)
    said = head.init_from_target(weights)
    layer = "decoder layer = the target's last layer, with o_proj and down_proj zero"
    assert said == ["fc = identity on the feature", layer]
    for name, p in head.block.named_parameters():
        closed = name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
        assert torch.equal(p, torch.zeros_like(p) if closed else weights.last_layer[name]), name
    head.attach(weights)
    final = torch.randn(3, 64)
    logits = head.session(3).extend(torch.tensor([5, 6, 7]), final.new_zeros(3, 0, 64), final)
    torch.testing.assert_close(logits, target.teacher().logits(final[-1:])[0])  # the feature itself, at first
    other = build_head(parse_head({"kind": "eagle1", "intermediate_size": 7}), target.shape, None)
    before = {n: p.clone() for n, p in other.block.named_parameters()}
    assert "mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight" in other.init_from_target(weights)[1]
    assert all(torch.equal(p, before[n]) for n, p in other.block.named_parameters())


def test_one_text_learned_by_heart_is_drafted_beyond_depth_one():
    """A chain of the head's own features: what depth 1 alone cannot give is a tau above 2."""
    target = Target.of(tiny.model(num_hidden_layers=4, tie_word_embeddings=False, initializer_range=0.2))
    ids = torch.randint(3, 384, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    batch = Batch.pack([Row(ids, [1] * 40)])
    torch.manual_seed(2)
    head = build_head(parse_head({"kind": "eagle1", "depth": 3, "noise": 0.0}), target.shape, None)
    head.attach(target.weights())
    head.init_from_target(target.weights())
    features = target.features(batch, head.wants())
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(60):
        optimizer.zero_grad()
        sums = head.loss(batch, features, target.teacher(), 3)
        (sums.total / sums.count).backward()
        optimizer.step()
    head.eval()
    sums = head.loss(batch, features, target.teacher(), 3)
    alpha = sums.chain_hits / sums.chain_pairs
    assert alpha[0] > 0.9 and 1 + alpha.cumprod(0).sum() > 2.5


CONFIG = {"depth": 2, "noise": 0.0}


def exported():
    head = build_head(parse_head({"kind": "eagle1", **CONFIG}), SHAPE.replace(max_positions=77), None)
    return head, head.export_spec("vllm")


def test_the_vllm_form_is_a_plain_llama_config_and_reads_back():
    head, spec = exported()
    assert spec.method == "eagle" and spec.config["architectures"] == ["LlamaForCausalLM"]
    assert spec.config["num_hidden_layers"] == 1 and spec.config["model_type"] == "llama"
    assert set(spec.tensors) == {"fc.weight", "layers.0.post_attention_layernorm.weight"} | {
        f"layers.0.{n}.weight"
        for n in [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    }
    assert {n: tuple(t.shape) for n, t in spec.tensors.items()} == Eagle1.expected_tensors("vllm", spec.config)
    again = Eagle1.from_export("vllm", spec.config, spec.tensors, SHAPE)
    assert again.shape == head.shape
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in head.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "expected .'LlamaForCausalLM'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2"),
        ({"attention_bias": True}, "no biases"),
    ],
)
def test_a_contradicting_config_is_refused(change, message):
    _, spec = exported()
    with pytest.raises(ValueError, match=message):
        Eagle1.from_export("vllm", spec.config | change, spec.tensors, SHAPE)


def test_lost_and_foreign_tensors_are_refused():
    _, spec = exported()
    with pytest.raises(ValueError, match=r"missing fc\.weight"):
        Eagle1.from_export("vllm", spec.config, {n: t for n, t in spec.tensors.items() if n != "fc.weight"}, SHAPE)
    with pytest.raises(ValueError, match=r"unknown norm\.weight"):
        Eagle1.from_export("vllm", spec.config, spec.tensors | {"norm.weight": torch.ones(H)}, SHAPE)


def test_what_vllm_would_lose_is_refused_with_the_reason():
    head = build_head(parse_head({"kind": "eagle1", "bias": True}), SHAPE, None)
    with pytest.raises(ValueError, match=r"drops fc\.bias.*head\.bias=false"):
        head.export_spec("vllm")
    gelu = build_head(parse_head({"kind": "eagle1"}), SHAPE.replace(hidden_act="gelu"), None)
    with pytest.raises(ValueError, match="silu only"):
        gelu.export_spec("vllm")
    with pytest.raises(KeyError):
        head.export_spec("trtllm")
    with pytest.raises(KeyError):
        Eagle1.expected_tensors("trtllm", {})


def test_steps_beyond_the_depth_are_refused():
    with pytest.raises(RecipeError, match="steps 3 is more than depth 2"):
        parse_head({"kind": "eagle1", "depth": 2, "steps": 3})


def test_an_unattached_head_says_so():
    head = build_head(parse_head({"kind": "eagle1"}), SHAPE, None)
    with pytest.raises(RuntimeError, match="attach"):
        head.lm_head_weight()


def test_flops_and_kept_values_grow_with_the_steps_that_train():
    batch = Batch.pack(PATTERNS["two turns"])
    one, three = (build_head(parse_head({"kind": "eagle1", "steps": n}), SHAPE, None) for n in (1, 3))
    assert one.flops(batch, 5) == one.flops(batch, 1) == three.flops(batch, 1) < three.flops(batch, 5)
    assert one.kept_values(66, 30, 5) < three.kept_values(66, 30, 5)
    assert one.max_depth is None


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "hf"])
def test_a_reduced_vocabulary_is_refused_by_engines_that_draft_the_whole(dialect):
    head = build_head(
        parse_head({"kind": "eagle1", "draft_vocab_size": 8}), Target.of(tiny.model()).shape, torch.arange(8)
    )
    with pytest.raises(ValueError, match=r"head.draft_vocab_size=8 \(it drafts the whole .*headtrain vocab RUN --size"):
        head.export_spec(dialect)
