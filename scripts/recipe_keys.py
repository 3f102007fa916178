"""The tables in recipes/README.md: all recipes, and all keys as the models that check recipes have them.

python scripts/recipe_keys.py
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headtrain.config import Recipe, load_recipe
from headtrain.heads.catalog import HEADS

README = Path(__file__).resolve().parent.parent / "recipes" / "README.md"
RECIPES = ("<!-- recipes: written by scripts/recipe_keys.py -->", "<!-- end of recipes -->")
KEYS = ("<!-- keys: written by scripts/recipe_keys.py -->", "<!-- end of keys -->")
NAMES = {int: "integer", float: "number", str: "text", bool: "true or false"}
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted name, model) of every section, nested ones after the one that they are in."""
    yield from _below("", Recipe)
    for kind, head in HEADS.items():
        yield f"head, kind: {kind}", head.Config


def _below(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    yield prefix, model
    for name, field in model.model_fields.items():
        for inner in _models(field.annotation):
            many = "[]" if "list" in str(field.annotation) else ""
            yield from _below(f"{prefix}.{name}{many}".lstrip("."), inner)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def describe(annotation: Any) -> str:
    """A type in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(parts[0])
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        named = [describe(part) for part in parts if part is not type(None)]
        return " or ".join(named + ["null"] * (type(None) in parts))
    if origin is list:
        return f"list of {describe(parts[0])}"
    if origin is tuple:
        return f"[{', '.join(map(describe, parts))}]"
    if origin is dict or annotation is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return NAMES[annotation]


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its defaults"
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else None
    return f"`{text or (list(value) if isinstance(value, tuple) else value)}`"


def limits(field: FieldInfo) -> str:
    found = []
    for item in field.metadata:
        found += [(word, getattr(item, key)) for key, word in LIMITS.items() if hasattr(item, key)]
    return "".join(f", {word} {value:g}" for word, value in found)


def table(model: type[BaseModel]) -> list[str]:
    lines = ["| key | value | default | |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        cells = (f"`{name}`", describe(field.annotation) + limits(field), default(field), field.description or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def recipes() -> str:
    """The table of recipes: the first sentence of a recipe's comment says what it is for."""
    lines = ["| recipe | target | head | for |", "|---|---|---|---|"]
    for path in sorted(README.parent.glob("*.yaml")):
        recipe, comment = load_recipe(path), []
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            comment.append(line.lstrip("# "))
        first = re.split(r"\.(?:\s|$)", " ".join(comment))[0]
        lines.append(f"| `{path.name}` | {recipe.target.path} | {recipe.head['kind']} | {first} |")
    return "\n".join(lines)


def keys() -> str:
    lines = []
    for name, model in sections():
        lines += ["", f"### `{name}`" if name else "### top level", "", *table(model)]
    return "\n".join([*lines, ""])


def rewritten(readme: str) -> str:
    """``readme`` with its tables as they should be. Raises ValueError where the markers are not there."""
    for (begin, end), text in ((RECIPES, recipes()), (KEYS, keys())):
        readme = f"{readme[: readme.index(begin)]}{begin}\n{text}\n{readme[readme.index(end) :]}"
    return readme


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{README}: {len(list(sections()))} sections\n")
