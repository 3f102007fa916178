"""Which engines will load a head, said before it is trained: from the same code that would refuse its export."""

from __future__ import annotations

from ..heads.base import DraftHead
from .engines import ENGINES, NATIVE, Engine, serves


def refusals(head: DraftHead) -> dict[str, str]:
    """{engine: "" where it loads this head, else why it does not}, the project's own form left out. The head may be on
    the meta device and without its target."""
    with head.device:  # what a form adds is made where the head is
        return {name: _refusal(head, engine) for name, engine in ENGINES.items() if name != NATIVE}


def _refusal(head: DraftHead, engine: Engine) -> str:
    if not serves(engine, type(head)):
        return f"no version has a form for a head of kind {head.config.kind}"
    try:
        head.export_spec(engine.dialect)
    except ValueError as error:
        return str(error)
    except RuntimeError:  # the form carries a tensor of the target's, which is not attached: nothing was refused
        pass
    return ""


def lines(head: DraftHead) -> list[str]:
    """For people: who loads it, and of each other one why not."""
    if head.instead_of_export:
        return [f"engines     no export of its own: {head.instead_of_export}"]
    good, reasons = [], {}
    for name, why in refusals(head).items():
        (reasons.setdefault(why, []) if why else good).append(name)
    return [
        f"engines     {', '.join(good) or 'none'} will load it as it is trained",
        *(f"            not {', '.join(names)}: {why}" for why, names in reasons.items()),
    ]
