"""Reading a GGUF file once.

transformers parses the whole file (100k vocabulary strings, one numpy view each) for the config, again for the
weights and again for the tokenizer, and builds the map of tensor names anew for every submodule of the model. On
SmolLM2-135M that is nine tenths of the loading time; dequantising is the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reading_once() -> Iterator[None]:
    """Within the block, equal calls of gguf's reader and of its name map share one (read-only) result."""
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    own = {name: getattr(gguf, name) for name in names if hasattr(gguf, name)}
    try:
        for name, function in own.items():
            setattr(gguf, name, functools.cache(function))
        yield
    finally:
        for name, function in own.items():
            setattr(gguf, name, function)
