"""Imports point downward, heads are named nowhere else, and importing the package stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from headtrain.heads.catalog import HEADS

ROOT = Path(__file__).resolve().parent.parent / "headtrain"
# a module may import its own layer and lower ones; in a layer of packages, only itself
LAYERS = [
    {"types", "config", "metadata"},
    {"few_rows", "losses", "divergences", "layers", "attention", "vocab", "teacher", "shift"},
    {"heads", "target", "data"},
    {"capture", "estimate", "export", "decode"},
    {"train", "evaluate"},
    {"scale"},
    {"cli", "commands"},
]
APART = {"heads", "target", "data"}  # of one layer, but they do not know each other
TENSORS_NAMED_SO = {"target": {"mtp"}}  # a head's kind that is also what targets' checkpoints call some tensors
HEADS_MAY_NOT = {"accelerate", "deepspeed", "peft"}


def parts(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Top-level parts of headtrain, and foreign packages, that the file imports anywhere."""
    found = set()
    package = ["headtrain", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [stem] if node.module else [f"{stem}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top = name.split(".")
            found.add(top[1] if top[0] == "headtrain" and len(top) > 1 else top[0])
    return found


def test_imports_point_downward():
    level = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    bad = []
    for path in ROOT.rglob("*.py"):
        own = parts(path)
        if own == "__init__":
            continue
        assert own in level, f"{own}: place it in a layer of this test"
        for other in imports(path) & level.keys() - {own}:
            apart = own in APART and other in APART
            if level[other] > level[own] or apart:
                bad.append(f"{path.relative_to(ROOT)} imports {other}")
    assert not bad, bad


def test_only_the_backend_imports_accelerate_and_heads_import_no_trainer():
    for path in ROOT.rglob("*.py"):
        found = imports(path)
        if "accelerate" in found:
            assert path.name in ("backend.py", "launched.py"), path
        if "deepspeed" in found:
            assert path.name == "zero.py", path
        if parts(path) == "heads":
            assert not found & HEADS_MAY_NOT, path


def test_no_head_is_named_outside_heads():
    """In code: comments and docstrings may say where an idea is from."""
    for path in ROOT.rglob("*.py"):
        if parts(path) == "heads":
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""  # a docstring
        code = ast.unparse(tree).lower()
        for kind in HEADS.keys() - TENSORS_NAMED_SO.get(parts(path), set()):
            assert kind not in code, f"{path.relative_to(ROOT)} names {kind}"


def test_no_module_is_longer_than_400_lines():
    long = {str(p.relative_to(ROOT)): n for p in ROOT.rglob("*.py") if (n := len(p.read_text().splitlines())) > 410}
    assert not long


def test_importing_headtrain_is_light():
    code = "import headtrain, sys; print([m for m in ('torch','transformers','deepspeed','wandb') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
