"""The Hub: an export goes up as one commit of exactly its own files, and comes down by the same list.

Everything goes through ``huggingface_hub``: where the Hub is (``HF_ENDPOINT``), the login, and the storage of large
files are its own. Failures of the network are retried; what was uploaded before is not sent again, because the storage
knows it by its hash. Nothing of a repository is ever executed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from ..heads.forms import INDEX, WEIGHT_FILES
from ..heads.io import FILE as HEAD_FILE
from ..metadata import FILE as METADATA_FILE
from ..metadata import Metadata, file_sha256
from ..target.adapter import CONFIG_FILE, WEIGHTS_FILE
from ..target.adapter import FOLDER as ADAPTER
from .card import FILE as CARD
from .engines import ExportError
from .files import CONFIG
from .folder import verify_folder
from .probe import FILE as PROBE_FILE

HERE = "THIS_FOLDER"  # how a card calls its own folder; on the Hub that is the repository
DOCUMENTS = (CARD, "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE")
_SHARDS = tuple(f"{Path(n).stem}-?????-of-?????.safetensors" for n in WEIGHT_FILES if n.endswith(".safetensors"))
# The only files that go up or come down. Whatever else lies beside them (optimizer state, logs, code) stays.
PARTS = (
    METADATA_FILE, CONFIG, HEAD_FILE, PROBE_FILE, INDEX, *WEIGHT_FILES, *_SHARDS,
    f"{ADAPTER}/{CONFIG_FILE}", f"{ADAPTER}/{WEIGHTS_FILE}",
)  # fmt: skip
ALLOWED = (*PARTS, *DOCUMENTS)
TARGET_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")

WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before each new attempt
TRANSIENT = {408, 429, 500, 502, 503, 504}
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SECRETS = re.compile(r"\b(hf_|api_org_)\w{8,}|(?<=Bearer )[^\s;,]+|(?<=://)[^/\s@]+@|(?<=\?)\S*X-\w+-\S*")
T = TypeVar("T")


class HubError(ExportError):
    """What the Hub refused, or could not be asked: one line, with what to do, and never with a token."""


@dataclass(frozen=True)
class PushPlan:
    """files: (path inside the export, bytes), sorted; left: paths that lie in the folder and stay there."""

    folder: Path
    files: tuple[tuple[str, int], ...]
    left: tuple[str, ...]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.files)


@dataclass(frozen=True)
class Pushed:
    """commit: its id on the Hub; private: as the repository is now; removed: files of an earlier export."""

    url: str
    commit: str
    private: bool
    removed: tuple[str, ...]


def is_hub_id(text: str | os.PathLike[str]) -> bool:
    """``user/name``, and nothing of that name lies here."""
    return bool(_ID.fullmatch(str(text))) and not os.path.exists(text)


def plan_push(folder: str | Path) -> PushPlan:
    """What a push of ``folder`` would send. Nothing is sent, and no network is needed.

    The export must be whole and unchanged, and its card must be one that ``huggingface_hub`` reads and writes again
    without loss. Raises ExportError, MetadataError.
    """
    folder = Path(folder)
    metadata = Metadata.read(folder)
    if metadata.export is None:
        raise ExportError(f"{folder} is a checkpoint: `headtrain export` it, and push what that writes")
    verify_folder(folder)
    recorded = metadata.export.files
    if foreign := sorted(name for name in recorded if not _matches(name, ALLOWED)):
        raise ExportError(f"{folder / METADATA_FILE} lists files that no export has, and they are not sent: {foreign}")
    if changed := sorted(n for n, sha in recorded.items() if file_sha256(folder / n) != sha):
        raise ExportError(f"{folder}: changed since the export: {', '.join(changed)}; export it again")
    check_card(folder / CARD)
    found = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    goes = {*recorded, METADATA_FILE, *(n for n in DOCUMENTS if n in found)}
    files = tuple(sorted((name, size) for name, size in found.items() if name in goes))
    return PushPlan(folder, files, tuple(sorted(found.keys() - goes)))


def check_card(path: Path) -> None:
    """Whether ``huggingface_hub`` reads the card's front matter and writes the same again. Raises ExportError."""
    from huggingface_hub import ModelCard, ModelCardData

    if not path.is_file():
        raise ExportError(f"{path.parent} has no {path.name}: export it again, the card is written with it")
    try:
        data = ModelCard(path.read_text(encoding="utf-8")).data.to_dict()
        again = ModelCardData(**data).to_dict()
    except Exception as error:  # of YAML, of types: each with an error of its own kind
        raise ExportError(f"{path}: its front matter is no model card's metadata: {_first_line(error)}") from None
    if not data or data != again:
        raise ExportError(f"{path}: its front matter is not kept by huggingface_hub: {data or 'there is none'}")


