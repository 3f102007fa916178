from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A tiny random Llama target (8 layers, H 64, V 384) as a local folder."""
    return tiny.save(tmp_path_factory.mktemp("target"))
