"""Which engines will load a head, said before it is trained: from the same code that would refuse its export."""

from __future__ import annotations

from ..heads.base import DraftHead
from .engines import ENGINES, NATIVE, ExportError, resolve


def refusals(head: DraftHead, kind: str) -> dict[str, str]:
    """{engine: "" where it loads this head, else why it does not}, the project's own form left out. The head may be on
    the meta device and without its target."""
    return {name: _refusal(head, kind, name) for name in ENGINES if name != NATIVE}


def _refusal(head: DraftHead, kind: str, engine: str) -> str:
    try:
        head.export_spec(resolve(engine, type(head), kind).dialect)
    except ExportError:
        return f"no version has a form for a head of kind {kind}"
    except ValueError as error:
        return str(error)
    except RuntimeError:  # the form carries a tensor of the target's, which is not attached: nothing was refused
        pass
    return ""


def lines(head: DraftHead, kind: str) -> list[str]:
    """For people: who loads it, and of each other one why not."""
    if not type(head).dialects:
        return [f"engines     no export of its own: {type(head).instead_of_export}"]
    found = refusals(head, kind)
    good = [name for name, why in found.items() if not why]
    reasons: dict[str, list[str]] = {}
    for name, why in found.items():
        if why:
            reasons.setdefault(why, []).append(name)
    return [
        f"engines     {', '.join(good) or 'none'} will load it as it is trained",
        *(f"            not {', '.join(names)}: {why}" for why, names in reasons.items()),
    ]