def push_export(
    plan: PushPlan, repo: str, *, public: bool = False, revision: str | None = None, replace: bool = False
) -> Pushed:
    """Send ``plan``'s files to the model repository ``repo``, as one commit: all of them or none.

    The repository is made where there is none, private unless ``public``; one that is public already is not used
    without ``public``. revision: a branch, made where there is none. replace: take away an earlier export's files that
    this one lacks (an engine would read them). A push that was cut off is repeated: what has arrived is not sent again.
    Raises HubError.
    """
    if not _ID.fullmatch(repo):
        raise HubError(f"{repo!r} is no repository: expected user/name or organisation/name")
    hub = _Hub(repo)
    if hub.token is None:
        raise HubError("not logged in to the Hub: `hf auth login` with a token that may write")
    with hub.speaking():
        hub.ask("making the repository", lambda api: api.create_repo(repo, private=not public, exist_ok=True))
        private = hub.ask("reading the repository", lambda api: api.repo_info(repo)).private
        if not private and not public:
            raise HubError(f"{repo} is public already, and pushing is private by default: --public to push there")
        if revision is not None and not revision.startswith("refs/"):
            hub.ask("making the branch", lambda api: api.create_branch(repo, branch=revision, exist_ok=True))
        stale = hub.ask("listing the repository", lambda api: _stale(api, plan, repo, revision))
        if stale and not replace:
            raise HubError(
                f"{repo} holds files of another export that an engine would read beside this one: {', '.join(stale)}; "
                "--replace takes them away in the same commit, --revision NAME keeps both"
            )
        commit = hub.ask("uploading", lambda api: _commit(api, plan, repo, revision))
    return Pushed(f"{hub.api.endpoint}/{repo}", commit.oid, bool(private), tuple(stale))


def download_export(repo: str, revision: str | None = None) -> Path:
    """An export's files from the Hub, in its own cache: only those of the allow-list, as data. Raises HubError."""
    hub = _Hub(repo)
    with hub.speaking():
        folder = hub.ask(
            "no such folder here, downloading it",
            lambda api: api.snapshot_download(repo, revision=revision, allow_patterns=list(ALLOWED)),
        )
    return Path(folder)


def download_target(repo: str, revision: str | None = None) -> Path | None:
    """A target's config, tokenizer and safetensors from the Hub, never code; None where it has no safetensors."""
    hub = _Hub(repo)
    with hub.speaking():
        folder = hub.ask(
            "no such folder here, downloading it",
            lambda api: api.snapshot_download(
                repo, revision=revision, allow_patterns=list(TARGET_FILES), ignore_patterns=["*/*"]
            ),
        )
    return Path(folder) if any(Path(folder).glob("*.safetensors")) else None


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, p) for p in patterns) and ".." not in Path(name).parts


def _stale(api: Any, plan: PushPlan, repo: str, revision: str | None) -> list[str]:
    """What an export consists of and ``plan`` does not have, on the branch that is pushed to."""
    mine = dict(plan.files)
    return sorted(n for n in api.list_repo_files(repo, revision=revision) if _matches(n, PARTS) and n not in mine)


