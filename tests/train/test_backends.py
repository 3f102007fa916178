"""Which backend the launcher's config gives, and which are refused."""

from __future__ import annotations

import os

import pytest

from headtrain.config import RecipeError
from headtrain.train import launched
from headtrain.train.replicated import Replicated
from headtrain.train.sharded import Sharded

ENVIRONMENTS = [
    ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "fsdp_version: 1, expected 2"),
    ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params"),
    ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, "zero_stage 0"),
    ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme"}, "nvme"),
    (
        {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
        },
        "needs zero_stage 3",
    ),
]


@pytest.mark.parametrize(("env", "message"), ENVIRONMENTS, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_not_there_is_refused(monkeypatch, env, message):
    for name, value in {**env, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=message):
        launched.strategy()


def test_strategy_follows_the_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launched.strategy() is Replicated
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert launched.strategy() is Sharded
    with launched.hidden():
        assert "ACCELERATE_USE_FSDP" not in os.environ
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched.strategy() is Replicated
