from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headtrain.capture import head_wants
from headtrain.config import Recipe, RecipeError
from headtrain.heads import eagle3_induction
from headtrain.heads.catalog import build_head, parse_head
from headtrain.heads.eagle3_induction import Moments, canonical, centred, moments, still
from headtrain.teacher import Teacher
from headtrain.types import Batch, Features, Row, TargetShape, TargetWeights

H, V, DEPTH, LONG, THETA = 256, 300, 4, 200, 1e6
ROPE = {"rope_type": "default", "rope_theta": THETA}
SHAPE = TargetShape("LlamaForCausalLM", "llama", H, 64, 8, 4, 2, 64, V, max_positions=1024, rope=ROPE)


def same(x):
    return x


def target(tied=True, seed=0):
    """Embedding, lm_head, and features [n, 3, H] of tokens [n]: a noisy linear picture of each token in the first
    layer, and sizes as real ones have them (the deeper layers are larger and tell nothing here)."""
    g = torch.Generator().manual_seed(seed)
    embed = torch.randn(V, H, generator=g) * 0.1
    lm_head = embed if tied else torch.randn(V, H, generator=g)
    picture = torch.randn(H, H, generator=g) / H**0.5

    def features(ids):
        told = 10 * embed[ids] @ picture + 0.3 * torch.randn(len(ids), H, generator=g)
        return torch.stack([told, *(8 * torch.randn(2, len(ids), H, generator=g))], 1)

    return TargetWeights(embed, lm_head, torch.ones(H)), features


def packed(texts, features):
    batch = Batch.pack([Row(text, [0] * 2 + [1] * (len(text) - 2)) for text in texts])
    nothing = torch.arange(0)
    return batch, Features(features(batch.ids), nothing, torch.zeros(0, H))


