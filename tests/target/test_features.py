"""Features of packed documents against Hugging Face's hidden_states of each document alone."""

from __future__ import annotations

import logging

import pytest
import target_families as families
import tiny
import torch

from headtrain import shift
from headtrain.decode.tree import ancestors
from headtrain.target import features as module
from headtrain.target.model import Target
from headtrain.target.shape import TargetError
from headtrain.types import Batch, Row, Wants

# fp32: the same sums in another order (flash attention by document, larger matrix products); states are of order 1-10.
TOLERANCE = dict(rtol=1e-4, atol=2e-5)
LAYERS = (3, 0, 2, 4)  # neither sorted nor all; the last one is the un-normed output of the last decoder layer


def _rows(lengths=(24, 9, 33), vocab=99, seed=0):
    return tiny.rows(lengths, seed=seed, vocab=vocab)


@pytest.mark.parametrize("name", families.BUILD)
def test_features_equal_hidden_states_of_each_document_alone(name):
    model = families.build(name)
    reference = families.twin(model)
    target = Target.of(model)
    assert target.packed == (name in families.PACKED)
    rows = _rows()
    batch = Batch.pack(rows)
    got = target.features(batch, Wants(LAYERS, final="all"))
    assert got.layers.shape == (len(batch), len(LAYERS), 32)
    norm = target.parts.norm
    for row, a, b in zip(rows, batch.cu[:-1].tolist(), batch.cu[1:].tolist(), strict=True):
        hidden, logits = families.alone(reference, row.ids)
        for column, index in enumerate(LAYERS):
            mine = got.layers[a:b, column]
            if index == 4:  # Hugging Face's last hidden state is normed already
                assert not torch.allclose(mine, hidden[4], **TOLERANCE)
                mine = norm(mine)
            torch.testing.assert_close(mine, hidden[index], **TOLERANCE)
        torch.testing.assert_close(got.final[a:b], hidden[4], **TOLERANCE)
        assert torch.equal(got.argmax[a:b], logits.argmax(-1))
        torch.testing.assert_close(got.lse[a:b], logits.logsumexp(-1), **TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "mistral"])
def test_another_document_never_matters(name):  # CASES 13
    target = Target.of(families.build(name))
    first, second = _rows((24, 33))
    other = Row([(i + 7) % 99 for i in first.ids], first.turn)
    wants = Wants((0, 2, 4), final="all")
    a, b = (target.features(Batch.pack([x, second]), wants) for x in (first, other))
    n = len(first)
    assert not torch.allclose(a.layers[:n], b.layers[:n])
    assert torch.equal(a.layers[n:], b.layers[n:])
    assert torch.equal(a.final[n:], b.final[n:])


