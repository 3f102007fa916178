from __future__ import annotations

import pytest
import tiny
import torch
from torch.nn.functional import cross_entropy, linear, silu

from headtrain.heads.catalog import build_head, parse_head
from headtrain.shift import final_positions
from headtrain.teacher import Teacher
from headtrain.types import Batch, Features, Row, TargetShape, TargetWeights

H, V, K = 16, 48, 3
SHAPE = TargetShape("LlamaForCausalLM", "llama", H, 32, 4, 2, 1, 8, V)


def make(rows, seed=0, **config):
    g = torch.Generator().manual_seed(seed)
    cfg = parse_head({"kind": "medusa", "num_heads": K, **config})
    ids = None
    if cfg.draft_vocab_size:
        ids = torch.randperm(V, generator=g)[: cfg.draft_vocab_size].sort().values
    head = build_head(cfg, SHAPE, ids).double()
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.3)
    batch = Batch.pack(rows)
    lm_head = torch.randn(V, H, generator=g, dtype=torch.float64)
    head.attach(TargetWeights(lm_head, lm_head, torch.ones(H)))
    final = torch.randn(len(batch), H, generator=g, dtype=torch.float64)
    return head, batch, final, lm_head


def fast(head, batch, final, lm_head, depth=K):
    at = final_positions(batch)
    teacher = Teacher(lm_head)
    argmax, lse = teacher.summary(final[at])
    return head.loss(batch, Features(final.new_zeros(len(batch), 0, H), at, final[at], argmax, lse), teacher, depth)


def slow(head, batch, final, lm_head):
    """One position and one head at a time, from the definition."""
    p, cfg = dict(head.named_parameters()), head.config
    ids = torch.arange(V) if head.draft_ids is None else head.draft_ids
    total, hits, pairs, trained = torch.zeros((), dtype=torch.float64), [0] * K, [0] * K, [0] * K
    logits_of = linear(final, lm_head)
    for i in range(len(batch)):
        for k in range(1, K + 1):
            label = i + 1 + k
            if label >= len(batch) or batch.doc[label] != batch.doc[i]:
                continue
            if batch.turn[i + 1] == 0 or batch.turn[label] != batch.turn[i + 1]:
                continue
            x = final[i]
            for j in range(cfg.num_layers):
                x = x + silu(linear(x, p[f"blocks.{k - 1}.layers.{j}.weight"], p[f"blocks.{k - 1}.layers.{j}.bias"]))
            z = linear(x, p[f"lm_heads.{k - 1}.weight"] if cfg.own_lm_head else lm_head)
            greedy = logits_of[i + k].argmax()  # the feature that produced token i+1+k
            pairs[k - 1] += 1
            hits[k - 1] += int(ids[z.argmax()] == greedy)
            place = (ids == (batch.ids[label] if cfg.labels == "hard" else greedy)).nonzero()
            if len(place) == 0:
                continue
            trained[k - 1] += 1
            if cfg.labels == "hard":
                loss = cross_entropy(z, place[0, 0])
            else:
                loss = -(torch.softmax(logits_of[i + k][ids], -1) * torch.log_softmax(z, -1)).sum()
            total = total + cfg.depth_decay**k * loss
    return total, hits, pairs, trained


@pytest.mark.parametrize(
    "config",
    [{}, {"own_lm_head": False}, {"labels": "soft"}, {"num_layers": 2, "draft_vocab_size": 20}],
    ids=["own", "shared", "soft", "two layers, reduced vocabulary"],
)
def test_loss_and_gradients_equal_the_definition(config):
    case = make(tiny.rows((24, 9, 15), vocab=V), **config)
    ours = fast(*case)
    total, hits, pairs, trained = slow(*case)
    assert ours.hits.tolist() == hits and ours.pairs.tolist() == pairs and ours.loss_count.tolist() == trained
    torch.testing.assert_close(ours.total.double(), total, rtol=1e-6, atol=0)
    for name, p in case[0].named_parameters():
        mine = torch.autograd.grad(ours.total, p, retain_graph=True)[0]
        reference = torch.autograd.grad(total, p, retain_graph=True)[0]
        # the logits are fp32 by contract
        assert (mine - reference).abs().max() < 1e-5 * reference.abs().max(), name


def test_golden_shift_on_ids_0_to_9():
    """Ids 0..9, the answer is tokens 4..9. Head k at position i predicts token i+1+k, so the rows that count are
    i = 3..: head 1 (3->5) .. (7->9), head 2 (3->6) .. (6->9), head 3 (3->7) .. (5->9)."""
    head, _, _, lm_head = make([Row([1], [0])])
    batch = Batch.pack([Row(list(range(10)), [0] * 4 + [1] * 6)])
    final = torch.eye(10, H, dtype=torch.float64) * 50  # position i is the i-th unit vector
    with torch.no_grad():
        for block in head.blocks:  # identity
            block.layers[0].weight.zero_()
            block.layers[0].bias.zero_()
        for k, lm in enumerate(head.lm_heads, start=1):  # head k maps position i to token i+1+k
            lm.weight.zero_()
            for i in range(10):
                if i + 1 + k < V:
                    lm.weight[i + 1 + k, i] = 1.0
    sums = fast(head, batch, final, lm_head)
    assert sums.pairs.tolist() == [5, 4, 3]
    assert sums.total < 1e-9, "every counted pair is predicted exactly by the golden index"


def test_blocks_start_as_an_exact_identity_on_the_targets_lm_head():
    head = build_head(parse_head({"kind": "medusa", "num_heads": 2, "num_layers": 2}), SHAPE, None)
    lm_head, final = torch.randn(V, H), torch.randn(3, H)
    head.init_from_target(TargetWeights(lm_head, lm_head, torch.ones(H)))
    session = head.session(8)
    first = session.extend(torch.tensor([1]), torch.zeros(1, 0, H), final[:1])
    assert torch.equal(first, linear(final[:1], lm_head)[0])


def test_layers_of_a_head_are_independent():
    head = build_head(parse_head({"kind": "medusa", "num_layers": 2}), SHAPE, None)
    a, b = head.blocks[0].layers
    assert a.weight is not b.weight and a.bias is not b.bias


def test_more_tokens_than_heads_is_an_error():
    head = build_head(parse_head({"kind": "medusa", "num_heads": 1}), SHAPE, None)
    session = head.session(8)
    session.extend(torch.tensor([1]), torch.zeros(1, 0, H), torch.zeros(1, H))
    with pytest.raises(ValueError, match="2 tokens drafted, but there are 1 heads"):
        session.expand(torch.tensor([-1]), torch.tensor([3]))


def test_a_shared_lm_head_may_have_another_type_than_the_blocks():
    """The target's bfloat16, on heads in float32."""
    head, batch, final, lm_head = make([Row([1, 2, 3, 4, 5], [0, 1, 1, 1, 1])], own_lm_head=False)
    head.float().attach(TargetWeights(lm_head.bfloat16(), lm_head.bfloat16(), torch.ones(H)))
    session = head.session(8)
    first = session.extend(batch.ids[1:3], final.new_zeros(2, 0, H), final[:2].bfloat16())
    second = session.expand(torch.tensor([-1]), first.argmax(-1, keepdim=True))[0]
    with torch.no_grad():
        for k, logits in enumerate((first, second)):
            x = head.blocks[k](final[1:2].bfloat16().float())
            torch.testing.assert_close(logits, linear(x.bfloat16(), lm_head.bfloat16())[0].float(), rtol=0, atol=0)
