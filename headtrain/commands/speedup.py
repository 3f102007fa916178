"""`headtrain speedup`: what speculation gains, from acceptance and costs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import RecipeError
from . import serving
from .common import out

if TYPE_CHECKING:
    from ..evaluate.roofline import Setup
    from ..evaluate.speedup import VerifyCost


def speedup(
    alpha: Annotated[
        str | None, typer.Option(help="acceptance: 0.8 for every depth, or 0.8,0.7,0.6 as measured by depth")
    ] = None,
    evaluation: Annotated[
        Path | None, typer.Option("--eval", help="take acceptance and costs from an eval.json")
    ] = None,
    route: Annotated[str, typer.Option(help="of the evaluation")] = "all",
    drafter: Annotated[
        str | None, typer.Option(help="of the evaluation: a part of its label; default: what `headtrain advise` takes")
    ] = None,
    k: Annotated[int | None, typer.Option(min=1, help="longest chain; default: as measured, or 8")] = None,
    hold_last: Annotated[
        bool, typer.Option("--hold-last", help="beyond the measured depths, hold the last alpha")
    ] = False,
    cost_ratio: Annotated[
        float | None, typer.Option(help="cost of one draft step / cost of one target step, for example 0.05")
    ] = None,
    verify_cost: Annotated[
        str | None, typer.Option(help="target forward of n tokens / of one, as measured: 4:1.1,8:1.4; default: 1")
    ] = None,
    target: serving.Target = None,
    parameters: serving.Parameters = None,
    device: serving.DeviceName = None,
    tflops: serving.Tflops = None,
    gbps: serving.Gbps = None,
    memory_gb: serving.MemoryGb = None,
    efficiency: serving.Efficiency = 1.0,
    gpus: serving.PerReplica = 1,
    context: serving.Context = 1024,
    weight_bytes: serving.WeightBytes = 2.0,
    kv_bytes: serving.KvBytes = 2.0,
    draft_parameters: Annotated[
        int | None,
        typer.Option(min=0, help="that a draft step reads, lm_head included; 0: a lookup; default: as evaluated, or 0"),
    ] = None,
    draft_layers: Annotated[int, typer.Option(min=0, help="of them with a KV cache like the target's")] = 1,
    parallel_draft: Annotated[
        bool, typer.Option("--parallel-draft", help="the drafter says all k tokens in one step")
    ] = False,
    tree_nodes: Annotated[int | None, typer.Option(min=1, help="a tree, beside the chains: its nodes")] = None,
    tree_depth: Annotated[int | None, typer.Option(min=1, help="its levels")] = None,
    tau: Annotated[float | None, typer.Option(help="its tokens a round, as measured")] = None,
    slo_ms: Annotated[float | None, typer.Option(help="longest mean time per output token, ms")] = None,
    users: Annotated[float | None, typer.Option(help="load: sequences being answered at the same time")] = None,
    requests_per_second: Annotated[float | None, typer.Option(help="load: with --output-tokens")] = None,
    output_tokens: Annotated[float | None, typer.Option(help="mean length of an answer")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
    to: Annotated[Path | None, typer.Option("--out", help="HTML file with the plots")] = None,
) -> None:
    """How much faster is speculation, with which k, and up to which batch size?

    A round drafts k tokens and verifies them in one forward of the target; it commits the accepted ones and one of the
    target's own. Speed-up = tokens a round / (k * cost ratio + cost of the verification). With --eval, speed-ups and
    their 95 % intervals are over its prompts, and which k to serve is what `headtrain advise` says for the same load.

    \b
    headtrain speedup --alpha 0.8 --cost-ratio 0.05
    headtrain speedup --eval runs/quickstart --route code
    headtrain speedup --alpha 0.75,0.65,0.6 --target recipes/llama-3.1-8b-eagle3.yaml --device h100
        --draft-parameters 350000000 --slo-ms 8 --users 500 --out speedup.html
    """
    from ..evaluate.advisor import Advisor
    from ..evaluate.candidates import says_all_at_once, with_drafter
    from ..evaluate.roofline import Draft, Model, Plan
    from ..evaluate.speedup import FLAT, LARGEST_K, VerifyCost, require
    from ..evaluate.speedup_report import report

    try:
        if k is not None:
            require(k, "--k", 1, high=LARGEST_K)
        where = serving.read_device(device, tflops, gbps, memory_gb, efficiency, gpus)
        sizes = serving.read_target(target, parameters, weight_bytes, kv_bytes)
        asked = setup = serving.read_setup(sizes, where, context)
        if setup is not None and draft_parameters:
            own = Model(draft_parameters, draft_layers, sizes.heads, sizes.kv_heads, sizes.head_dim, kv_bytes=kv_bytes)
            setup = replace(setup, draft=Draft(own, parallel_draft))
        given = None if verify_cost is None else VerifyCost.parse(verify_cost)
        taus, notes, advisor, case = [], [], None, None
        if evaluation is not None:
            cases = serving.read_cases(evaluation)
            serving.require_measured_on(cases, asked)
            advisor = Advisor(cases, route, drafter, cost_ratio, given, asked)
            case = serving.pick(advisor.among, route, serving.label_of(advisor))
            alphas, title = serving.alphas_of(case, route), f"{case.drafter['label']} on {route}"
            taus, notes = serving.taus_of(case, route), [serving.rounds_note(case, route)]
            parallel_draft = parallel_draft or says_all_at_once(case)
            if setup is not None and draft_parameters is None:
                setup = with_drafter(setup, case)
            book = advisor.book
            if k is None and book.reach < math.inf:  # what longer drafts would cost is not known
                alphas = alphas[: int(book.reach) - 1]
                taus = taus[: len(alphas)]
            costs = book.of(case, max(k or 0, len(alphas)) + 1)
            c, verify, source = costs.c, costs.verify, costs.source
            if setup is not None and cost_ratio is None and given is None:
                c, verify = None, FLAT
            if draft_parameters is not None or tree_nodes is not None:
                advisor = None
                notes.append("no interval and no advice: this asks about a draft that was not evaluated")
        elif alpha is not None:
            alphas, title = serving.parse_alphas(alpha, k), f"acceptance {alpha}"
            if setup is not None and draft_parameters is None:
                notes = [*notes, "drafting is taken as free: give --draft-parameters for the cost of a head"]
            c, verify, source = cost_ratio, given or FLAT, ""
            if given is not None and c is None:
                raise RecipeError("--verify-cost without the cost of a draft step: give --cost-ratio too")
        else:
            raise RecipeError("acceptance: give --alpha, or --eval with an eval.json")
        tree = None
        if any(value is not None for value in (tree_nodes, tree_depth, tau)):
            if tree_nodes is None or tree_depth is None or tau is None:
                raise RecipeError("a tree: give --tree-nodes, --tree-depth and the measured --tau")
            tree = Plan.tree(tau, tree_nodes, tree_depth)
        load = serving.read_load(slo_ms, users, requests_per_second, output_tokens)
        made = report(
            title, alphas, c, verify, k, hold_last, tree, setup, load, gpus,
            notes=[*notes, cost_note(c, verify, source, setup)], taus=taus, parallel=parallel_draft,
            advisor=advisor, case=case,
        )  # fmt: skip
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(f"speedup: {error}") from None
    if to is not None:
        to.write_text(made.html(), encoding="utf-8")
    if as_json:
        print(json.dumps(made.to_dict(), indent=2, allow_nan=False))
        return
    for table in made.tables():
        out.print(table)
    for line in [*made.lines(), *made.notes, *([str(to)] if to else [])]:
        out.print(line, markup=False)


def cost_note(c: float | None, verify: VerifyCost, source: str, setup: Setup | None) -> str:
    """Where the costs of the table over k are from. source: of an evaluation's."""
    if c is None:
        device = setup.device.name if setup else "no device"
        return (
            f"costs over k: a roofline of {device} at batch 1; prefill, scheduling and "
            "imperfect overlap of memory and arithmetic are left out, so large batches look better than they are"
        )
    if source:
        return f"costs over k, where they were not timed: {source}"
    what = "as given" if verify.measured else "taken to cost one plain step"
    return f"costs over k: a draft step {c:.3g} of a target step (given); a verification {what}"
