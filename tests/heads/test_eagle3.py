from __future__ import annotations

import pytest
import reference_eagle3
import tiny
import torch

from headtrain.heads.catalog import build_head, parse_head
from headtrain.shift import final_positions
from headtrain.teacher import Teacher
from headtrain.types import Batch, Features, Row, TargetShape, TargetWeights

H, V, DEPTH = 32, 96, 5
SHAPE = TargetShape("LlamaForCausalLM", "llama", H, 48, 8, 4, 2, 8, V, max_positions=256)
SWITCHES = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True},
    {"draft_vocab_size": 40},
]


def make(rows, dtype=torch.float64, seed=0, **config):
    """A head with random parameters, random features for ``rows``, and the target's random lm_head."""
    g = torch.Generator().manual_seed(seed)
    cfg = parse_head({"kind": "eagle3", "depth": DEPTH, "draft_vocab_size": None, **config})
    size = cfg.draft_vocab_size
    ids = None if size is None else torch.randperm(V, generator=g)[:size].sort().values
    head = build_head(cfg, SHAPE, ids).to(dtype)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=dtype) * (0.3 if p.ndim > 1 else 0.2) + (p.ndim == 1))
    batch = Batch.pack(rows)
    lm_head = torch.randn(V, H, generator=g, dtype=dtype)
    head.attach(TargetWeights(torch.randn(V, H, generator=g, dtype=dtype), lm_head, torch.ones(H, dtype=dtype)))
    layers = torch.randn(len(batch), 3, H, generator=g, dtype=dtype)
    final = torch.randn(len(batch), H, generator=g, dtype=dtype)
    return head, batch, layers, final, lm_head


def fast(head, batch, layers, final, lm_head, depth=DEPTH):
    at = final_positions(batch)
    teacher = Teacher(lm_head)
    argmax, lse = teacher.summary(final[at])
    return head.loss(batch, Features(layers, at, final[at], argmax, lse), teacher, depth)


def slow(head, batch, layers, final, lm_head, depth=DEPTH):
    return reference_eagle3.step(head, batch, Features(layers, torch.arange(len(batch)), final), lm_head, depth)


def gradients(head, total):
    for p in head.parameters():
        p.grad = None
    total.backward()
    return {n: p.grad.clone() for n, p in head.named_parameters()}


