"""The verbs. The only place where everything meets; each verb imports what it needs, so that --help is quick."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from .commands import evaluation, exporting
from .commands.advise import advise
from .commands.common import (
    device,
    err,
    out,
)
from .commands.importing import import_
from .commands.push import push
from .commands.speedup import speedup
from .commands.stitch import stitch
from .commands.vocab import vocab
from .config import Dtype, RecipeError, TargetSection, load_recipe

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="""Train self-draft heads on a frozen target, measure them by lossless decoding, export them.

The usual order:

\b
headtrain convert package:NAME DIR   a GGUF target as a folder (once; a Hub id or a folder needs no copy)
headtrain inspect RECIPE          rows as the target sees them, supervised tokens marked
headtrain train RECIPE --dry-run  the resolved recipe, and what it will cost
headtrain capture RECIPE          store the target's hidden states (train does it too)
headtrain train RECIPE            or, with several processes:
    accelerate launch --config_file recipes/backend/X.yaml --num_processes N -m headtrain.train RECIPE
headtrain eval RUN                acceptance by lossless decoding, against none and against other drafters
headtrain advise RUN              which drafter and which k, for each route, from that evaluation
headtrain export RUN --engine vllm --out DIR
headtrain check DIR --target T
headtrain import DIR --target T --out DIR2   a published head, to evaluate, continue or export
headtrain push DIR USER/NAME      to the Hub, private unless --public

\b
headtrain speedup                 what speculation gains: from acceptance and costs, with batch size, for an SLO
headtrain eval --server URL       the same question to a running server

RECIPE is a YAML file of recipes/; any key can be overridden: train.lr=1e-4 data.limit=100.""",
)
RecipeArgument = Annotated[Path, typer.Argument(help="YAML recipe, for example recipes/quickstart.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, for example train.lr=1e-4")]


@app.command()
def inspect(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(help="how many rows to show")] = 3,
    split: Annotated[str, typer.Option(help="train or eval")] = "train",
) -> None:
    """Show rendered rows with the supervised tokens marked, and the share of supervised tokens."""
    from .capture import plan_rows
    from .data.inspect import render_inspection
    from .target.load import load_tokenizer

    of = load_recipe(recipe, overrides or [])
    tokenizer = load_tokenizer(of.target)
    splits = plan_rows(of, tokenizer)
    if split not in splits:
        raise RecipeError(f"--split {split}: the recipe has {', '.join(splits)}")
    render_inspection(tokenizer, splits[split].rows, out, rows)
    for line in splits[split].report:
        out.print(line, markup=False)


@app.command()
def convert(
    target: Annotated[str, typer.Argument(help=".gguf file or package:NAME")],
    folder: Annotated[Path, typer.Argument(help="where to write the plain copy")],
) -> None:
    """Write a GGUF target as a plain folder (config, safetensors, tokenizer) that loads in a second."""
    from .target.load import convert_to_folder

    err.print(f"converting {target} (once; about half a minute for a small model)", markup=False)
    out.print(str(convert_to_folder(TargetSection(path=target), folder)), markup=False)


@app.command()
def capture(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Run the target over the recipe's data and store the hidden states that its head reads. Resumable."""
    from .capture import command, stop_on_sigterm

    stop_on_sigterm()
    command(load_recipe(recipe, overrides or []), err)


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option(help="start over; an earlier run is kept aside")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print an estimate and the resolved recipe only")] = False,
    gpus: Annotated[int | None, typer.Option(min=1, help="with --dry-run: what it takes on so many GPUs")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="with --dry-run: tokens of the data, where it is not at hand (hub:NAME)")
    ] = None,
    on: Annotated[
        str | None, typer.Option("--device", help="with --gpus: h100 (the default), h200, a100, l40s or rtx4090")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="with --gpus: ddp (the default), fsdp2, zero1, zero2 or zero3")
    ] = None,
    network: Annotated[
        float | None, typer.Option(help="with --gpus: 1e9 bytes/s that a node sends; default: 400")
    ] = None,
    busy: Annotated[
        float | None, typer.Option(help="with --gpus: share of the peak that arithmetic reaches; default: 0.4")
    ] = None,
) -> None:
    """Train on this machine with one process. For several: accelerate launch ... -m headtrain.train RECIPE."""
    if gpus is not None and not dry_run:
        raise RecipeError("--gpus is for --dry-run; to train on several: accelerate launch ... -m headtrain.train")
    if tokens is not None and not dry_run:
        raise RecipeError("--tokens is for --dry-run; to train on a part of the data: data.limit=N")
    paper = {"--device": on, "--backend": backend, "--network": network, "--busy": busy}
    if gpus is None and (given := [name for name, value in paper.items() if value is not None]):
        raise RecipeError(
            f"{', '.join(given)}: says what --dry-run --gpus N counts for; give --gpus, or leave it out (to train with "
            "a backend: accelerate launch --config_file recipes/backend/X.yaml --num_processes N -m headtrain.train "
            "RECIPE)"
        )
    if dry_run:
        from .estimate import estimate, plan_lines
        from .scale import Cluster, scale

        of = load_recipe(recipe, overrides or [])
        if gpus is None:
            out.print("\n".join(plan_lines(of, estimate(of, tokens))), markup=False)
            return
        more = {name: value for name, value in (("network", network), ("busy", busy)) if value is not None}
        got = scale(of, Cluster.of(gpus, on or "h100", **more), backend or "ddp", tokens)
        out.print("\n".join([*got.lines(), "", *plan_lines(got.recipe, got.plan, alone=False)]), markup=False)
        return
    command = [sys.executable, "-m", "headtrain.train", str(recipe), *(overrides or [])]
    os.execv(sys.executable, [*command, *(["--fresh"] if fresh else [])])


