from __future__ import annotations

import math

import pytest
import tiny
import torch

from headtrain import losses
from headtrain.config import RecipeError
from headtrain.divergences import MEANING, SMALLEST, SoftRows, soft_loss_
from headtrain.heads.catalog import HEADS, build_head, parse_head
from headtrain.losses import HardTargets, SoftTargets, vocab_loss
from headtrain.shift import final_positions
from headtrain.teacher import Teacher
from headtrain.types import Batch, Features, TargetShape, TargetWeights
from headtrain.vocab import inverse

S, N, H, V, VD = 3, 50, 8, 40, 24
LOSSES = list(MEANING)


def reference(loss, z, target, ids):
    """The definitions, [S, N] float64: draft logits z [S, N, Vd], the target's logits [N, V] over its whole
    vocabulary, ids [Vd] the draft vocabulary. Acceptance and total variation are taken over the whole vocabulary."""
    p, q = target[:, ids].softmax(-1), z.softmax(-1)
    log_p, log_q = target[:, ids].log_softmax(-1), z.log_softmax(-1)
    whole_p = target.softmax(-1)
    whole_q = torch.zeros(*z.shape[:2], target.shape[1], dtype=z.dtype).index_copy(-1, ids, q)
    accept = torch.minimum(whole_p, whole_q).sum(-1)
    variation = 0.5 * (whole_p - whole_q).abs().sum(-1)
    if loss == "kl":
        return -(p * log_q).sum(-1), accept
    if loss == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1), accept
    if loss == "tv":
        return variation, accept
    if loss == "nla":
        return -accept.log(), accept
    weight = torch.exp(-3 * accept.detach())
    return weight * (p * (log_p - log_q)).sum(-1) + (1 - weight) * variation, accept


def case(heads, vocabulary, seed=0):
    """hidden, lm_heads, teacher features, its lm_head, ids, mask and depth weights, float64."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    ids = torch.arange(V) if vocabulary == "whole" else torch.randperm(V, generator=g)[:VD].sort().values
    hidden, weights = randn(S, N, H), [randn(ids.numel(), H) for _ in range(heads)]
    pairs = torch.rand(S, N, generator=g) < 0.7
    return hidden, weights, randn(N, H), randn(V, H), ids, pairs, torch.tensor([1.0, 0.5, 0.25])


def targets_of(final, lm_head, ids):
    teacher = Teacher(lm_head.float())
    greedy, lse = teacher.summary(final.float())
    return SoftTargets(final.float(), teacher.restricted(ids), inverse(ids, V)[greedy], lse)


@pytest.mark.parametrize("vocabulary", ["draft", "whole"])
@pytest.mark.parametrize("heads", [1, S], ids=["shared lm_head", "one a depth"])
@pytest.mark.parametrize("loss", LOSSES)
def test_values_and_gradients_equal_autograd_over_several_chunks(loss, heads, vocabulary, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_LOGITS", 1)  # the smallest chunk, 16 rows: three whole ones and a rest of two
    hidden, weights, final, lm_head, ids, pairs, depth_weight = case(heads, vocabulary)
    targets = targets_of(final, lm_head, ids)
    trains = targets.greedy >= 0
    assert trains.all() == (vocabulary == "whole") and trains.any()

    mine = [t.float().requires_grad_() for t in (hidden, *weights)]
    sums = vocab_loss(mine[0], mine[1:], targets, pairs, depth_weight, loss=loss)
    (3 * sums.total).backward()

    theirs = [t.clone().requires_grad_() for t in (hidden, *weights)]
    z = torch.stack([theirs[0][s] @ theirs[1:][s if heads > 1 else 0].t() for s in range(S)])
    value, accept = reference(loss, z, final @ lm_head.t(), ids)
    value = value * (pairs & trains)
    (3 * (value * depth_weight[:, None]).sum()).backward()

    # float32 by contract: logits of some units, sums of some 30 rows
    torch.testing.assert_close(sums.loss.double(), value.sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.total.double(), (value.sum(-1) * depth_weight).sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.accept.double(), (accept * pairs).sum(-1), rtol=1e-5, atol=1e-5)
    for ours, expected in zip(mine, theirs, strict=True):
        worst = (ours.grad.double() - expected.grad).abs().max() / expected.grad.abs().max()
        assert worst < 1e-5, f"off by {worst:.1e} of its largest entry"
    left_out = ~(pairs & trains)
    assert left_out.any() and not mine[0].grad[left_out].any()  # excluded from the loss ...
    assert torch.equal(sums.pairs, pairs.sum(-1).float())  # ... not from the metrics
    assert torch.equal(sums.loss_count, (pairs & trains).sum(-1).float())


def rows_of(loss, target):
    """As the loss makes them, float32, for the target's logits over a vocabulary that is the draft's too."""
    teacher = Teacher(torch.eye(target.shape[1]))
    return SoftRows.of(teacher, target, teacher.summary(target)[1], loss, want_accept=True)


def formula(loss, z, rows):
    """value, acceptance and gradient of the sum, of ``soft_loss_`` in z's own dtype."""
    z = z.clone()
    top, best = z.max(-1)
    value, accept = soft_loss_(loss, z, top, best, rows, gradient=True)
    return value, accept, z


