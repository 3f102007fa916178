"""Where rows come from: JSONL, JSON and Parquet files, globs, folders, and Hub data sets.

JSON and JSONL are read by this module itself, because damage must be reported with its place: a line of a JSONL
file, a line and character of a JSON file. Parquet and the Hub go through ``datasets``.
"""

from __future__ import annotations

import difflib
import glob
import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from . import DataError
from .conversations import ROW_DROPPED, Conversation, RowError, from_row

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
_GAP = re.compile(r"[\s,]*")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Damage:
    """Something that cannot be read: where it is, and what is wrong."""

    place: str
    problem: str


@dataclass
class SourceReport:
    """What was read. files: for each file or data set, its rows and the conversations kept. damage: malformed lines
    and rows, in order. rules: how often each rule of ``conversations`` applied."""

    files: dict[str, list[int]] = field(default_factory=dict)
    damage: list[Damage] = field(default_factory=list)
    rules: Counter[str] = field(default_factory=Counter)
    limited: bool = False

    @property
    def rows(self) -> int:
        return sum(read for read, _ in self.files.values())

    @property
    def kept(self) -> int:
        return sum(kept for _, kept in self.files.values())

    def dropped(self) -> Counter[str]:
        """Rows that were read and gave no conversation, by reason."""
        rules = {rule.removesuffix(ROW_DROPPED): n for rule, n in self.rules.items() if rule.endswith(ROW_DROPPED)}
        return Counter(rules | ({"damaged": len(self.damage)} if self.damage else {}))

    def lines(self, shown: int = 5) -> list[str]:
        """A short table for people: one line a file, rule and damage (the first ``shown`` of them)."""
        out = []
        names = list(self.files)
        many = len(names) > 2 * shown
        width = max((len(name) for name in names), default=0)
        for name in names[:shown] if many else names:
            read, kept = self.files[name]
            out.append(f"{name:<{width}}  {read:>7} rows  {kept:>7} conversations")
        if many:
            out.append(f"... and {len(names) - shown} more files")
        if len(names) != 1:
            out.append(f"{'total':<{width}}  {self.rows:>7} rows  {self.kept:>7} conversations")
        if self.limited:
            out.append("stopped at data.limit")
        out += [f"{count:>7} x {rule}" for rule, count in sorted(self.rules.items())]
        if self.damage:
            out.append(f"{len(self.damage):>7} x damaged")
            out += [f"          {d.place}: {d.problem}" for d in self.damage[:shown]]
            if len(self.damage) > shown:
                out.append(f"          ... and {len(self.damage) - shown} more")
        return out


def read_conversations(
    specs: list[str],
    *,
    bad_lines: Literal["stop", "skip"] | None = None,
    limit: int | None = None,
    system: str | None = None,
) -> tuple[list[Conversation], SourceReport]:
    """Read every row of ``specs``: files, globs, folders (searched below), or ``hub:NAME[:SPLIT]``.

    bad_lines: a recipe's data.bad_lines; None where no recipe is read, which stops too and names none of its keys. A
    malformed line or row raises DataError with its place ("stop") or is counted and passed over ("skip"); after damage
    inside a JSON file the rest of that file is lost, the whole rows before it are used.
    limit: stop after so many conversations. system: put before conversations without a system message. Raises
    DataError also for a missing or empty file and when no conversation is left.
    """
    report = SourceReport()
    found: list[Conversation] = []
    sources = [source for spec in specs for source in _expand(spec)]
    if not sources:
        how = "name a file, a folder or hub:NAME" if bad_lines is None else "give data.train=[FILE, ...]"
        raise DataError(f"no data: the list of files is empty; {how}")
    for name, path in dict(sources).items():
        if limit is not None and len(found) >= limit:
            report.limited = True
            break
        count = report.files[name] = [0, 0]
        arrow = path is None or path.suffix == ".parquet"
        for item in _items(name, path, stream=limit is not None):
            if not isinstance(item, Damage):
                place, row = item
                count[0] += 1
                try:
                    conversation = from_row(row, place, rules=report.rules, system=system, arrow=arrow)
                except RowError as error:
                    item = Damage(place, str(error))
                else:
                    if conversation is not None:
                        count[1] += 1
                        found.append(conversation)
            if isinstance(item, Damage):
                if bad_lines != "skip":
                    how = "take it out" if bad_lines is None else "set data.bad_lines=skip to go on without it"
                    raise DataError(f"{item.place}: {item.problem}. Repair it, or {how}")
                report.damage.append(item)
            if limit is not None and len(found) >= limit:
                report.limited = True
                break
        if count[0] == 0 and not any(d.place.startswith(name) for d in report.damage):
            raise DataError(f"{name} has no rows")
    if not found:
        raise DataError("no conversation could be read:\n  " + "\n  ".join(report.lines()))
    return found, report


