"""``headtrain eval --server URL``: measure a running server, and set it beside a stored or a second one."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..evaluate.client import ServerError, printable
from ..evaluate.goodput import ALL, ServerRun, Slo, compare, differences, summaries
from ..evaluate.prometheus import Acceptance
from ..evaluate.server import Load, load_chats, measure


def run_server(
    url: str,
    prompts: list[str],
    folder: Path,
    console: Console,
    *,
    load: Load = Load(),  # noqa: B008 (frozen)
    slo: Slo = Slo(),  # noqa: B008 (frozen)
    model: str | None = None,
    api_key_env: str | None = None,
    limit_per_route: int | None = None,
    baseline: str | None = None,
    quiet: bool = False,
) -> list[ServerRun]:
    """Measure, write ``folder/server.json`` after every level, print the tables. Returns the runs that were measured
    here: that of a second server, where one is the baseline, and last that of ``url``.

    prompts: files or folders. api_key_env: the name of the environment variable that holds the key. baseline: an
    earlier server.json, or the address of a second server, which is measured first and stored as baseline.json; it
    must have had the same load. After Ctrl-C what was measured is written and shown, and the last run that is returned
    has ``interrupted`` set. Raises ServerError (also where no request was answered, after that was written and shown),
    DataError.
    """
    key = api_key(api_key_env)
    chats = load_chats(prompts, limit_per_route)
    other = None
    if baseline is not None and not baseline.startswith(("http://", "https://")):
        other = read_run(Path(baseline))
        other.require_answers()
        if lines := differences(load.settings(chats), other.settings):  # before minutes of load, not after
            raise ServerError(f"{baseline} had another load:\n  " + "\n  ".join(lines))
    folder.mkdir(parents=True, exist_ok=True)

    def measured(address: str, name: str) -> ServerRun:
        run = measure(address, chats, load, model=model, key=key, file=folder / name, quiet=quiet)
        console.print(plain(title(run)))
        console.print(table(run, slo))
        for line in [*remarks(run), str(folder / name), ""]:
            console.print(plain(line))
        if not run.interrupted:
            run.require_answers()
        return run

    runs = []
    if baseline is not None and other is None:
        other = measured(baseline, "baseline.json")
        runs.append(other)
        if other.interrupted:
            return runs
    run = measured(url, "server.json")
    runs.append(run)
    if other is not None:
        console.print(comparison_table(run, other, slo))
        for line in comparison_remarks(run, other):
            console.print(plain(line))
    return runs


def plain(text: str) -> Text:
    """Routes, ids and whatever a server tells may hold [brackets], :emoji: and control characters: none of them may be
    read as rich's markup or by the terminal."""
    return Text(printable(text))


