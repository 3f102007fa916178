from __future__ import annotations

import pytest
from checkpoint_families import KINDS, config_of

from headtrain.config import ExpectedShape
from headtrain.target.own_module import ModuleTensors, layer_modules, module_settings
from headtrain.target.shape import TargetError, check_expected, shape_from_config


def test_the_settings_of_a_module_come_from_the_config():
    deepseek = module_settings(config_of("deepseek"))
    assert deepseek["count"] == 1 and deepseek["kv_lora_rank"] == 12 and deepseek["n_routed_experts"] == 4
    assert module_settings(config_of("deepseek", q_lora_rank=None))["q_lora_rank"] is None  # not the class's default
    assert module_settings(config_of("mimo")) == {"count": 1}
    assert module_settings(config_of("mimo", num_nextn_predict_layers=0)) is None
    assert module_settings(config_of("qwen3.5", mtp_num_hidden_layers=2))["count"] == 2
    assert module_settings(config_of("qwen3-next"))["count"] == 1  # its config says nothing
    assert module_settings(config_of("qwen3-next", num_nextn_predict_layers=0)) is None
    assert all(shape_from_config(config_of(name)).module["count"] == 1 for name in KINDS)


def test_tensors_are_found_by_name_and_read_when_asked_for(tmp_path):
    """A head that does not want a module of gigabytes never reads it."""
    module = ["mtp.fc.weight", "model.mtp_layers.0.input_proj.weight", "model.layers.3.eh_proj.weight"]
    module += ["model.layers.3.mlp.gate.weight", "model.mtp.norm.weight"]
    others = ["model.layers.0.x", "model.layers.30.x", "model.mtpx", "lm_head.weight", "model.smtp.x"]
    files = {name: tmp_path / "not there" for name in (*module, *others)}
    tensors = ModuleTensors(files)
    assert sorted(tensors) == sorted(module) and len(tensors) == 5
    assert layer_modules(files) == ("model.layers.3.",) and layer_modules(others) == ()
    with pytest.raises(OSError):
        tensors["mtp.fc.weight"]


def test_a_recipe_expects_of_the_module_what_it_names():
    found = shape_from_config(config_of("deepseek"))
    values = {k: getattr(found, k) for k in ExpectedShape.model_fields if hasattr(found, k)}
    for module in (None, {"count": 1}, {"count": 1, "kv_lora_rank": 12}, found.module):
        check_expected(ExpectedShape(**values | {"module": module}), found, "here")
    with pytest.raises(TargetError, match="module.kv_lora_rank: expected 16, found 12"):
        check_expected(ExpectedShape(**values | {"module": {"kv_lora_rank": 16}}), found, "here")
    llama = shape_from_config(config_of("mimo", num_nextn_predict_layers=0))
    values = {k: getattr(llama, k) for k in ExpectedShape.model_fields if hasattr(llama, k)}
    with pytest.raises(TargetError, match="module.count: expected 1, found None"):
        check_expected(ExpectedShape(**values | {"module": {"count": 1}}), llama, "here")