def test_supervised_positions_only_and_no_lm_head_without_need():
    target = Target.of(families.build("llama"))
    batch = Batch.pack(_rows())
    everything = target.features(batch, Wants((1,), final="all"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target.parts.lm_head, "forward", lambda *a: pytest.fail("lm_head ran"))
        some = target.features(batch, Wants((1,), summary=False))
    assert torch.equal(some.final_at, shift.final_positions(batch))
    assert 0 < len(some.final_at) < len(batch)
    assert torch.equal(some.final, everything.final[some.final_at])
    assert some.argmax is None and some.lse is None
    nothing = Batch.pack([Row([5, 6, 7], [0, 0, 0])])
    empty = target.features(nothing, Wants((1,)))
    assert empty.final.shape == (0, 32) and empty.argmax.shape == (0,) and empty.layers.shape == (3, 1, 32)


def test_hooks_are_removed_and_only_wanted_layers_have_them():
    target = Target.of(families.build("llama"))
    layers = target.parts.layers
    with module.Tap(target.parts, (0, 2), 3):
        assert [bool(x._forward_pre_hooks) for x in layers] == [True, False, True, False]
    assert not any(x._forward_pre_hooks for x in layers)


def test_a_layer_that_does_not_exist_is_named():
    target = Target.of(families.build("llama"))
    with pytest.raises(TargetError, match=r"layers \[5\].*indices 0\.\.4"):
        target.features(Batch.pack(_rows()), Wants((5,)))


def test_features_can_enter_a_graph():
    target = Target.of(families.build("llama"))
    got = target.features(Batch.pack(_rows()), Wants((1,)))
    weight = torch.ones(32, requires_grad=True)
    (got.final * weight).sum().backward()  # an inference tensor could not be saved for backward
    assert weight.grad is not None and not any(p.requires_grad for p in target.model.parameters())


def test_fallback_is_said_and_packed_insists(caplog):
    with caplog.at_level(logging.INFO):
        assert not Target.of(families.build("gpt_oss")).packed
    assert "one document at a time" in caplog.text
    for name in ("gpt_oss", "qwen3_next"):
        with pytest.raises(TargetError, match="not exact for this target"):
            Target.of(families.build(name), attention="packed")
    assert not Target.of(families.build("llama"), attention="sdpa").packed


def test_a_window_that_the_attention_is_not_told_of_is_found():
    """Windows longer than the probe agree in numbers: the windows themselves are compared."""
    model = families.build("mistral")
    model.config.sliding_window = 100
    assert Target.of(model).packed  # read at run time: told
    model = families.build("gemma3")
    model.config.sliding_window = 100
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None  # only the mask has it, which packing does not read
    target = Target.of(model)
    assert not target.packed and target.parts.config._attn_implementation == "sdpa"


def test_an_attention_that_depends_on_the_whole_run_is_not_packed():
    model = families.build("llama")
    attention = model.model.layers[1].self_attn
    own = attention.forward

    def longer(hidden_states, **more):
        out, weights = own(hidden_states=hidden_states, **more)
        return out * hidden_states.shape[1], weights

    attention.forward = longer
    with pytest.raises(TargetError, match="packed features differ by"):
        Target.of(model, attention="packed")


def test_a_family_without_sdpa_keeps_its_own_attention():
    model = families.build("llama")
    model.set_attn_implementation("eager")
    target = Target.of(model)
    assert not target.packed and target.parts.config._attn_implementation == "eager"


def test_long_rope_documents_beyond_the_switch_run_alone():
    target = Target.of(families.build("phi3_longrope"))
    assert target.longest_packed == 20
    assert target.packs(Batch.pack(_rows((20, 5))))
    assert not target.packs(Batch.pack(_rows((21, 5))))


def test_blocks_of_a_long_document_with_a_window(monkeypatch):
    from headtrain.target import attention

    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 23, 8), torch.randn(1, 2, 23, 8), torch.randn(1, 2, 23, 8)
    whole = attention._document(q, k, v, 0.3, 5)
    monkeypatch.setattr(attention, "BLOCK", 4)
    torch.testing.assert_close(attention._document(q, k, v, 0.3, 5), whole)
    at = torch.arange(23)
    seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - 5)
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.3
    expected = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(whole, expected)


@pytest.mark.parametrize("name", ["llama_tied", "gemma3", "gemma2", "gpt_oss", "granite", "llava", "mistral"])
def test_steps_with_a_cache_equal_one_forward(name):
    """Prefill, a block, a crop back over a sliding window's edge, one token a time: all as one plain forward."""
    model = families.build(name)
    reference = families.twin(model)
    target = Target.of(model)
    ids = torch.tensor([_rows((20,))[0].ids])
    hidden, logits = families.alone(reference, ids[0].tolist())
    cache = target.new_cache()
    got = [target.step(ids[:, :8], cache, (0, 3))]
    target.step((ids[:, 8:14] + 1) % 99, cache)  # guesses that are all rejected
    target.crop(cache, 8)
    assert cache.get_seq_length() == 8
    got.append(target.step(ids[:, 8:12], cache, (0, 3)))
    got += [target.step(ids[:, i : i + 1], cache, (0, 3)) for i in range(12, 20)]
    mine = [torch.cat(x) for x in zip(*got, strict=True)]
    torch.testing.assert_close(mine[0], logits, **TOLERANCE)
    torch.testing.assert_close(mine[1][:, 0], hidden[0], **TOLERANCE)
    torch.testing.assert_close(mine[1][:, 1], hidden[3], **TOLERANCE)
    torch.testing.assert_close(mine[2], hidden[4], **TOLERANCE)
    assert mine[0].dtype == torch.float32


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "gemma2", "gemma3", "mistral", "qwen3_moe", "granite"])
def test_a_tree_shows_each_branch_its_own_path_and_the_accepted_one_is_kept(name):
    """With windows of 5 behind a prefix of 8, and on after the tree as if only the path had been fed."""
    model = families.build(name)
    reference = families.twin(model)
    target = Target.of(model)
    prefix = [5, 6, 7, 8, 9, 10, 11, 12]
    nodes, parents = [11, 13, 12, 21, 22], [-1, -1, 0, 1, 3]  # 11-12, 13-21-22
    paths = [[11], [13], [11, 12], [13, 21], [13, 21, 22]]
    cache = target.new_cache()
    target.step(torch.tensor([prefix]), cache)
    seen = ancestors(parents)
    mask = torch.cat([torch.ones(5, 8, dtype=torch.bool), seen], 1)
    logits, layers, _ = target.step(torch.tensor([nodes]), cache, (2,), positions=7 + seen.sum(1), mask=mask)
    for row, path in enumerate(paths):
        hidden, want = families.alone(reference, [*prefix, *path])
        torch.testing.assert_close(logits[row], want[-1], **TOLERANCE)
        torch.testing.assert_close(layers[row, 0], hidden[2][-1], **TOLERANCE)
    target.keep(cache, 8, [1, 3])
    assert cache.get_seq_length() == 10
    after = target.step(torch.tensor([[40, 41]]), cache)[0]
    torch.testing.assert_close(after, families.alone(reference, [*prefix, 13, 21, 40, 41])[1][-2:], **TOLERANCE)
    target.keep(cache, 10, [])
    assert cache.get_seq_length() == 10