@pytest.mark.parametrize("loss", LOSSES)
def test_formulas_in_float64(loss):
    g = torch.Generator().manual_seed(1)
    target = 3 * torch.randn(N, V, generator=g, dtype=torch.float64)
    z = (3 * torch.randn(S, N, VD, generator=g, dtype=torch.float64)).requires_grad_()
    ids = torch.randperm(V, generator=g)[:VD].sort().values
    expected, accept = reference(loss, z, target, ids)
    (gradient,) = torch.autograd.grad(expected.sum(), z)
    rows = SoftRows(target[:, ids].softmax(-1), target[:, ids].log_softmax(-1), target.softmax(-1)[:, ids])
    value, kept, ours = formula(loss, z.detach(), rows)
    for a, b in ((value, expected), (kept, accept), (ours, gradient)):
        torch.testing.assert_close(a, b.detach(), rtol=1e-11, atol=1e-13)  # rounding of float64


@pytest.mark.parametrize("loss", LOSSES)
def test_extreme_logits_stay_finite_and_right(loss):
    """+-60 on both sides: q and p underflow to zero in float32 where they disagree, and where they agree."""
    g = torch.Generator().manual_seed(2)
    sign = torch.where(torch.rand(2, 16, 12, generator=g) < 0.5, -60.0, 60.0)
    sign[:, 0, :], sign[:, 0, 0] = -60.0, 60.0  # one token takes all, on both sides the same ...
    sign[0, 1, :], sign[0, 1, 0] = -60.0, 60.0
    sign[1, 1, :], sign[1, 1, 1] = -60.0, 60.0  # ... and on both sides another
    sign += torch.rand(2, 16, 12, generator=g)  # no ties: autograd takes another subgradient there
    z, target, ids = sign[:1], sign[1], torch.arange(12)
    value, accept, gradient = formula(loss, z, rows_of(loss, target))
    assert value.isfinite().all() and gradient.isfinite().all() and gradient.abs().max() <= 121
    exact = z.double().requires_grad_()
    expected, _ = reference(loss, exact, target.double(), ids)
    (right,) = torch.autograd.grad(expected.sum(), exact)
    if loss == "nla":  # an acceptance of e^-120 is below float32: the value stops at its smallest, without a gradient
        keep = expected[0] < -math.log(SMALLEST)
        assert not keep[1] and keep.sum() > 8
        assert not gradient[:, ~keep].any()
        torch.testing.assert_close(value[0, ~keep], torch.full(((~keep).sum(),), -math.log(SMALLEST)))
        value, gradient, expected, right = value[:, keep], gradient[:, keep], expected[:, keep], right[:, keep]
    # 60 has an ulp of 4e-6 in float32
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(gradient.double(), right, rtol=1e-4, atol=2e-5)


