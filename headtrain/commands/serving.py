"""What `speedup` and `advise` ask alike: the evaluation, the target's sizes, the device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import ExpectedShape, RecipeError, TargetSection, load_recipe
from ..evaluate.results import ALL, Evaluation
from ..evaluate.roofline import DEVICES, HUGE, Cache, Device, Experts, Load, Model, Setup
from ..evaluate.speedup import require
from ..types import TargetShape

if TYPE_CHECKING:
    from ..decode.generate import Round
    from ..evaluate.advisor import Advisor

USUAL_K = 8
# Names of layers in configs. What is none of these is counted as a layer that keeps every position.
WINDOWED = ("sliding_attention", "chunked_attention", "hybrid_sliding")
FIXED_STATE = ("linear_attention", "mamba", "mamba2", "recurrent", "conv")
NO_STATE = ("moe", "mlp")
KEEPS_ALL = ("full_attention", "attention", "global_attention", "hybrid")

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

SAME_SIZE = 1.3  # counts of one target differ by its tied or untied embedding, a vision tower


def read_cases(path: Path) -> list[Evaluation]:
    """An eval.json, or the run or folder that holds one; the decoded one where there are several. Raises
    RecipeError."""
    from ..evaluate.sweep import Sweep, found_in

    folders = (path, path / "eval", path.with_name(f"{path.name}-eval"))
    found = path if path.is_file() else next((file for folder in folders for file in found_in(folder)), None)
    if found is None:
        what = "no evaluation at" if path.exists() else "no such file or folder:"
        raise RecipeError(f"{what} {path}; `headtrain eval` writes eval.json")
    try:
        return Sweep.read(found).cases
    except OSError as error:
        raise RecipeError(f"{found} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        why = " ".join(str(error).split())
        raise RecipeError(f"{found} is no evaluation ({why}); `headtrain eval` makes it again") from None


def require_measured_on(cases: Sequence[Evaluation], setup: Setup | None) -> None:
    """Acceptance and draft sizes of one target say nothing about another. Only sizes can be compared here (a recipe or
    a config has no fingerprint), so a fine-tune passes. Raises RecipeError for a target of another size."""
    measured = cases[0].target.get("parameters") if cases else None
    if setup is None or not measured:
        return
    asked = setup.target.parameters
    if max(asked / measured, measured / asked) > SAME_SIZE:
        raise RecipeError(
            f"the evaluation measured {cases[0].target['name']} ({measured:,} parameters), the target asked about has "
            f"{asked:,}: acceptance on one target says nothing about another; give an evaluation of that target "
            "(--parameters, where its count is wrong)"
        )


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
    from ..target.load import load_config, locate
    from ..target.shape import shape_from_config

    if path is None:
        return None
    section = load_recipe(path).target if path.endswith((".yaml", ".yml")) else TargetSection(path=path)
    if parameters is None and section.expect is not None:
        parameters = section.expect.parameters
    if section.expect is not None and not locate(section).local:
        return _from_expect(path, section.expect, parameters, weight_bytes, kv_bytes)
    config = load_config(section)
    shape = shape_from_config(config)
    experts, (cache, notes) = read_experts(config, shape.num_layers), read_cache(config, shape)
    if experts is not None and parameters is None:
        raise RecipeError(f"{path} is a mixture of experts: give --parameters, the number of all its parameters")
    more = {"weight_bytes": weight_bytes, "kv_bytes": kv_bytes, "experts": experts, "cache": cache}
    return Model.of(shape, parameters, **more, notes=notes)


def _from_expect(
    path: str, expect: ExpectedShape, parameters: int | None, weight_bytes: float, kv_bytes: float
) -> Model:
    """A target whose config is not at hand: what the recipe does not say is assumed, and that is said."""
    notes = [
        f"{path} has no config at hand, only target.expect: the KV cache is taken as keys and values of all "
        f"{expect.num_layers} layers, {expect.num_kv_heads} heads of {expect.head_dim}; latent attention, sliding "
        "windows or recurrent layers would make it smaller. Give --target a folder with config.json to count them"
    ]
    if expect.active_parameters:
        notes.append(
            f"a mixture of experts ({expect.active_parameters:,} parameters are active for a token), taken as a dense "
            "target that reads all its weights for each step, since target.expect does not name its experts"
        )
    sizes = {"weight_bytes": weight_bytes, "kv_bytes": kv_bytes, "notes": tuple(notes)}
    return Model.of(expect.shape(), parameters, **sizes)


def read_cache(config: Any, shape: TargetShape) -> tuple[Cache, tuple[str, ...]]:
    """What a config's layers keep of each position, and what to know about it."""
    from ..target.shape import text_config

    text, notes = text_config(config), []
    values, width = 2 * shape.num_kv_heads * shape.head_dim, 2 * shape.head_dim
    rank, rotary = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None) or 0
    if rank:
        values, width = rank + rotary, 2 * rank + rotary  # q @ latent and rotary key, weights @ latent
        notes.append(f"latent attention: the KV cache keeps {rank} + {rotary} values of each position and layer")
    chunk, window = getattr(text, "attention_chunk_size", None), getattr(text, "sliding_window", None)
    window = (window if getattr(text, "use_sliding_window", True) else None) or chunk or 0
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if kinds is None:  # one kind for all; a window counts for all of them (Mistral 7B v0.1)
        kinds = ["sliding_attention" if window else "full_attention"] * shape.num_layers
    kinds = list(kinds)[: shape.num_layers]
    fixed = sum(kind in FIXED_STATE for kind in kinds)
    if fixed:
        notes.append(
            f"{fixed} of {shape.num_layers} layers keep a recurrent or convolution state instead of a KV cache: its "
            "size does not grow with the text, and it is left out"
        )
    if shared := getattr(text, "num_kv_shared_layers", None):
        kinds = kinds[:-shared]
        notes.append(f"the last {shared} layers read the KV cache of earlier ones and keep none")
    windowed = sum(kind in WINDOWED for kind in kinds) if window else 0
    if windowed:
        notes.append(f"sliding windows: {windowed} of {shape.num_layers} layers keep the last {window} positions only")
    full = sum(kind not in (*FIXED_STATE, *NO_STATE) for kind in kinds) - windowed
    if other := sorted({*kinds} - {*WINDOWED, *FIXED_STATE, *NO_STATE, *KEEPS_ALL}):
        notes.append(f"layers of kind {', '.join(other)} are counted as if they kept every position in full")
    return Cache(values, full, width, windowed, window if windowed else 0), tuple(notes)


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
    given = {"--slo-ms": slo_ms, "--users": users}
    given |= {"--requests-per-second": requests_per_second, "--output-tokens": output_tokens}
    for name, value in given.items():
        if value is not None:
            require(value, name, above=True, high=HUGE)
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