PATTERNS = {
    "two turns": tiny.rows((24, 9, 33), vocab=V),
    "one document": tiny.rows((40,), vocab=V),
    "supervised from the first token": [Row(list(range(3, 15)), [1] * 12), Row(list(range(20, 29)), [1] * 9)],
    "single supervised pair": [Row([5, 6, 7, 8], [0, 0, 1, 1]), Row([5, 6, 7], [0, 1, 1])],
    "adjacent turns": [Row(list(range(3, 19)), [0, 0] + [1] * 5 + [2] * 9)],
    "some rows unsupervised": [Row([9] * 7, [0] * 7), Row(list(range(4, 20)), [0] * 5 + [1] * 11), Row([3], [0])],
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: "+".join(s) or "plain")
def test_loss_metrics_and_gradients_equal_the_dense_reference(pattern, switches):
    # float64 throughout, except that losses and the teacher's logits are fp32 by contract: hence 1e-5
    case = make(PATTERNS[pattern], **switches)
    ours, theirs = fast(*case), slow(*case)
    for name in ("loss_count", "hits", "pairs", "chain_hits", "chain_pairs"):
        assert torch.equal(getattr(ours, name), theirs[name]), name
    assert ours.count == theirs["pairs"][0]
    torch.testing.assert_close(ours.total.double(), theirs["total"].double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.loss, theirs["loss"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.accept, theirs["accept"], rtol=1e-5, atol=1e-5)
    mine, reference = gradients(case[0], ours.total), gradients(case[0], theirs["total"])
    assert reference.keys() == mine.keys()
    for name, expected in reference.items():
        # fp32 angles and logits move a gradient by some 1e-6 of its largest entry
        worst = (mine[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
        assert worst < 1e-5, f"{name}: off by {worst:.1e} of its largest entry"


def test_chunks_do_not_change_the_result(monkeypatch):
    case = make(tiny.rows((40, 30), vocab=V), dtype=torch.float32)
    whole = fast(*case)
    first = gradients(case[0], whole.total)
    monkeypatch.setattr("headtrain.losses.CHUNK_LOGITS", 1)  # the smallest chunk: 16 rows
    parts = fast(*case)
    second = gradients(case[0], parts.total)
    torch.testing.assert_close(whole.total, parts.total, rtol=1e-6, atol=0)
    for name in first:  # fp32 sums in another order
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)


def test_a_document_never_sees_another_at_any_step():
    rows = tiny.rows((21, 26), vocab=V)
    head, batch, layers, final, lm_head = make(rows)
    start = torch.arange(len(batch))[batch.doc == 1]
    start = start[batch.turn[start] > 0][:-1]
    features = Features(layers, torch.arange(len(batch)), final)
    before = head._unroll(batch, features, start, DEPTH)
    changed = layers.clone()
    changed[batch.doc == 0] += 1.0
    after = head._unroll(batch, Features(changed, features.final_at, final), start, DEPTH)
    for s, (a, b) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(a, b), f"step {s} saw the first document"


def test_an_all_masked_batch_gives_a_finite_zero_and_zero_gradients():
    case = make([Row([3, 4, 5, 6], [0, 0, 0, 0]), Row([7], [1])])
    sums = fast(*case)
    assert sums.total == 0 and sums.count == 0 and sums.pairs.tolist() == [0] * DEPTH
    assert all(not g.any() for g in gradients(case[0], sums.total).values())


def test_greedy_tokens_outside_the_draft_vocabulary_are_misses_not_losses():
    head, batch, layers, final, lm_head = make(tiny.rows((40,), vocab=V), draft_vocab_size=4)
    sums = fast(head, batch, layers, final, lm_head)
    assert (sums.loss_count < sums.pairs).all()
    assert (sums.hits <= sums.loss_count).all()


def test_a_frozen_lm_head_is_the_targets_rows_and_changes_no_other_gradient():
    case = make(PATTERNS["two turns"], draft_vocab_size=40)
    frozen = make(PATTERNS["two turns"], draft_vocab_size=40, train_lm_head=False)
    frozen[0].load_state_dict(case[0].state_dict())
    assert case[0].trainable().keys() - frozen[0].trainable().keys() == {"lm_head.weight"}
    results = [fast(*it) for it in (case, frozen)]
    assert torch.equal(results[0].total, results[1].total)
    results[0].total.backward(), results[1].total.backward()
    for (name, a), (_, b) in zip(case[0].named_parameters(), frozen[0].named_parameters(), strict=True):
        assert b.grad is None if name == "lm_head.weight" else torch.equal(a.grad, b.grad), name
    assert frozen[0].flops(frozen[1], DEPTH) < case[0].flops(case[1], DEPTH)

    weights = TargetWeights(torch.zeros(V, H), case[-1], torch.ones(H))
    for head in (case[0], frozen[0]):
        before = {n: p.clone() for n, p in head.named_parameters()}
        done = head.init_at_random(weights)  # of the trained one: nothing
        assert bool(done) == (head is frozen[0])
        changed = {n for n, p in head.named_parameters() if not torch.equal(p, before[n])}
        assert changed == ({"lm_head.weight"} if done else set())
    assert torch.equal(frozen[0].lm_head.weight, case[-1][frozen[0].draft_ids])


def test_small_targets_get_distinct_layers():
    from headtrain.heads.eagle3 import default_layers

    assert default_layers(30) == [2, 15, 27] and default_layers(32) == [2, 16, 29]
    for n in range(1, 8):
        layers = default_layers(n)
        assert len(set(layers)) == len(layers) and all(1 <= i <= n for i in layers)
        assert len(layers) == min(3, n)


def test_bf16_autocast_stays_near_fp32():
    case = make(tiny.rows((40, 30), vocab=V), dtype=torch.float32, draft_vocab_size=40)
    exact = fast(*case)
    with torch.autocast("cpu", torch.bfloat16):
        rough = fast(*case)
    # bf16 keeps 8 bits: the sum of some 60 losses of about 10 moves by less than 2 %
    torch.testing.assert_close(rough.total, exact.total, rtol=0.02, atol=0)
    grads = gradients(case[0], rough.total)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads.values())
