"""What is read without a target's body is what the loaded target has, for every family; and the body stays away."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tiny
import torch
from target_families import BUILD, build

from headtrain.config import TargetSection
from headtrain.target import edges as module
from headtrain.target.edges import Edges, load_edges
from headtrain.target.load import load_target
from headtrain.target.model import Target
from headtrain.types import Batch, Wants

# loaded whole: fused or renamed tensors in the last layer that a head may start from
WHOLE = {"qwen3_moe", "mixtral", "qwen3_next"}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", BUILD)
def test_every_family_gives_what_the_loaded_target_gives(name, tmp_path):
    build(name).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    section = TargetSection(path=str(tmp_path))
    edges, whole = load_edges(section), load_target(section)
    assert isinstance(edges, Target if name in WHOLE else Edges)
    assert edges.identity == whole.identity and edges.shape == whole.shape
    mine, theirs = edges.weights(), whole.weights()
    for key in ("embed", "lm_head", "final_norm", "lm_head_bias"):
        a, b = getattr(mine, key), getattr(theirs, key)
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), key
    assert mine.softcap == theirs.softcap and same(mine.last_layer, theirs.last_layer)
    assert mine.module.keys() == theirs.module.keys()
    final = torch.randn(5, whole.shape.hidden_size)
    assert torch.equal(edges.teacher().logits(final), whole.teacher().logits(final))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_in_the_precision_that_the_target_would_be_in(tmp_path, dtype):
    section = TargetSection(path=str(tiny.save(tmp_path)), dtype=dtype)
    edges, whole = load_edges(section), load_target(section)
    assert isinstance(edges, Edges) and edges.weights().embed.dtype == getattr(torch, dtype)
    assert same(edges.weights().last_layer, whole.weights().last_layer)


def test_features_load_the_whole_target_once(tiny_folder, monkeypatch):
    loads = []
    whole = load_target(TargetSection(path=str(tiny_folder)))
    edges = load_edges(TargetSection(path=str(tiny_folder)))
    monkeypatch.setattr(module, "load_target", lambda *_: loads.append(1) or whole)
    batch = Batch.pack(tiny.rows())
    wants = Wants((2, 8), "all")
    for _ in range(2):
        got, expected = edges.features(batch, wants), whole.features(batch, wants)
        assert torch.equal(got.layers, expected.layers) and torch.equal(got.final, expected.final)
    assert loads == [1]


def test_damaged_files_are_refused_as_ever(tmp_path):
    """A tensor that the files lack is never left at random."""
    from safetensors.torch import load_file, save_file

    from headtrain.target.shape import TargetError

    path = tiny.save(tmp_path, tie_word_embeddings=False) / "model.safetensors"
    tensors = load_file(path)
    for missing in ("lm_head.weight", "model.norm.weight", "model.layers.7.mlp.up_proj.weight"):
        save_file({n: t for n, t in tensors.items() if n != missing}, path, metadata={"format": "pt"})
        with pytest.raises(TargetError, match="(?s)" + missing.split(".")[-2]):
            load_edges(TargetSection(path=str(tmp_path)))


PEAK = """
import sys
from pathlib import Path
from headtrain.config import TargetSection
from headtrain.target.edges import load_edges
from headtrain.target.load import load_target
import transformers.models.llama.modeling_llama
peak = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])  # kB
before = peak()
target = globals()[sys.argv[1]](TargetSection(path=sys.argv[2]))
target.identity, target.weights(), target.teacher()
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_body_takes_no_memory(tmp_path):
    """Peak of a process of its own; the body is 190 MB, and the rest 3."""
    big = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8, head_dim=64)
    path = tiny.save(tmp_path, **big)
    size = (path / "model.safetensors").stat().st_size / 1024
    took = {}
    for name in ("load_edges", "load_target"):
        done = subprocess.run([sys.executable, "-c", PEAK, name, str(path)], capture_output=True, text=True, check=True)
        took[name] = int(done.stdout)
    assert took["load_target"] > 0.9 * size and took["load_edges"] < took["load_target"] - 0.7 * size, took
