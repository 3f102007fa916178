"""`headtrain push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import err, out


def push(
    export: Annotated[Path, typer.Argument(help="a folder that `headtrain export` wrote")],
    repo: Annotated[str, typer.Argument(help="user/name on the Hub; made where there is none")],
    public: Annotated[bool, typer.Option("--public", help="everybody may read it; default: private")] = False,
    revision: Annotated[str | None, typer.Option(help="branch to push to, made where there is none")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="take away files of an earlier export that this one lacks")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list what would go, and send nothing")] = False,
) -> None:
    """Send an export to the Hub: its own files and nothing else, in one commit; private unless --public.

    The login is huggingface_hub's (`hf auth login`, or HF_TOKEN); HF_ENDPOINT names another Hub. Cut off, the same
    command goes on: what has arrived is not sent again.
    """
    from ..export.hub import plan_push, push_export

    plan = plan_push(export)
    for name, size in plan.files:
        out.print(f"{size:>14,}  {name}", markup=False)
    kind = "public" if public else "private"
    out.print(f"{plan.total:>14,}  bytes in {len(plan.files)} files for {repo} ({kind})", markup=False)
    if plan.left:
        out.print(f"stay here, no part of the export: {', '.join(plan.left)}", markup=False)
    if dry_run:
        out.print("--dry-run: nothing was sent", markup=False)
        return
    done = push_export(plan, repo, public=public, revision=revision, replace=replace)
    if done.removed:
        out.print(f"taken away there: {', '.join(done.removed)}", markup=False)
    if public and done.private:
        err.print(f"{repo} was there already and stays private: make it public on its page", markup=False)
    out.print(f"pushed to {done.url} at {done.commit}", markup=False)
    out.print(f"try it from anywhere:  headtrain check {repo} --target TARGET", markup=False)
