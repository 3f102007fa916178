"""Several cases measured on the same prompts and the same target: what ``eval.json`` holds, and where it lies."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..metadata import write_json
from .results import DECODE, REPLAY, STORED, Evaluation, clean

FORMAT = 2
# A mode never overwrites what another took hours to find. In the order in which they are believed: replay is not timed,
# and stored rows may be somebody else's text.
FILES = {DECODE: "eval.json", REPLAY: "eval-replay.json", STORED: "eval-stored.json"}


def found_in(folder: Path) -> list[Path]:
    """The evaluations in a folder, the one to believe first."""
    return [path for name in FILES.values() if (path := folder / name).is_file()]


@dataclass(frozen=True)
class Simulated:
    """Of stored rows, measured as training measures held-out ones: simulated tau and alpha of a chain as deep as the
    head was built to train. own: the share of the answers' tokens that the target itself would say there, greedily."""

    tau: float
    alpha: list[float | None]
    own: float


@dataclass
class Sweep:
    """target: name, revision, dtype, weights, parameters, model_type. versions: of the software and the machine.
    cases: one for each drafter, draft shape and temperature; all have the same prompts. skipped: prompts that were left
    out since they are longer than the target's context: "id (tokens)". simulated: see there; None where rows were not
    stored."""

    target: dict[str, Any]
    versions: dict[str, Any]
    cases: list[Evaluation] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    simulated: Simulated | None = None

    @property
    def headline(self) -> Evaluation:
        """The case that says most about the head: the deepest chain of the first head at the lowest temperature, else
        the first case. Its acceptance goes into headtrain.json."""
        chains = [c for c in self.cases if c.drafter["family"] == "head" and not c.settings["tree"]]
        if not chains:
            return self.cases[0]
        first = [c for c in chains if c.drafter == chains[0].drafter]
        return max(first, key=lambda c: (-c.settings["temperature"], c.settings["k"]))

    def to_dict(self) -> dict[str, Any]:
        """JSON; NaN is null. ``acceptance`` is the headline's, as headtrain.json wants it, and ``acceptance_of`` the
        fingerprint of the head that it is of; a lookup's or a draft model's is nobody's."""
        head = self.headline.drafter.get("weights") if self.headline.drafter["family"] == "head" else None
        acceptance = self.headline.acceptance() if head else {}
        return clean(
            {
                "format": FORMAT,
                "target": self.target,
                "versions": self.versions,
                "acceptance_of": head,
                "acceptance": {name: r.model_dump(mode="json") for name, r in acceptance.items()},
                "skipped": self.skipped,
                "simulated": None if self.simulated is None else asdict(self.simulated),
                "cases": [case.to_dict() for case in self.cases],
            }
        )

    @classmethod
    def from_dict(cls, data: Any) -> Sweep:
        """Raises ValueError for another format or a damaged record."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"an evaluation of format {found!r}; this headtrain reads {FORMAT}")
        try:
            target, versions = data["target"], data["versions"]
            if not isinstance(target["name"], str) or not isinstance(versions, dict):
                raise TypeError("target.name or versions")
            target["dtype"]  # noqa: B018 (a KeyError where it is missing)
            cases = [Evaluation.from_dict(case, target, versions) for case in data["cases"]]
            skipped, simulated = data.get("skipped", []), data.get("simulated")  # older files have neither
            simulated = None if simulated is None else Simulated(**simulated)
        except (KeyError, TypeError) as error:
            raise ValueError(f"a damaged evaluation: {type(error).__name__}: {error}") from None
        if not cases:
            raise ValueError("an evaluation without a case")
        return cls(target, versions, cases, skipped, simulated)

    def write(self, path: Path) -> None:
        write_json(path, self.to_dict())

    @classmethod
    def read(cls, path: Path) -> Sweep:
        """Raises OSError, ValueError."""
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"not JSON ({error})") from None