def label_of(advisor: Advisor) -> str | None:
    """Of the drafter that is advised for one sequence at a time, if its chains were measured."""
    chosen = advisor.at(1).chosen
    chains = [c for c in advisor.among if not c.settings.get("tree")]
    return next((c.drafter["label"] for c in chains if chosen and c.drafter["label"] == chosen.label), None)


def pick(cases: list[Evaluation], route: str, label: str | None = None) -> Evaluation:
    """The longest chain of the drafter of this label (None: of the first), lossless before not, at the lowest
    temperature. Raises RecipeError with what there is."""
    chains = [c for c in cases if not c.settings.get("tree") and label in (None, c.drafter["label"])]
    if not chains:
        raise RecipeError(
            f"a curve over k follows from chains, and only trees were evaluated here ({_measured(cases, route)}): "
            "evaluate a chain too, or ask `headtrain advise`, which compares trees"
        )
    found = [c for c in chains if c.drafter == chains[0].drafter]
    return min(found, key=lambda c: (not c.lossless, c.settings["temperature"], -c.settings["k"]))


def _measured(cases: list[Evaluation], route: str) -> str:
    """What each case gained, in a line."""
    made = [(c, c.summary(route)) for c in cases]
    return "; ".join(
        f"{c.drafter['label']}, {c.shape}: {s.tau:.2f} tokens a round"
        + (f", timed at {s.speedup:.2f}x" if math.isfinite(s.speedup) else "")
        for c, s in made
    )


def rounds_of(case: Evaluation, route: str) -> list[Round]:
    """Raises RecipeError where there are none."""
    rounds = [x for r in case.results if route in (r.route, ALL) for x in r.rounds]
    if not rounds:
        raise RecipeError(f"nothing was decoded past the first token on {route}")
    return rounds


def alphas_of(case: Evaluation, route: str) -> list[float]:
    """Acceptance by depth, of all rounds: a round that drafted nothing (a lookup without a match) counts as a miss.
    Raises RecipeError."""
    rounds = rounds_of(case, route)
    reached = [len(rounds), *(sum(x.accepted >= j for x in rounds) for j in range(1, case.settings["k"] + 1))]
    return [now / before if before else 0.0 for before, now in itertools.pairwise(reached)]


def taus_of(case: Evaluation, route: str) -> list[float]:
    """Tokens a round as measured with k = 1, 2, ...; below 1 + the sum of the alphas' running products where an
    accepted end of text ended a round, since the target then adds no token of its own. Raises RecipeError."""
    rounds = rounds_of(case, route)
    return [sum(min(x.committed, k + 1) for x in rounds) / len(rounds) for k in range(1, case.settings["k"] + 1)]


def rounds_note(case: Evaluation, route: str) -> str:
    """How the tokens a round were found."""
    rounds = rounds_of(case, route)
    ended = sum(x.committed <= x.accepted for x in rounds)
    line = f"tokens a round: as measured in {len(rounds)} rounds"
    if ended:
        line += f"; {ended} of them ended with an accepted end of text, to which the target adds no token"
    if not case.lossless:
        line += f"; with {case.settings['acceptance']} acceptance, whose text is not distributed as the target's"
    return line