def test_negative_log_acceptance_learns_from_a_tiny_overlap():
    z, target = torch.tensor([[[50.0, 0.0, 0.0]]]), torch.tensor([[0.0, 50.0, 0.5]])  # acceptance about 6e-22
    value, accept, gradient = formula("nla", z, rows_of("nla", target))
    assert 0 < accept < 1e-21
    exact = z.double().requires_grad_()
    expected, _ = reference("nla", exact, target.double(), torch.arange(3))
    (right,) = torch.autograd.grad(expected.sum(), exact)
    assert right.abs().max() > 0.3
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.double(), right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_draft_equal_to_the_target_is_a_fixed_point(loss):
    """q = p everywhere: every entry is a tie, and no loss pulls away from it."""
    z = torch.randn(1, 16, 12, generator=torch.Generator().manual_seed(3))
    p = z[0].softmax(-1)
    value, accept, gradient = formula(loss, z, SoftRows(p, z[0].log_softmax(-1), p))
    torch.testing.assert_close(accept, torch.ones(1, 16))
    assert gradient.abs().max() < 1e-6
    if loss != "kl":
        assert value.abs().max() < 1e-6


def test_ties_count_as_not_below_the_target():
    """min(p, q) has no derivative at p = q; the one from above, 0, is taken."""
    q = torch.tensor([0.5, 0.25, 0.25])
    rows = SoftRows(p := torch.tensor([[0.5, 0.4, 0.1]]), p.log(), p)
    _, _, gradient = formula("tv", q.log()[None, None], rows)
    torch.testing.assert_close(gradient[0, 0], q * (0.25 - torch.tensor([0.0, 1.0, 0.0])))


@pytest.mark.parametrize("loss", LOSSES)
def test_metrics_do_not_depend_on_the_loss(loss):
    hidden, weights, final, lm_head, ids, pairs, depth_weight = case(1, "draft")
    hidden, weights, targets = hidden.float(), [w.float() for w in weights], targets_of(final, lm_head, ids)
    plain = vocab_loss(hidden, weights, targets, pairs, depth_weight)
    sums = vocab_loss(hidden, weights, targets, pairs, depth_weight, loss=loss)
    for name in ("hits", "accept", "pairs", "chain_hits", "chain_pairs", "loss_count", "count"):
        assert torch.equal(getattr(sums, name), getattr(plain, name)), name
    silent = vocab_loss(hidden, weights, targets, pairs, depth_weight, want_accept=False, loss=loss)
    assert silent.accept.isnan().all() and torch.equal(silent.loss, sums.loss)


def test_losses_that_cannot_be_are_refused():
    hidden, weights, final, lm_head, ids, pairs, depth_weight = case(1, "draft")
    soft, labels = targets_of(final, lm_head, ids), torch.zeros(N, dtype=torch.int64)
    with pytest.raises(ValueError, match="no loss named 'js'; known: kl, reverse_kl"):
        vocab_loss(hidden, weights, soft, pairs, depth_weight, loss="js")
    with pytest.raises(ValueError, match="'tv' needs the target's distribution, the labels are hard"):
        vocab_loss(hidden, weights, HardTargets(labels, soft.greedy), pairs, depth_weight, loss="tv")


# -- the switch in the heads ---------------------------------------------------------------------------------------

SWITCHED = [kind for kind, head in HEADS.items() if "loss" in head.Config.model_fields]
# of a family that every head fits: its checkpoints hold a draft module of their own
SHAPE = TargetShape("MiMoForCausalLM", "qwen2", 32, 48, 8, 4, 2, 8, 64, max_positions=256, module={"count": 1})


def section(kind, **more):
    soft = {"labels": "soft"} if "labels" in HEADS[kind].Config.model_fields else {}
    small = {"draft_vocab_size": None} if "draft_vocab_size" in HEADS[kind].Config.model_fields else {}
    return {"kind": kind, **soft, **small, **more}


def test_the_heads_that_learn_from_the_target_have_the_switch():
    assert set(SWITCHED) == set(HEADS)


