"""What `speedup` and `advise` ask alike: the evaluation, the target's sizes, the device."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import RecipeError, TargetSection, load_recipe
from ..evaluate.results import ALL, Evaluation
from ..evaluate.roofline import DEVICES, Device, Experts, Load, Model, Setup

USUAL_K = 8

Target = Annotated[
    str | None, typer.Option(help="sizes of the target: a folder with its config.json, or a recipe (.yaml)")
]
Parameters = Annotated[int | None, typer.Option(min=1, help="all parameters of the target; default: counted or known")]
DeviceName = Annotated[str | None, typer.Option("--device", help=f"one of {', '.join(DEVICES)}")]
Tflops = Annotated[float | None, typer.Option(help="dense TFLOPS of the device, instead of its datasheet's")]
Gbps = Annotated[float | None, typer.Option(help="memory bandwidth, GB/s")]
MemoryGb = Annotated[float | None, typer.Option(help="memory of the device, GB")]
Efficiency = Annotated[float, typer.Option(help="share of both peaks that your engine reaches")]
PerReplica = Annotated[int, typer.Option("--gpus", min=1, help="GPUs of one replica (ideal tensor parallelism)")]
Context = Annotated[int, typer.Option(min=1, help="mean positions that a sequence holds while it answers")]
WeightBytes = Annotated[float, typer.Option(help="bytes of a weight: 2 for bf16, 1 for fp8, 0.5 for 4 bits")]
KvBytes = Annotated[float, typer.Option(help="bytes of a value in the KV cache")]


def read_cases(path: Path) -> list[Evaluation]:
    """An eval.json, or the run or folder that holds one. Raises RecipeError."""
    from ..evaluate.sweep import Sweep

    places = [path, path / "eval.json", path / "eval" / "eval.json"]
    found = next((p for p in places if p.is_file()), None)
    if found is None:
        raise RecipeError(f"no evaluation at {path}: `headtrain eval` writes eval.json")
    try:
        return Sweep.read(found).cases
    except ValueError as error:
        raise RecipeError(f"{found} is no evaluation ({error}); `headtrain eval` makes it again") from None


def read_device(
    name: str | None, tflops: float | None, gbps: float | None, memory_gb: float | None, efficiency: float, count: int
) -> Device | None:
    """A named one, free values, or a named one with some of them replaced; None where nothing was given. Raises
    RecipeError, ValueError."""
    given = {"tflops": tflops, "gbps": gbps, "memory_gb": memory_gb}
    if name is None and all(value is None for value in given.values()):
        return None
    if name is not None and name.lower() not in DEVICES:
        raise RecipeError(f"--device {name!r}: known are {', '.join(DEVICES)}; or give --tflops, --gbps, --memory-gb")
    base = DEVICES[name.lower()] if name else None
    values = {key: getattr(base, key, None) if value is None else value for key, value in given.items()}
    if missing := [f"--{key.replace('_', '-')}" for key, value in values.items() if value is None]:
        raise RecipeError(f"the device: give {', '.join(missing)} too, or --device ({', '.join(DEVICES)})")
    return Device(base.name if base else "device", **values, efficiency=efficiency).times(count)


def read_target(path: str | None, parameters: int | None, weight_bytes: float, kv_bytes: float) -> Model | None:
    """From a recipe or a config folder; None where none was given. Raises RecipeError, TargetError, ValueError."""
    from ..target.load import load_config, load_shape, locate

    if path is None:
        return None
    section = load_recipe(path).target if path.endswith((".yaml", ".yml")) else TargetSection(path=path)
    if parameters is None and section.expect is not None:
        parameters = section.expect.parameters
    shape = load_shape(section)
    experts = read_experts(load_config(section), shape.num_layers) if locate(section).local else None
    if experts is not None and parameters is None:
        raise RecipeError(f"{path} is a mixture of experts: give --parameters, the number of all its parameters")
    return Model.of(shape, parameters, weight_bytes=weight_bytes, kv_bytes=kv_bytes, experts=experts)


def read_experts(config: Any, layers: int) -> Experts | None:
    """The routed experts of a config, None for a dense model. Experts are taken to be gated MLPs, in every layer but
    the first dense ones: an approximation."""
    from ..target.shape import text_config

    text = text_config(config)

    def first(*names: str) -> int | None:
        return next((v for n in names if isinstance(v := getattr(text, n, None), int)), None)

    count = first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not count or count < 2:
        return None
    width = first("moe_intermediate_size", "intermediate_size")
    per_token = first("num_experts_per_tok", "moe_topk") or 1
    mixed = layers - (first("first_k_dense_replace") or 0)
    return Experts(count, per_token, mixed * count * 3 * text.hidden_size * width)


def read_setup(target: Model | None, device: Device | None, context: int) -> Setup | None:
    """None where neither was given. Raises RecipeError where one is missing."""
    if target is None and device is None:
        return None
    if target is None:
        raise RecipeError("a device without a target: give --target, a folder with config.json or a recipe")
    if device is None:
        raise RecipeError(f"a target without a device: give --device ({', '.join(DEVICES)}) or its --tflops ...")
    return Setup(target, device, context=context)


def read_load(
    slo_ms: float | None, users: float | None, requests_per_second: float | None, output_tokens: float | None
) -> Load | None:
    """None where nothing was given. Raises RecipeError, ValueError."""
    if (requests_per_second is None) != (output_tokens is None):
        raise RecipeError("a load in requests: give both --requests-per-second and --output-tokens")
    if slo_ms is None:
        if users is not None or output_tokens is not None:
            raise RecipeError("a load without an SLO: give --slo-ms, the longest time per output token")
        return None
    return Load(slo_ms / 1e3, users, None if output_tokens is None else requests_per_second * output_tokens)


def parse_alphas(text: str, k: int | None) -> list[float]:
    """``0.8``: the same at every depth, to k (8 if None); ``0.8,0.7``: by depth. Raises RecipeError."""
    try:
        alphas = [float(part) for part in text.split(",")]
    except ValueError:
        raise RecipeError(f"--alpha {text!r}: expected 0.8, or 0.8,0.7,0.6 by depth") from None
    return alphas * (k or USUAL_K) if len(alphas) == 1 else alphas


def pick(cases: list[Evaluation], drafter: str | None, route: str) -> Evaluation:
    """The longest chain of the drafter whose label has this part (None: of the first), at the lowest temperature.
    Raises RecipeError with what there is."""
    chains = [c for c in cases if not c.settings.get("tree")]
    labels = list(dict.fromkeys(c.drafter["label"] for c in chains))
    label = next((name for name in labels if drafter is None or drafter.lower() in name.lower()), None)
    if label is None:
        raise RecipeError(f"no chain of a drafter {drafter or ''!r} in this evaluation; it has: {', '.join(labels)}")
    found = [c for c in chains if c.drafter["label"] == label]
    if route != ALL and route not in found[0].routes:
        raise RecipeError(f"no route {route!r} in this evaluation; it has: {', '.join(found[0].routes)}, {ALL}")
    return min(found, key=lambda c: (c.settings["temperature"], -c.settings["k"]))


def alphas_of(case: Evaluation, route: str) -> list[float]:
    """Acceptance by depth, of all rounds: a round that drafted nothing (a lookup without a match) counts as a miss, so
    that 1 + the sum of the running products is the measured tau. Raises RecipeError."""
    rounds = [x for r in case.results if route in (r.route, ALL) for x in r.rounds]
    if not rounds:
        raise RecipeError(f"nothing was decoded past the first token on {route}")
    reached = [len(rounds), *(sum(x.accepted >= j for x in rounds) for j in range(1, case.settings["k"] + 1))]
    return [now / before if before else 0.0 for before, now in itertools.pairwise(reached)]