def _commit(api: Any, plan: PushPlan, repo: str, revision: str | None) -> Any:
    """Everything anew at each attempt: the client then asks what has arrived, and sends the rest only."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    operations: list[Any] = [CommitOperationDelete(path_in_repo=n) for n in _stale(api, plan, repo, revision)]
    for name, _ in plan.files:
        path = plan.folder / name
        content = path.read_text(encoding="utf-8").replace(HERE, repo).encode() if name == CARD else str(path)
        operations.append(CommitOperationAdd(path_in_repo=name, path_or_fileobj=content))
    message = "Draft head exported by headtrain"
    return api.create_commit(repo, operations, commit_message=message, revision=revision)


class _Hub:
    """The client for one repository, its retries, and its errors in words."""

    def __init__(self, repo: str) -> None:
        from huggingface_hub import HfApi, get_token

        self.repo = repo
        self.token = get_token()
        self.api = HfApi(token=self.token, library_name="headtrain")

    def ask(self, doing: str, call: Callable[[Any], T]) -> T:
        """``call(api)``, again after failures of the network or the server. Raises HubError."""
        for wait in (*WAITS, None):
            try:
                return call(self.api)
            except Exception as error:  # the client's, httpx2's, hf_xet's, the operating system's
                reason, again = self._explain(error)
            # outside the except block: the error holds the request and its headers, and must not be chained
            if wait is None or not again:
                raise HubError(self.clean(f"{self.repo}: {doing}: {reason}"))
            warnings.warn(self.clean(f"{doing}: {reason}; again in {wait:g} s"), stacklevel=3)
            time.sleep(wait)
        raise AssertionError("unreachable")

    def _explain(self, error: BaseException) -> tuple[str, bool]:
        """In words, and whether another attempt may help."""
        chain = list(_chain(error))
        for e in chain:
            status = getattr(getattr(e, "response", None), "status_code", None)
            if status is not None and status >= 400:
                return self._refusal(status, e), status in TRANSIENT
        from huggingface_hub.errors import OfflineModeIsEnabled

        if any(isinstance(e, OfflineModeIsEnabled) for e in chain):
            return "HF_HUB_OFFLINE is set: the Hub is not asked", False
        for e in chain:
            if isinstance(e, httpx2.TransportError | ConnectionError | TimeoutError):
                return f"no answer from {self.api.endpoint} ({type(e).__name__}: {_first_line(e)})", True
        if any(isinstance(e, json.JSONDecodeError) for e in chain):
            return f"{self.api.endpoint} answered with something else than JSON (a proxy's page?)", True
        # hf_xet raises RuntimeError for a connection that it gave up
        again = any(isinstance(e, RuntimeError) for e in chain)
        return " ".join(str(error).split()) or type(error).__name__, again

    def _refusal(self, status: int, error: BaseException) -> str:
        said = " ".join(str(getattr(error, "server_message", None) or "").split())
        owner = self.repo.split("/")[0]
        text = {
            401: "the Hub does not know this login (401): `hf auth login`, and check the name of the repository",
            403: f"no permission (403): the token needs write access to {owner} to push, read access to download",
            404: "not found (404): check the name and the revision; what is private needs a login that may read it",
            400: "the Hub refuses the request (400)",
        }.get(status, f"the Hub answered {status}")
        return f"{text}; it says: {said}" if said else text

    def clean(self, text: str) -> str:
        """Without the login, whoever quoted it, and without the signed part of an upload's address."""
        text = text.replace(self.token, "***") if self.token else text
        return _SECRETS.sub("***", text)

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """The client logs its own retries with the addresses that it asked; they pass through ``clean``. Progress is
        drawn on a terminal only: in a log, a bar is a hundred lines."""
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

        hide = not sys.stderr.isatty() and not are_progress_bars_disabled()

        def clean(record: logging.LogRecord) -> bool:
            record.msg, record.args = self.clean(record.getMessage()), ()
            return True

        handlers = list(logging.getLogger("huggingface_hub").handlers)
        for handler in handlers:
            handler.addFilter(clean)
        if hide:
            disable_progress_bars()
        try:
            yield
        finally:
            if hide:
                enable_progress_bars()
            for handler in handlers:
                handler.removeFilter(clean)


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