def _expand(spec: str) -> list[tuple[str, Path | None]]:
    """(name, path) of each source behind one spec; the path is None for the Hub."""
    if spec.startswith("hub:"):
        if not spec.removeprefix("hub:"):
            raise DataError("`hub:` without a name; expected hub:NAME or hub:NAME:SPLIT")
        return [(spec, None)]
    path = Path(spec)
    if path.is_file():
        if not spec.endswith(SUFFIXES):
            raise DataError(f"{spec}: unknown kind of file; expected one of {', '.join(SUFFIXES)}")
        return [(spec, path)]
    if path.is_dir():
        inside = files_below(path)
        if not inside:
            raise DataError(f"the folder {spec} holds no file with one of {', '.join(SUFFIXES)}")
        return [(str(p), p) for p in inside]
    if glob.has_magic(spec):
        _require_readable(spec)
        matches = [p for p in sorted(glob.glob(spec, recursive=True)) if p.endswith(SUFFIXES) and _is_file(Path(p))]
        if not matches:
            raise DataError(f"the pattern {spec} matches no file with one of {', '.join(SUFFIXES)}")
        return [(p, Path(p)) for p in matches]
    folder = path.parent
    if not folder.is_dir():
        raise DataError(f"no file {spec}: the folder {folder} does not exist (a Hub data set is written hub:NAME)")
    names = [p.name for p in folder.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {folder / near[0]}?" if near else f"; the folder {folder} has {len(names)} other entries"
    raise DataError(f"no file {spec}{hint}")


def files_below(folder: Path, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """In all its subfolders. Raises DataError for one that cannot be read: pathlib's and glob's own searches pass over
    it, and a training would lack its rows without a word."""
    walk = os.walk(folder, onerror=_unreadable)
    return sorted(
        Path(at) / name
        for at, _, names in walk
        for name in names
        if name.endswith(suffixes) and _is_file(Path(at) / name)
    )


def _require_readable(pattern: str) -> None:
    """Raises DataError for a folder that ``pattern`` would have to look into and that cannot be read."""
    parts = Path(pattern).parts
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    for count in range(first, len(parts)):
        above = str(Path(*parts[:count]))
        for folder in glob.glob(above, recursive=True) if glob.has_magic(above) else [above]:
            if parts[count] == "**":
                for _ in os.walk(folder, onerror=_unreadable):
                    pass
            elif Path(folder).is_dir():
                try:
                    os.scandir(folder).close()
                except OSError as error:
                    _unreadable(error)


def _unreadable(error: OSError) -> None:
    raise DataError(
        f"the folder {error.filename} cannot be read ({error.strerror}), and the data may lie in it: grant access to "
        "it, or name the files that are meant"
    ) from None


def _is_file(path: Path) -> bool:
    if path.is_symlink() and not path.exists():
        raise DataError(f"{path} is a link to {os.readlink(path)}, which is not there: repair or remove it")
    return path.is_file()


def _items(name: str, path: Path | None, stream: bool) -> Iterator[Damage | tuple[str, Any]]:
    """(place, row) of each row of one source, and Damage where there is some."""
    if path is None:
        yield from _hub(name, stream)
        return
    if path.stat().st_size == 0:
        raise DataError(f"{name} is empty (0 bytes)")
    if path.suffix == ".parquet":
        yield from _parquet(name, path)
    elif ".jsonl" in path.suffixes[-2:]:
        yield from _jsonl(name, path)
    else:
        yield from _json(name, path)


def _jsonl(name: str, path: Path) -> Iterator[Damage | tuple[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    with opener(path, "rb") as file:
        try:
            for number, raw in enumerate(file, 1):  # noqa: B007 (the number is read after the loop, too)
                place = f"{name}:{number}"
                if not raw.strip():
                    continue
                try:
                    yield place, json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
                except json.JSONDecodeError as error:
                    cut = "" if raw.endswith(b"\n") else "; the last line has no end: the file may be cut off"
                    yield Damage(place, f"not valid JSON: {error.msg} at character {error.pos + 1}{cut}")
                except UnicodeDecodeError as error:
                    yield Damage(place, f"not valid UTF-8 at byte {error.start + 1}")
                except RecursionError:
                    yield Damage(place, "nested too deep")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            yield Damage(f"{name}:{number + 1}", f"the compressed file is damaged: {error}")


def _json(name: str, path: Path) -> Iterator[Damage | tuple[str, Any]]:
    """An array of rows, one row, or rows one after the other; decoded one by one, so that everything before damage
    is used."""
    cut: Damage | None = None
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield Damage(name, f"the compressed file is damaged: {error}")
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        text = data[: error.start].decode("utf-8-sig")
        cut = Damage(f"{name}:{text.count(chr(10)) + 1}", f"not valid UTF-8 at byte {error.start + 1} of the file")
    del data
    decoder = json.JSONDecoder()
    at = _SPACE.match(text).end()
    array = text.startswith("[", at)
    at = _GAP.match(text, at + array).end()
    line, counted, number = 1, 0, 0
    while at < len(text) and not (array and text[at] == "]"):
        line, counted = line + text.count("\n", counted, at), at
        try:
            row, end = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError) as error:
            where, problem = (error.pos, error.msg) if isinstance(error, json.JSONDecodeError) else (at, "too deep")
            error_line = line + text.count("\n", at, where)
            yield cut or Damage(
                f"{name}:{error_line}",
                f"not valid JSON: {problem}, at character {where + 1} of the file, inside row {number + 1} which "
                f"starts at line {line}; the {number} whole rows before it can be used, nothing after it",
            )
            return
        number += 1
        yield f"{name}[{number - 1}]", row
        at = _GAP.match(text, end).end()
    if cut is not None:
        yield cut
    elif array and at >= len(text):
        yield Damage(f"{name}:{text.count(chr(10)) + 1}", "the array is not closed: the file may be cut off")


def _parquet(name: str, path: Path) -> Iterator[Damage | tuple[str, Any]]:
    import datasets  # heavy; only these two forms need it
    import pyarrow

    try:
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        for number, row in enumerate(rows):
            yield f"{name}[{number}]", row
    except (pyarrow.ArrowException, datasets.exceptions.DatasetGenerationError, OSError) as error:
        yield Damage(name, f"not a readable Parquet file: {error}")


def _hub(spec: str, stream: bool) -> Iterator[Damage | tuple[str, Any]]:
    import datasets

    name, _, split = spec.removeprefix("hub:").partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train", streaming=stream)
    except Exception as error:  # the libraries below raise many kinds; each means that the set cannot be had
        raise DataError(
            f"{spec}: the data set {name!r}, split {split or 'train'!r}, cannot be loaded: "
            f"{type(error).__name__}: {error}. Check the name, the split and the network, or give a file"
        ) from error
    for number, row in enumerate(rows):
        yield f"{spec}[{number}]", row
