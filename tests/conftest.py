from __future__ import annotations

import os
import signal

# A shell starts a job in the background with Ctrl-C ignored; tests that send it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A tiny random Llama target (8 layers, H 64, V 384) as a local folder."""
    return tiny.save(tmp_path_factory.mktemp("target"))


@pytest.fixture
def one_thread(monkeypatch):
    """As the processes of ``ranks`` have: on some CPUs sums depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "set_num_threads", lambda _: None)
        yield
    torch.set_num_threads(threads)