def api_key(variable: str | None) -> str | None:
    """The key that the environment variable holds. Raises ServerError where it is unset or can be no header."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ServerError(f"--api-key-env {variable}: this environment variable is not set")
    if not (key.isascii() and key.isprintable()):
        raise ServerError(f"--api-key-env {variable}: the key has characters that an HTTP header cannot carry")
    return key


def read_run(path: Path) -> ServerRun:
    if not path.is_file():
        raise ServerError(f"no baseline {path}; expected a server.json of an earlier run, or an address http://...")
    try:
        return ServerRun.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ServerError(f"{path}: {error}") from None


def title(run: ServerRun) -> str:
    server, settings = run.server, run.settings
    version = f", version {server['version']}" if "version" in server else ""
    how = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    if settings["temperature"]:
        how += "".join(
            f", {name} {settings[name]}" for name, none in (("top_p", 1), ("top_k", 0)) if settings[name] != none
        )
    state = " (interrupted)" if run.interrupted else ""
    return (
        f"{server.get('model', '?')} at {server['url']}{version}; {how}, at most {settings['max_tokens']} tokens{state}"
    )


def table(run: ServerRun, slo: Slo) -> Table:
    """A row for each concurrency and route. Times in ms as median/p90/p99."""
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left", caption_style="dim")
    out.caption = "ms: median/p90/p99 over requests; TPOT: time per output token after the first; good: met the SLO"
    for name in ("conc", "route", "n", "fail", "TTFT ms", "TPOT ms", "tok/s", "good/s", "good"):
        out.add_column(name, justify="left" if name == "route" else "right", no_wrap=True)
    for s in summaries(run, slo):
        cells = [str(s.concurrency), s.route, str(s.requests), str(sum(s.failures.values()) or "-")]
        cells += [_times(s.ttft), _times(s.tpot), _number(s.tokens_per_second, ".1f")]
        cells += [_number(s.requests_per_second, ".2f"), _number(s.share, ".0%")]
        out.add_row(*map(plain, cells), style="bold" if s.route == ALL else "")
        if s.route == ALL:
            out.add_section()
    return out


def remarks(run: ServerRun) -> list[str]:
    """Acceptance, failures, and what went otherwise than asked, by concurrency."""
    lines = []
    for level, summary in zip(run.levels, (s for s in summaries(run, Slo()) if s.route == ALL), strict=True):
        at = f"concurrency {level.concurrency}:"
        lines.append(f"{at} {acceptance_line(level.acceptance)}")
        lines += [f"{at} {note}" for note in level.acceptance.notes]
        for kind, count in summary.failures.items():
            detail = next(r.detail for r in level.records if r.failure == kind)
            lines.append(f"{at} {count} failed, {kind}: {detail}")
        if level.complete and level.peak < level.concurrency:
            lines.append(f"{at} only {level.peak} requests were under way at once: give more requests")
        if not level.complete:
            lines.append(f"{at} interrupted after {len(level.records)} requests")
    if run.failed:
        first = run.failed[0]
        lines.append(
            f"{len(run.failed)} of {run.requests} requests failed, the first {first.prompt} with {first.failure}; the "
            "times are of those that were answered"
        )
    if len(run.levels) > 1:
        lines.append("prompts come again at each concurrency: TTFT is that of cached prompts if the server caches them")
    return lines


def acceptance_line(a: Acceptance) -> str:
    if a.state == "off":
        return "the server does not speculate"
    gauge = "".join(f", {name} {value:.2f} by the server's gauge" for name, value in a.gauge.items())
    if a.state == "unknown":
        return f"acceptance unknown{gauge}"
    if not a.drafts:
        return "no drafts"
    alpha = " ".join(f"{now / offered:.2f}" if offered else "-" for now, offered in a.alpha)
    every = "" if a.tau_all != a.tau_all else f", {a.tau_all:.2f} over every step, with or without a draft"
    return f"tau {a.tau:.2f} (1 + {a.accepted}/{a.drafts}){every}" + (f", alpha {alpha}" if alpha else "") + gauge


def comparison_table(run: ServerRun, baseline: ServerRun, slo: Slo) -> Table:
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left", caption_style="dim")
    out.caption = "against the baseline; TPOT: by medians, above 1 is faster; equal: texts, of those both answered"
    for name in ("conc", "route", "TPOT", "tok/s", "goodput", "good/s", "equal"):
        out.add_column(name, justify="left" if name == "route" else "right", no_wrap=True)
    for c in compare(run, baseline, slo):
        cells = [str(c.concurrency), c.route, *[_number(x, ".2f", "x") for x in (c.tpot, c.tokens, c.goodput)]]
        cells.append("-" if c.goodputs is None else "{:.2f} -> {:.2f}".format(*c.goodputs))
        cells.append("-" if c.identical is None else f"{c.identical}/{c.compared}")
        out.add_row(*map(plain, cells), style="bold" if c.route == ALL else "")
        if c.route == ALL:
            out.add_section()
    return out


def comparison_remarks(run: ServerRun, baseline: ServerRun) -> list[str]:
    lines = []
    for name in ("model", "version"):
        mine, theirs = run.server.get(name), baseline.server.get(name)
        if mine != theirs:
            lines.append(f"{name}: {mine} here, {theirs} in the baseline")
    both = {x.concurrency for x in run.levels if x.complete} & {x.concurrency for x in baseline.levels if x.complete}
    if missing := [c for c in run.settings["concurrency"] if c not in both]:
        lines.append(f"not compared, since one of the runs was interrupted: concurrency {', '.join(map(str, missing))}")
    if any(level.acceptance.state == "measured" for level in baseline.levels):
        lines.append("the baseline speculated, too")
    if run.settings["temperature"] == 0:
        lines.append("greedy texts can part without a fault where rounding decides a tie (16-bit types, other batches)")
    return lines


def _times(seconds: tuple[float, ...]) -> str:
    return "/".join(_number(s * 1000, ".0f" if s >= 0.1 else ".1f") for s in seconds)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None or value != value else f"{value:{form}}{unit}"
