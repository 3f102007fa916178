from __future__ import annotations

import tiny
import torch
from safetensors.torch import load_file, save_file

from headtrain.target.sample import SIDE, likeness, local_weight_sample, weight_sample

O_PROJ = "model.layers.4.self_attn.o_proj.weight"


def test_a_sample_is_the_same_of_files_and_of_the_model(tiny_folder):
    model = tiny.model()
    files, loaded = local_weight_sample(tiny_folder), weight_sample(model)
    assert files.keys() == loaded.keys() == {"embed", "layer.4.self_attn.o_proj.weight"}
    for name, values in files.items():
        assert torch.equal(values, loaded[name]) and values.dtype == torch.float32
    expected = []  # slow and obvious: 24 rows, 24 columns, evenly spread with both ends
    weight = model.model.embed_tokens.weight
    for i in range(SIDE):
        for j in range(SIDE):
            expected.append(weight[(384 - 1) * i // (SIDE - 1), (64 - 1) * j // (SIDE - 1)])
    assert torch.equal(files["embed"], torch.stack(expected))


def test_likeness_tells_relatives_from_strangers(tiny_folder):
    mine = local_weight_sample(tiny_folder)
    stranger = likeness(mine, weight_sample(tiny.model(seed=3)))
    assert all(abs(value) < 0.15 for value in stranger.values()), stranger
    noisy = {k: v + 0.3 * v.std() * torch.randn_like(v) for k, v in mine.items()}
    assert all(value > 0.9 for value in likeness(mine, noisy).values())
    assert all(value > 0.999 for value in likeness(mine, {k: v.bfloat16() for k, v in mine.items()}).values())
    assert likeness(mine, {"embed": mine["embed"][:7], "other": mine["embed"]}) == {}


def test_packed_weights_are_left_out(tiny_folder, tmp_path):
    tensors = load_file(tiny_folder / "model.safetensors")
    tensors[O_PROJ] = torch.zeros(8, 64, dtype=torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert local_weight_sample(tmp_path).keys() == {"embed"}
    tensors = {n: t for n, t in tensors.items() if n != O_PROJ}  # under another name: the next that is known
    save_file(tensors, tmp_path / "model.safetensors")
    assert local_weight_sample(tmp_path).keys() == {"embed", "layer.4.mlp.down_proj.weight"}
