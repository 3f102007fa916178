"""`headtrain eval` and `headtrain report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import typer

from ..config import Recipe, RecipeError, TargetSection
from ..data import DataError
from ..decode.draft_model import TokenizerMismatch
from ..decode.drafters import Drafter, HeadDrafter
from ..decode.generate import Acceptance
from ..evaluate.acceptance import Case, Settings, describe_target, load_prompts, measure, versions
from ..evaluate.report import html_report, notes, tables
from ..evaluate.results import DECODE, REPLAY, STORED
from ..evaluate.stored import measure_stored
from ..evaluate.sweep import FILES, Sweep, found_in
from ..heads.io import FILE
from ..metadata import MetadataError, write_text
from ..target.shape import TargetError
from ..train.checkpoint import CheckpointError
from ..train.lock import run_lock
from .common import (
    TargetOption,
    checkpoint_of,
    err,
    existing,
    load_for,
    out,
    read_head,
    recipe_of,
    require_same_target,
    target_section,
)
from .drafters import Maker, numbers

LOCK = "eval.lock"
USER_ERRORS = (RecipeError, DataError, MetadataError, TokenizerMismatch, CheckpointError, TargetError)  # say enough


def evaluate(
    run: Annotated[
        Path | None,
        typer.Argument(help="a run (its best checkpoint), a checkpoint or an export; none: other drafters only"),
    ] = None,
    target: TargetOption = None,
    prompts: Annotated[
        list[str] | None, typer.Option(help="files or folders; default: the recipe's eval.prompts")
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="head (RUN's own, the default); ngram, prompt-lookup or answer-lookup, with longest=4,shortest=2 "
            "after a colon; model:TARGET, a smaller model of the same tokenizer; or another head's folder. Repeat for "
            "several"
        ),
    ] = None,
    k: Annotated[str | None, typer.Option(help="drafted tokens in a chain: 5, or 1,2,3,4,5,8; 0: no chains")] = None,
    tree: Annotated[
        str | None,
        typer.Option(help="also trees of so many nodes: 15,31,63 (dynamic, or static where each depth has a module)"),
    ] = None,
    tree_depth: Annotated[int | None, typer.Option(min=1, help="default: the trained depth")] = None,
    branch: Annotated[
        int | None, typer.Option(min=1, help="children of a tree's node; default: by the budget, at most 10")
    ] = None,
    temperature: Annotated[str | None, typer.Option(help="0 (greedy), or several: 0,0.7")] = None,
    top_p: Annotated[float, typer.Option(help="at temperatures above 0")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="at temperatures above 0; 0: all")] = 0,
    acceptance: Annotated[
        str, typer.Option(help="lossless; or typical, for temperatures above 0: faster, and NOT lossless")
    ] = "lossless",
    mode: Annotated[
        str,
        typer.Option(
            help="decode: decoded and timed; replay: every k from one pass over the target's greedy text, not timed; "
            "stored: teacher-forced on the run's stored rows, seconds"
        ),
    ] = "decode",
    features: Annotated[
        Path | None,
        typer.Option(
            help="stored: rows of another head of this target, such as those a peer's imported head is compared on: a "
            "features folder with eval or train in it; default: the run's own"
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="of each text; default: the recipe's eval.max_new_tokens, or 128")
    ] = None,
    limit_per_route: Annotated[
        int | None, typer.Option(min=1, help="prompts of each route; stored: of all rows")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**62, help="of sampling; default: the recipe's, or 0")] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="folder for eval.json and eval.html (eval-replay and eval-stored in those modes); default: RUN/eval, "
            "EXPORT-eval",
        ),
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="measure this OpenAI-compatible server instead; the options below are for it")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="server.json of a run without speculation, or that server's URL")
    ] = None,
    concurrency: Annotated[str, typer.Option(help="requests at the same time")] = "1,4,16",
    requests: Annotated[int | None, typer.Option(min=1, help="at each concurrency; default: every prompt once")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="limit on the time per output token, for goodput")] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="limit on the time to the first token")] = None,
    timeout: Annotated[float, typer.Option(help="seconds for one request")] = 300.0,
    model: Annotated[str | None, typer.Option(help="the model's name at the server; default: its only one")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="name of the environment variable that holds the key")] = None,
) -> None:
    """Decode held-out prompts with and without drafts; report acceptance, tau, tokens/s and equality by route.

    Every prompt is decoded once without drafts and once with every drafter, chain length, tree and temperature asked
    for. An interrupted evaluation goes on with the same command. Exit code of --server: 0 every request was answered,
    1 some failed (their number and the first are printed), 2 none was answered or nothing could be sent, 130 Ctrl-C.

    \b
    headtrain eval runs/quickstart
    headtrain eval runs/quickstart --k 1,2,3,4,5,8 --mode replay
    headtrain eval imported/head --mode stored --features runs/quickstart/features --target targets/mine
    headtrain eval runs/quickstart --k 3,5 --tree 15,31 --drafter head --drafter ngram --temperature 0,0.7
    headtrain eval --target targets/mine --prompts data/heldout --drafter prompt-lookup --drafter model:targets/small
    headtrain eval --server http://localhost:8000 --prompts data/heldout --baseline plain/server.json --slo-tpot-ms 20
    """
    if acceptance not in get_args(Acceptance):
        raise RecipeError(f"--acceptance {acceptance}: expected {' or '.join(get_args(Acceptance))}")
    if acceptance == "typical" and (mode != "decode" or server is not None):
        raise RecipeError("--acceptance typical: only by decoding here (--mode decode, no --server)")
    if run is not None:
        existing(run)
    if features is not None and mode != STORED:
        raise RecipeError(f"--features {features}: stored rows are read by --mode stored alone, not by {mode}")
    _refuse_ignored(
        mode,
        server,
        {"--drafter": drafter, "--tree": tree, "--tree-depth": tree_depth, "--branch": branch},
        {"--prompts": prompts, "--temperature": temperature},
        {"--k": k, "RUN": run, "--target": target},
    )
    recipe = recipe_of(run) if run else None
    settings = recipe.eval if recipe else None

    def pick(name: str, given, default):
        return given if given is not None else getattr(settings, name) if settings else default

    if to is None:
        to = figures_of(run)
    specs = prompts or (settings.prompts if settings else [])
    temperatures = temperature if temperature is not None else str(pick("temperature", None, 0.0))
    tokens = pick("max_new_tokens", max_new_tokens, 128)
    warm = numbers("--temperature", temperatures, float, 0.0)
    seed = pick("seed", seed, 0)
    if mode != "stored" and not specs:
        where = "in the recipe" if run is None or recipe is not None else f"in a recipe.yaml, which {run} has none of"
        raise RecipeError(f"no prompts: give --prompts, or eval.prompts {where}")
    if server is not None:
        from ..evaluate.goodput import Slo
        from ..evaluate.server import Load
        from .server import run_server

        if len(warm) > 1:
            raise RecipeError("--server: one --temperature at a time")
        places = tuple(numbers("--concurrency", concurrency, int, 1))
        try:
            load = Load(
                places, max_tokens=tokens, temperature=warm[0], top_p=top_p, top_k=top_k, requests=requests,
                timeout=timeout, seed=seed,
            )  # fmt: skip
            slo = Slo(slo_tpot_ms, slo_ttft_ms)
        except ValueError as error:
            raise RecipeError(f"--server: {error}") from None
        runs = run_server(
            server, specs, to, out, load=load, slo=slo, model=model,
            api_key_env=api_key_env, limit_per_route=limit_per_route, baseline=baseline,
        )  # fmt: skip
        if runs[-1].interrupted:
            raise typer.Exit(130)
        if any(served.failed for served in runs):
            raise typer.Exit(1)
        return
    ks = k if k is not None else str(pick("k", None, 5))
    chains = [] if ks == "0" else numbers("--k", ks, int, 1)
    if mode == STORED:
        sweep = _stored(run, recipe, target, features, chains, limit_per_route)
    elif mode in (DECODE, REPLAY):
        wanted = _Wanted(
            drafters=drafter or (["head"] if run else []),
            chains=chains,
            budgets=[] if tree is None else numbers("--tree", tree, int, 1),
            temperatures=warm,
            replay=mode == REPLAY,
            branch=branch,
            tree_depth=tree_depth,
        )
        limit = pick("limit_per_route", limit_per_route, None)
        shared = Settings(top_p=top_p, top_k=top_k, max_new_tokens=tokens, seed=seed, acceptance=acceptance)
        section = target_section(target, recipe)
        with run_lock(to, err, LOCK, "evaluates"):
            journal = to / Path(FILES[mode]).with_suffix(".unfinished")
            _show(_decoded(wanted, run, recipe, section, specs, limit, shared, journal), to / FILES[mode])
            journal.unlink(missing_ok=True)  # only now: until the results are written it is all there is
        return
    else:
        raise RecipeError(f"--mode {mode}: expected decode, replay or stored")
    _show(sweep, to / FILES[mode])


@dataclass(frozen=True)
class _Wanted:
    """What is to be compared: every drafter with every chain length, tree budget and temperature."""

    drafters: list[str]
    chains: list[int]
    budgets: list[int]
    temperatures: list[float]
    replay: bool
    branch: int | None
    tree_depth: int | None

    def cases(self, maker: Maker) -> list[Case]:
        if not self.drafters:
            raise RecipeError("nothing to evaluate: give a RUN, or --drafter (ngram, prompt-lookup, model:TARGET)")
        if not self.chains and not self.budgets:
            raise RecipeError("--k 0 without --tree leaves nothing to draft")
        shapes: list[tuple[Drafter, int]] = []
        for spec in self.drafters:
            chain = maker.chain(spec)
            shapes += [(chain, k) for k in self.chains]
            shapes += [maker.tree(chain, nodes, max(self.chains, default=5)) for nodes in self.budgets]
        return [
            Case(drafter, k, t, replay=self.replay and t == 0 and not drafter.tree)
            for t in self.temperatures
            for drafter, k in shapes
        ]


def _decoded(
    wanted: _Wanted,
    run: Path | None,
    recipe: Recipe | None,
    target: TargetSection,
    prompts: list[str],
    limit: int | None,
    settings: Settings,
    journal: Path,
) -> Sweep:
    loaded = load_for(target, run)
    try:
        cases = wanted.cases(Maker(loaded, run, recipe, wanted.branch, wanted.tree_depth))
        found = load_prompts(loaded.tokenizer, prompts, limit)
        return measure(loaded, cases, found, settings, journal=journal)
    except USER_ERRORS:
        raise
    except ValueError as error:
        raise RecipeError(f"evaluation: {error}") from None


def _refuse_ignored(mode: str, server: str | None, drafting: dict, stored: dict, serving: dict) -> None:
    """An option that the mode would pass over gets an error, not an answer to another question."""
    ignored: dict = {}
    if server is not None:
        ignored, what = drafting | {name: serving[name] for name in ("--k", "RUN", "--target")}, "--server"
        if mode != "decode":
            raise RecipeError(f"--server and --mode {mode} exclude each other")
    elif mode == "stored":
        ignored, what = drafting | stored, "--mode stored (the head's greedy chains on the run's stored rows)"
    if given := [name for name, value in ignored.items() if value not in (None, [])]:
        raise RecipeError(f"{what} does not use {', '.join(given)}: leave it out, or evaluate in another mode")


def _stored(
    run: Path | None, recipe: Recipe | None, target: str | None, features: Path | None, ks: list[int], limit: int | None
) -> Sweep:
    from ..data.store import FeatureStore

    if run is None:
        raise RecipeError("--mode stored: give the RUN whose head and stored rows are meant")
    if features is None and recipe is None:
        raise RecipeError(f"--mode stored: {run} has no recipe.yaml that says where its features are; give --features")
    folders = [(features or recipe.features_dir) / split for split in ("eval", "train")]
    folder = next((f for f in folders if f.is_dir()), None)
    if folder is None:
        raise RecipeError(f"no stored features at {folders[0]} or {folders[1]}: `headtrain capture` makes them")
    head, metadata, where = read_head(run)
    loaded = load_for(target_section(target, recipe), run)
    require_same_target(metadata, loaded.identity, where)
    store = FeatureStore(folder, wants=head.wants())
    if lines := store.manifest.target.differences(loaded.identity):
        raise RecipeError(
            f"{folder} holds another target's features (stored against given):\n  " + "\n  ".join(lines) + "\n"
            "Give --target of the stored ones, or capture again to another features.dir"
        )
    head.attach(loaded.weights())
    try:
        drafter = HeadDrafter(head.to(loaded.device), trained_depth=metadata.head.depth)
        of = describe_target(loaded), versions(loaded)
        return measure_stored(store, drafter, loaded.teacher(), ks or [5], *of, limit=limit)
    except ValueError as error:
        raise RecipeError(f"evaluation: {error}") from None


def _show(sweep: Sweep, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    page = file.with_suffix(".html")
    sweep.write(file)
    write_text(page, html_report(sweep))
    _print(sweep)
    out.print(f"{file}\n{page}", markup=False)


def _print(sweep: Sweep) -> None:
    for table in tables(sweep):
        out.print(table)
    for line in notes(sweep):
        out.print(line, markup=False)


def report(run: Annotated[Path, typer.Argument(help="a run that was evaluated")]) -> None:
    """The tables of a run's evaluations (decoded, replayed, of stored rows), and where what the run made lies."""
    folder = figures_of(existing(run))
    found = found_in(folder)
    if not found:
        raise RecipeError(f"no {folder / FILES[DECODE]}: `headtrain eval {run}` makes it")
    for figures in found:
        try:
            sweep = Sweep.read(figures)
        except ValueError as error:
            raise RecipeError(f"{figures} is no evaluation ({error}); `headtrain eval {run}` makes it again") from None
        _print(sweep)
    for name, path in _made(run, found):
        if path.exists():
            out.print(f"{name:<9} {path}", markup=False)


def figures_of(run: Path | None) -> Path:
    """Where an evaluation of ``run`` goes: inside a run; beside an export, which is served and pushed as it is."""
    if run is None:
        return Path("eval")
    return run.with_name(f"{run.name}-eval") if (run / "config.json").is_file() else run / "eval"


def _made(run: Path, evaluations: Sequence[Path]) -> Sequence[tuple[str, Path]]:
    try:
        head = checkpoint_of(run)
    except CheckpointError:  # an export, or an evaluation of other drafters only
        head = run / FILE
    figures = [item for path in evaluations for item in (("figures", path), ("report", path.with_suffix(".html")))]
    exports = [("export", path.parent) for path in sorted(run.glob("export*/config.json"))]
    return [("head", head), ("curve", run / "metrics.jsonl"), *figures, ("features", run / "features"), *exports]
