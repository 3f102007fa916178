"""What of a launcher's config is refused, and what accelerate does not see."""

from __future__ import annotations

import os

import pytest

from headtrain.config import RecipeError
from headtrain.train import launched


@pytest.fixture(autouse=True)
def two(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")


def test_a_config_file_of_deepspeed_is_refused_and_not_passed_over(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "zero.json")
    with pytest.raises(RecipeError, match="deepspeed_config_file zero.json is not read; set zero_stage and offload"):
        launched.strategy()


def test_loading_on_one_rank_alone_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    with pytest.raises(RecipeError, match="fsdp_cpu_ram_efficient_loading: true, expected false"):
        launched.strategy()


@pytest.mark.parametrize("name", [launched.FSDP, launched.DEEPSPEED])
def test_accelerate_sees_neither_flag(monkeypatch, name):
    monkeypatch.setenv(name, "true")
    with launched.hidden():
        assert name not in os.environ
    assert os.environ[name] == "true"