@pytest.mark.parametrize("kind", SWITCHED)
def test_the_switch_is_one_for_all_heads(kind):
    field = HEADS[kind].Config.model_fields["loss"]
    assert parse_head({"kind": kind}).loss == "kl"
    assert all(f"{name}: {text}" in field.description for name, text in MEANING.items())
    assert [parse_head(section(kind, loss=name)).loss for name in LOSSES] == LOSSES
    with pytest.raises(RecipeError, match="'kl', 'reverse_kl', 'tv', 'lk' or 'nla'.*found 'js'"):
        parse_head(section(kind, loss="js"))


def test_hard_labels_have_cross_entropy_only():
    assert parse_head({"kind": "medusa", "labels": "hard", "loss": "kl"}).loss == "kl"
    with pytest.raises(RecipeError, match=r"loss=tv needs .* labels=hard .* set head.labels=soft, or head.loss=kl"):
        parse_head({"kind": "medusa", "loss": "tv"})


def rig(kind, loss):
    """A tiny head with random parameters, and a function that takes its loss on fixed random features."""
    torch.manual_seed(4)
    config = parse_head(section(kind, loss=loss))
    head = build_head(config, SHAPE, None)
    size, vocab = SHAPE.hidden_size, SHAPE.vocab_size
    embed, lm_head = torch.randn(vocab, size), torch.randn(vocab, size) * 0.3
    head.attach(TargetWeights(embed, lm_head, torch.ones(size)))
    batch = Batch.pack(tiny.rows((24, 33), vocab=vocab))
    wants, at = head.wants(), final_positions(batch)
    final = torch.randn(len(batch), size)
    argmax, lse = Teacher(lm_head).summary(final[at])
    if wants.final == "all":
        at = torch.arange(len(batch))
        argmax, lse = Teacher(lm_head).summary(final)
    features = Features(torch.randn(len(batch), len(wants.layers), size), at, final[at], argmax, lse)
    return head, lambda: head.loss(batch, features, Teacher(lm_head), wants.depth)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", SWITCHED)
def test_training_lowers_the_heads_own_loss(kind, loss):
    head, step = rig(kind, loss)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    history = []
    for _ in range(15):
        optimizer.zero_grad()
        sums = step()
        (sums.total / sums.count).backward()
        optimizer.step()
        history.append(sums)
    first, last = history[0], history[-1]
    assert last.total < 0.99 * first.total
    if loss in ("tv", "lk", "nla"):
        assert last.accept.sum() > 1.05 * first.accept.sum()
    if loss == "tv":  # over the whole vocabulary every pair trains: the loss is what is not accepted
        torch.testing.assert_close(first.loss, first.pairs - first.accept, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", SWITCHED)
def test_every_head_passes_its_switch_on(kind):
    totals = [rig(kind, loss)[1]().total.item() for loss in LOSSES]
    assert len({round(t, 3) for t in totals}) == len(LOSSES), totals


@pytest.mark.parametrize("depths", [1, 3])
def test_what_a_chunk_holds_is_what_the_estimate_counts(depths, monkeypatch):
    """The allocator's peak of a training step, its inputs' gradients apart, over all losses: the bound is not passed,
    and at most a quarter above the hungriest (it counts whole buffers; a boolean one takes a quarter)."""
    from torch.profiler import ProfilerActivity, profile

    monkeypatch.setattr(losses, "CHUNK_LOGITS", 1 << 18)
    vocab, size, rows, peaks = 4096, 8, 128, {}
    for name in MEANING:
        hidden, weight = (
            torch.randn(depths, rows, size, requires_grad=True),
            torch.randn(vocab, size, requires_grad=True),
        )
        teacher, final = Teacher(torch.randn(vocab, size)), torch.randn(rows, size)
        targets = losses.SoftTargets(final, teacher, *teacher.summary(final))
        pairs = torch.ones(depths, rows, dtype=torch.bool)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            losses.vocab_loss(hidden, [weight], targets, pairs, torch.ones(depths), loss=name).total.backward()
        live = peak = 0
        found = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(found, key=lambda e: e.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        peaks[name] = peak - 4 * (hidden.numel() + weight.numel())
    bound = 4 * losses.chunk_values(depths, vocab)
    assert bound * 0.75 < max(peaks.values()) <= bound * 1.05, (bound, peaks)