@app.command()
def regenerate(
    target: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file or package:NAME")],
    prompts: Annotated[list[str], typer.Argument(help="files, globs or folders of conversations")],
    to: Annotated[Path, typer.Option("--out", help="JSONL to write; the same command resumes it")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="tokens of an answer, at most")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="nucleus, at temperatures above 0; 1: all")] = 1.0,
    samples: Annotated[int, typer.Option(min=1, help="answers to each prompt")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="answers generated together")] = 16,
    seed: Annotated[int, typer.Option(help="of sampling")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="of the target; auto: the checkpoint's own, float32 on a CPU")] = "auto",
) -> None:
    """Let the target answer prompts itself: training data that matches what the head will be asked to draft."""
    from .data.regenerate import regenerate as run
    from .data.sources import read_conversations
    from .target.load import load_target

    conversations, report = read_conversations(prompts)
    for line in report.lines():
        err.print(line, markup=False)
    loaded = load_target(TargetSection(path=target, dtype=dtype), device())
    done = run(
        loaded.model, loaded.tokenizer, conversations, to,
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, samples=samples,
        batch_size=batch_size, seed=seed, dtype=None if dtype == "auto" else dtype,
    )  # fmt: skip
    for line in done.lines():
        out.print(line, markup=False)


@app.command()
def heads() -> None:
    """List the kinds of heads and their settings."""
    from .heads.catalog import HEADS

    for kind, head in HEADS.items():
        out.print(f"{kind}: {(sys.modules[head.__module__].__doc__ or '').splitlines()[0]}", markup=False)
        for name, field in head.Config.model_fields.items():
            if name != "kind":
                out.print(f"    {name} = {field.default!r}  {field.description or ''}", markup=False)


app.command("eval")(evaluation.evaluate)
app.command()(evaluation.report)
app.command()(exporting.export)
app.command()(exporting.check)
app.command()(exporting.engines)
app.command("import")(import_)
app.command()(push)
app.command()(speedup)
app.command()(advise)
app.command()(vocab)
app.command()(stitch)


def expected_errors() -> tuple[type[Exception], ...]:
    """Errors that say what a person can do about them."""
    from .data import DataError
    from .data.manifest import StoreError
    from .decode.draft_model import TokenizerMismatch
    from .evaluate.client import ServerError
    from .export.engines import ExportError
    from .metadata import MetadataError
    from .target.shape import TargetError
    from .train.checkpoint import CheckpointError

    return (
        RecipeError, DataError, StoreError, ExportError, MetadataError, TargetError, CheckpointError,
        TokenizerMismatch, ServerError, OSError,
    )  # fmt: skip


def main() -> None:
    """Errors that a person can act on end in one line and exit code 2, without a traceback."""
    warnings.showwarning = lambda message, *_, **__: err.print(f"warning: {message}", style="yellow", markup=False)
    try:
        app()
    except expected_errors() as error:
        named = isinstance(error, OSError) and error.filename and error.strerror
        err.print(f"error: {f'{error.filename}: {error.strerror}' if named else error}", style="red", markup=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
