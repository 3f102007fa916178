"""Finished pieces of long work, a line each, so that an interrupted measurement goes on where it stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """A list that is also on disk. The first line names what is being measured; a journal of anything else, and a
    line that an interruption cut off, are dropped. It stays when the work is done: who has written the results removes
    it. path None: in memory only."""

    def __init__(self, path: Path | None, key: str) -> None:
        self.path, self.records = path, []
        if path is None:
            return
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
        if lines and _parsed(lines[0]) == {"key": key}:
            for line in lines[1:]:
                record = _parsed(line)
                if record is None:
                    break
                self.records.append(record)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(json.dumps(x) + "\n" for x in [{"key": key}, *self.records]), encoding="utf-8")
        os.replace(temporary, path)
        self.file = path.open("a", encoding="utf-8")

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> Any:
        return self.records[number]

    def append(self, record: Any) -> None:
        self.records.append(record)
        if self.path is not None:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
            os.fsync(self.file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.path is not None:
            self.file.close()


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