def texts(count, length, seed=1):
    """No token twice."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randperm(V, generator=g)[:length].tolist() for _ in range(count)]


def made(weights, draft_ids=None, **config):
    size = None if draft_ids is None else len(draft_ids)
    torch.manual_seed(0)
    head = build_head(
        parse_head({"kind": "eagle3", "depth": DEPTH, "draft_vocab_size": size, **config}), SHAPE, draft_ids
    )
    head.attach(weights)
    return head


THREE = {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True}


@pytest.fixture
def loud(monkeypatch):
    """What is copied outweighs the residual, which is random yet."""
    monkeypatch.setattr(eagle3_induction, "COPY", 3.0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("switches", [{}, THREE, {"fc_norm": True, "norm_output": True}], ids=["plain", "3", "fc_norm"])
def test_it_copies_what_a_text_repeats_before_any_training(loud, switches, tied):
    """A text of random tokens that is said twice: nothing but copying can say its second half."""
    weights, features = target(tied)
    head = made(weights, **switches)
    head.init_for_induction(weights)
    twice = [text * 2 for text in texts(3, LONG)]
    batch, seen = packed(twice, features)
    again = batch.pos >= LONG + 1

    def share():
        hits = head.chain_hits(batch, seen, DEPTH)
        return [float(hits[s, again].float().sum() / again[: len(again) - s].sum()) for s in range(DEPTH)]

    assert max(share()) < 0.1
    sample = [packed(texts(4, 150, seed), features) for seed in range(2, 12)]
    said = head.fit_induction(iter(sample), same, 2 * LONG)
    assert "6,000 tokens" in said[0]
    deep = DEPTH if switches else 1  # without any norm the copy stays in the state that is fed back
    assert min(share()[:deep]) > 0.9, share()


def test_a_draft_vocabulary_is_copied_from_alone(loud):
    weights, features = target(tied=False)
    draft_ids = torch.arange(0, V, 2)
    head = made(weights, draft_ids, **THREE)
    head.init_for_induction(weights)
    head.fit_induction([packed(texts(4, 150, seed), features) for seed in range(2, 12)], same, 2 * LONG)
    batch, seen = packed([text * 2 for text in texts(3, LONG)], features)
    hits = head.chain_hits(batch, seen, 1)[0]
    may = (batch.pos >= LONG + 1) & (torch.roll(batch.ids, -2) % 2 == 0)
    assert float(hits[may].float().mean()) > 0.8
    assert not hits[torch.roll(batch.ids, -2) % 2 == 1].any()
    # 150 rows in 256 dimensions: what the lm_head does not read is not written, and leaves room to what it reads
    unread = torch.linalg.svd(head.lm_head.weight)[2][150:]
    written = head.midlayer.self_attn.o_proj.weight
    assert (unread @ written).norm() < 1e-3 * written.norm()


def test_canonical_correlations_are_those_of_the_definition():
    g = torch.Generator().manual_seed(0)
    e = torch.randn(4000, 5, generator=g, dtype=torch.float64)
    x = torch.cat(
        [e[:, :2] @ torch.randn(2, 4, generator=g, dtype=torch.float64), torch.randn(4000, 3, generator=g)], 1
    )
    x = x + 0.5 * torch.randn(4000, 7, generator=g, dtype=torch.float64)
    found = Moments(4000, e.T @ e, e.T @ x, x.T @ x, 0.0)
    a, b, r = canonical(found, 4)
    assert a.shape == (5, 4) and b.shape == (7, 4) and r[1] > 0.7 and r[3] < 0.1
    # 1 % of ridge on the diagonal keeps the variances just below 1
    for side in (e @ a, x @ b):
        torch.testing.assert_close(side.T @ side / 4000, torch.eye(4, dtype=torch.float64), rtol=0, atol=0.02)
    torch.testing.assert_close((e @ a).T @ (x @ b) / 4000, torch.diag(r), rtol=0, atol=1e-9)
    # slow and obvious: no other direction of x correlates better with any of e
    ee, xx, ex = e.T @ e / 4000, x.T @ x / 4000, e.T @ x / 4000
    best = torch.linalg.eigvals(torch.linalg.solve(ee, ex) @ torch.linalg.solve(xx, ex.T)).real.sort().values
    torch.testing.assert_close(r.square().flip(0), best[-4:], rtol=0.05, atol=1e-3)


def test_moments_add_up_over_ranks_and_see_differences_within_documents_alone():
    weights, features = target()
    head = made(weights, **THREE)
    sample = [packed(texts(3, 40, seed), features) for seed in (2, 3)]
    whole = moments(head, sample, same)
    parts = [moments(head, [part], same) for part in sample]
    for name in ("count", "embeddings", "cross", "features", "log_size"):  # two ranks with equal rows
        twice = torch.as_tensor(getattr(moments(head, sample, lambda x: 2 * x), name))
        torch.testing.assert_close(twice, 2 * torch.as_tensor(getattr(whole, name)))
    for name in ("count", "embeddings", "cross", "features", "log_size"):
        total = getattr(parts[0], name) + getattr(parts[1], name)
        torch.testing.assert_close(torch.as_tensor(total), torch.as_tensor(getattr(whole, name)))
    assert whole.count == 240
    batch = sample[0][0]
    x = torch.randn(len(batch), 6)
    shifted = x + torch.randn(3, 6)[batch.doc]
    torch.testing.assert_close(centred(shifted, batch), centred(x, batch), rtol=0, atol=1e-5)
    for d in range(3):
        assert centred(x, batch)[batch.doc == d].mean(0).abs().max() < 1e-6


def test_only_what_rope_hardly_turns_is_used():
    weights, _ = target()
    head = made(weights)
    angles = THETA ** (-torch.arange(32) / 32)
    for window in (64, 1000):
        expected = [i for i in range(32) if angles[i] * window <= 1]
        assert still(head, window).tolist() == expected + [i + 32 for i in expected]


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_nothing_that_is_trained_starts_without_a_way_to_learn(kv_heads):
    """A query and a key (or a value and its way out) that are both zero would be for ever. 8 groups have more values
    than the hidden size, here 512 for 256."""
    weights, features = target()
    shape = SHAPE.replace(num_kv_heads=kv_heads, num_heads=8)
    torch.manual_seed(0)
    head = build_head(parse_head({"kind": "eagle3", "depth": 1, "draft_vocab_size": None, **THREE}), shape, None)
    head.attach(weights)
    head.init_for_induction(weights)
    head.fit_induction([packed(texts(4, 150, seed), features) for seed in range(2, 12)], same, 2 * LONG)
    batch, seen = packed([text * 2 for text in texts(2, 20)], features)
    teacher, final = Teacher(weights.lm_head), features(batch.ids)[:, 0]
    argmax, lse = teacher.summary(final)
    seen = replace(seen, final=final, final_at=torch.arange(len(batch)), argmax=argmax, lse=lse)
    attention, dim = head.midlayer.self_attn, shape.head_dim
    used = attention.q_proj.weight.unflatten(0, (-1, dim))[:, still(head, 2 * LONG)[: H // 4 // kv_heads]]
    assert not used[:, :, H:].any() and used[:, :, :H].any(-1).all()  # there the embedding alone is read
    matrices = {name: getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    moved = {name: torch.zeros(p.shape, dtype=torch.bool) for name, p in matrices.items()}
    for _ in range(3):  # o_proj, then keys, then queries, where all of a group begins at zero
        head.zero_grad()
        head.loss(batch, seen, teacher, 1).total.backward()
        for name, p in matrices.items():
            moved[name] |= p.grad != 0
            with torch.no_grad():
                p -= 1e-2 * p.grad / p.grad.norm()
    assert all(moved[name].any(1).all() for name in ("q_proj", "k_proj", "v_proj")) and moved["o_proj"].any(0).all()
    each = attention.q_proj.weight.unflatten(0, (kv_heads, -1, dim))
    assert all(not torch.equal(each[:, 0], each[:, other]) for other in range(1, each.shape[1]))  # heads of a group


def test_features_that_are_not_finite_are_refused_and_few_are_said():
    weights, features = target()
    head = made(weights, **THREE)
    head.init_for_induction(weights)
    assert (
        "few tokens for such a start (15,360 would do)"
        in head.fit_induction([packed(texts(4, 150, seed), features) for seed in range(2, 12)], same, 2 * LONG)[1]
    )
    batch, seen = packed(texts(4, 150), features)
    seen.layers[7, 1, 3] = float("inf")
    with pytest.raises(ValueError, match="non-finite features in the first rows.*target.dtype"):
        head.fit_induction([(batch, seen)], same, 2 * LONG)


def test_a_window_in_which_rope_turns_everything_is_refused():
    weights, features = target()
    head = made(weights, **THREE)
    with pytest.raises(ValueError, match="window of 1,000,000,000 tokens"):
        head.fit_induction([packed(texts(2, 50), features)], same, 1_000_000_000)


def test_heads_without_it_say_so():
    recipe = Recipe(
        name="x",
        target={"path": "x"},
        data={"train": ["x"]},
        head={"kind": "medusa"},
        train={"init": "induction"},
    )
    with pytest.raises(RecipeError, match=r"kind 'medusa' has no such start \(kinds that have: eagle3\)"):
        head_wants(recipe, SHAPE)
    joint = {"head": {"kind": "eagle3"}, "features": {"mode": "online"}, "train": {"init": "induction", "joint": {}}}
    joint = Recipe.model_validate(recipe.model_dump() | joint)
    with pytest.raises(RecipeError, match="train.joint computes the features.*train.warm_start"):
        head_wants(joint, SHAPE)
    for started in (recipe, joint):  # nothing is fitted to a head that was trained
        started.train.warm_start = "runs/trained"
        head_wants(started, SHAPE)