def test_trees_refuse_what_cannot_be_masked_or_kept():
    target = Target.of(families.build("llama"))
    target.parts.config.layer_types = ["full_attention", "chunked_attention"] * 2
    with pytest.raises(TargetError, match="no token trees for layers of kind chunked_attention"):
        target.step(torch.tensor([[3]]), target.new_cache(), mask=torch.ones(1, 1, dtype=torch.bool))
    recurrent = Target.of(families.build("qwen3_next"))
    cache = recurrent.new_cache()
    recurrent.step(torch.tensor([[3, 4, 5]]), cache)
    with pytest.raises(TargetError, match="without speculation"):
        recurrent.keep(cache, 0, [0, 2])


def test_packing_does_not_disturb_steps_and_the_reverse():
    target = Target.of(families.build("llama"))
    batch, ids = Batch.pack(_rows()), torch.tensor([[3, 4, 5]])
    before = target.features(batch, Wants((2,))).layers
    step = target.step(ids, target.new_cache())[0]
    assert torch.equal(target.features(batch, Wants((2,))).layers, before)
    assert torch.equal(target.step(ids, target.new_cache())[0], step)


def test_recurrent_layers_refuse_to_roll_back():
    target = Target.of(families.build("qwen3_next"))
    cache = target.new_cache()
    target.step(torch.tensor([[3, 4, 5]]), cache)
    target.crop(cache, 3)  # nothing to forget
    with pytest.raises(TargetError, match="without speculation"):
        target.crop(cache, 2)
    with pytest.raises(ValueError, match="holds 3"):
        target.crop(cache, 4)


@pytest.mark.parametrize("window", [None, 5])
def test_the_arguments_of_varlen_attention(window, monkeypatch):
    """CUDA's one call over all documents, played by a reference with flash attention's meaning of its arguments:
    query i sees keys i - left .. i + right of its document."""
    from torch.nn.attention import varlen

    from headtrain.target import attention

    def reference(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
        assert enable_gqa and max_q == max_k == 14 and cu_q.dtype == torch.int32
        out = torch.empty_like(q)
        left, right = window_size
        for a, b in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
            far = torch.arange(b - a)[None] - torch.arange(b - a)[:, None]
            seen = (far <= right) & ((far >= -left) if left >= 0 else True)
            keys, values = (x[a:b].repeat_interleave(2, 1) for x in (k, v))
            scores = torch.einsum("ihd,jhd->hij", q[a:b], keys) * scale
            out[a:b] = torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)
        return out

    monkeypatch.setattr(varlen, "varlen_attn", reference)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 23, 8), torch.randn(1, 2, 23, 8), torch.randn(1, 2, 23, 8)
    run = attention.Run.of(torch.tensor([0, 9, 23]), torch.device("cpu"))
    module = torch.nn.Module()
    module.layer_idx = 0
    expected, _ = attention.packed_attention(
        module, q, k, v, None, scaling=0.3, sliding_window=window, headtrain_run=run
    )
    torch.testing.assert_close(attention._varlen(q, k, v, run, 0.3, window)[None], expected)
