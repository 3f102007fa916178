from __future__ import annotations

import json

import export_cases as cases
import pytest
import torch

from headtrain.export.core import export_head
from headtrain.export.engines import ExportError
from headtrain.export.files import parse_size, read_weights, weight_files, write_weights
from headtrain.export.folder import verify_folder


@pytest.mark.parametrize(("text", "size"), [("5GB", 5e9), ("200mb", 2e8), ("1.5GiB", 1.5 * 2**30), (" 4096 ", 4096)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "big", "-1GB", "0", "3 TB"])
def test_sizes_that_are_none(text):
    with pytest.raises(ExportError, match="expected for example 200MB"):
        parse_size(text)


def test_shards_are_filled_in_order_and_read_back(tmp_path):
    tensors = {name: torch.full((100,), float(n)) for n, name in enumerate("dbca")}  # 400 bytes each
    write_weights(tmp_path, tensors, "model.safetensors", 900)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index == {
        "metadata": {"total_size": 1600},
        "weight_map": {"a": first, "b": first, "c": second, "d": second},
    }
    assert [p.name for p in weight_files(tmp_path)] == ["model.safetensors.index.json", first, second]
    found = read_weights(tmp_path)
    assert found.keys() == tensors.keys() and all(torch.equal(found[n], t) for n, t in tensors.items())
    whole = tmp_path / "whole"
    whole.mkdir()
    write_weights(whole, tensors, "model.safetensors", 1600)
    assert [p.name for p in whole.iterdir()] == ["model.safetensors"]


def test_one_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path):
    write_weights(tmp_path, {"a": torch.ones(10), "b": torch.ones(500), "c": torch.ones(10)}, "model.safetensors", 100)
    assert len(weight_files(tmp_path)) == 4


def test_a_sharded_export_is_the_same_head_and_repeatable(tmp_path):
    checkpoint = cases.checkpoint(tmp_path / "c", "eagle3")
    one = export_head(checkpoint, "vllm", tmp_path / "one")
    many = export_head(checkpoint, "vllm", tmp_path / "many", max_shard_size="60KB")
    again = export_head(checkpoint, "vllm", tmp_path / "again", max_shard_size="60KB")
    assert not (many / "model.safetensors").exists() and len(weight_files(many)) > 3
    assert all((again / p.name).read_bytes() == p.read_bytes() for p in many.iterdir())
    whole, parts = verify_folder(one).head.state_dict(), verify_folder(many).head.state_dict()
    assert all(torch.equal(whole[n], parts[n]) for n in whole)
    with pytest.raises(ExportError, match="expected for example 200MB"):
        export_head(checkpoint, "vllm", tmp_path / "x", max_shard_size="huge")
