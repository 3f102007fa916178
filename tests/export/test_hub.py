"""The real client of huggingface_hub against a small Hub on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time

import export_cases as cases
import hub_server
import pytest
from huggingface_hub import ModelCard, constants

from headtrain.config import TargetSection
from headtrain.export.check import check
from headtrain.export.core import export_head
from headtrain.export.engines import ExportError
from headtrain.export.hub import HubError, download_export, is_hub_id, plan_push, push_export
from headtrain.metadata import Metadata
from headtrain.target.load import identify_section

TOKEN = "hf_" + "NeverToBeSeenAnywhere0123456789"
REPO = "me/head"


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_folder):
    folder = tmp_path_factory.mktemp("push")
    checkpoint = cases.checkpoint(folder / "c", "eagle3", identify_section(TargetSection(path=str(tiny_folder))))
    return export_head(checkpoint, "vllm", folder / "export", license="apache-2.0")


@pytest.fixture
def export(made, tmp_path):
    return shutil.copytree(made, tmp_path / "export")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that the client talks to; without Xet (its storage needs a server of its own), without waiting."""
    with hub_server.running() as (server, url):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        server.waits = []
        monkeypatch.setattr(time, "sleep", server.waits.append)
        yield server


def names(plan):
    return [name for name, _ in plan.files]


def content(hub, branch="main", repo=REPO):
    return hub.repos[repo]["branches"][branch]


EXPORTED = ["README.md", "config.json", "headtrain.json", "model.safetensors"]


def test_only_the_exports_own_files_go(export):
    for name in ("optimizer.pt", "trainer.json", "model.safetensors.tmp", "modeling_evil.py", ".env"):
        (export / name).write_bytes(b"x")
    (export / "state").mkdir()
    (export / "state/model.safetensors").write_bytes(b"x")
    (export / "LICENSE").write_text("Apache")
    plan = plan_push(export)
    assert names(plan) == sorted([*EXPORTED, "LICENSE"])
    assert set(plan.left) == {
        "optimizer.pt", "trainer.json", "model.safetensors.tmp", "modeling_evil.py", ".env", "state/model.safetensors",
    }  # fmt: skip
    assert plan.total == sum((export / name).stat().st_size for name in names(plan))


def test_a_record_cannot_name_other_files(export):
    data = json.loads((export / "headtrain.json").read_text())
    (export / "optimizer.pt").write_bytes(b"x")
    data["export"]["files"]["optimizer.pt"] = "0" * 64
    (export / "headtrain.json").write_text(json.dumps(data))
    with pytest.raises(ExportError, match=r"not sent: \['optimizer.pt'\]"):
        plan_push(export)


def test_what_cannot_be_pushed(export, tmp_path):
    with pytest.raises(ExportError, match="is a checkpoint: `headtrain export` it"):
        plan_push(cases.checkpoint(tmp_path / "c", "medusa-one"))
    with pytest.raises(ValueError, match="no headtrain.json"):
        plan_push(tmp_path)
    card = (export / "README.md").read_text()
    (export / "README.md").write_text(card.replace("license:", "license: ["))
    with pytest.raises(ExportError, match="front matter"):
        plan_push(export)
    (export / "README.md").write_text("# no front matter")
    with pytest.raises(ExportError, match="there is none"):
        plan_push(export)
    (export / "README.md").unlink()
    with pytest.raises(ExportError, match="has no README.md"):
        plan_push(export)
    (export / "README.md").write_text(card)
    data = bytearray((export / "model.safetensors").read_bytes())
    data[-500] ^= 1
    (export / "model.safetensors").write_bytes(data)
    with pytest.raises(ExportError, match="changed since the export: model.safetensors"):
        plan_push(export)


def test_push_sends_one_private_commit_and_a_second_sends_nothing(hub, export):
    done = push_export(plan_push(export), REPO)
    assert hub.repos[REPO]["private"] and done.private and done.removed == ()
    assert done.url.endswith("/me/head") and re.fullmatch(r"[0-9a-f]{40}", done.commit)
    files = content(hub)
    assert sorted(files) == sorted([*EXPORTED, ".gitattributes"])
    for name in EXPORTED[1:]:
        assert files[name] == (export / name).read_bytes()
    assert hub.repos[REPO]["commits"] == 2  # the first made the repository
    again = push_export(plan_push(export), REPO)
    assert again.commit == done.commit and hub.repos[REPO]["commits"] == 2
    assert hub.count("PUT", "/lfs/") == 1 and hub.waits == []


def test_the_card_passes_the_hubs_validation_and_names_the_repository(hub, export):
    push_export(plan_push(export), REPO)
    assert hub.count("POST", "/api/validate-yaml") == 1
    card = ModelCard(content(hub)["README.md"].decode())
    card.validate()  # the Hub's endpoint
    assert card.data.license == "apache-2.0" and card.data.library_name == "headtrain"
    assert "THIS_FOLDER" not in card.text and f'"model": "{REPO}"' in card.text


def test_public_is_asked_for(hub, export):
    assert not push_export(plan_push(export), REPO, public=True).private
    with pytest.raises(HubError, match="me/head is public already.*--public"):
        push_export(plan_push(export), REPO)
    hub.add("me/closed", {}, private=True)
    assert push_export(plan_push(export), "me/closed", public=True).private  # never opened by a push


def test_a_revision_is_a_branch_of_its_own(hub, export):
    push_export(plan_push(export), REPO, revision="step-100")
    assert "model.safetensors" in content(hub, "step-100") and "model.safetensors" not in content(hub)
    push_export(plan_push(export), REPO, revision="step-100")  # there already


def test_files_of_another_export_are_not_left_beside(hub, export):
    there = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}", "notes.md": b"mine"}
    hub.add(REPO, there)
    with pytest.raises(HubError, match="model-00001-of-00002.safetensors, model.safetensors.index.json; --replace"):
        push_export(plan_push(export), REPO)
    assert content(hub) == there
    hub.lose_commit_answer = True  # the second attempt finds them gone
    done = push_export(plan_push(export), REPO, replace=True)
    assert done.removed == ("model-00001-of-00002.safetensors", "model.safetensors.index.json")
    assert sorted(content(hub)) == sorted([*EXPORTED, "notes.md"])


CALLS = [
    ("POST", "/api/repos/create"),
    ("GET", "/api/models/me/head"),
    ("POST", "/branch/"),
    ("GET", "/tree/"),
    ("POST", "/api/validate-yaml"),
    ("POST", "/preupload/"),
    ("POST", "/objects/batch"),
    ("PUT", "/lfs/"),
    ("POST", "/commit/"),
]


@pytest.mark.parametrize("what", [503, "drop"])
def test_each_call_is_repeated_after_a_failure(hub, export, what):
    hub.faults = [(*call, what) for call in CALLS]
    with pytest.warns(UserWarning, match="again in 1 s"):
        push_export(plan_push(export), REPO, revision="b")
    assert not hub.faults and len(hub.waits) >= len(CALLS)
    assert content(hub, "b")["model.safetensors"] == (export / "model.safetensors").read_bytes()
    assert hub.repos[REPO]["commits"] == 2


def test_what_has_arrived_is_not_sent_again(hub, export):
    """Cut off at the commit until it gives up; the same command goes on."""
    hub.faults = [("POST", "/commit/", 502)] * 5
    with pytest.warns(UserWarning), pytest.raises(HubError, match="me/head: uploading: the Hub answered 502"):
        push_export(plan_push(export), REPO)
    assert hub.count("PUT", "/lfs/") == 1 and "model.safetensors" not in content(hub)
    assert hub.waits == [1.0, 2.0, 4.0, 8.0]
    push_export(plan_push(export), REPO)
    assert hub.count("PUT", "/lfs/") == 1 and "model.safetensors" in content(hub)


def test_a_commit_whose_answer_was_lost_is_not_made_twice(hub, export):
    hub.lose_commit_answer = True
    with pytest.warns(UserWarning, match="no answer from"):
        done = push_export(plan_push(export), REPO)
    assert hub.repos[REPO]["commits"] == 2 and done.commit == hub_server.sha(hub.repos[REPO], "main")


@pytest.mark.parametrize(
    ("status", "method", "path", "text"),
    [
        (401, "POST", "/api/repos/create", r"does not know this login \(401\): `hf auth login`"),
        (403, "POST", "/api/repos/create", r"no permission \(403\): the token needs write access to me"),
        (403, "POST", "/commit/", r"uploading: no permission \(403\)"),
        (404, "POST", "/preupload/", r"not found \(404\)"),
        (400, "POST", "/api/validate-yaml", r"refuses the request \(400\)"),
        (507, "PUT", "/lfs/", r"the Hub answered 507"),
    ],
)
def test_refusals_are_one_line_at_once_and_quote_no_token(hub, export, status, method, path, text):
    hub.faults = [(method, path, status)]
    with pytest.raises(HubError, match=text) as caught:
        push_export(plan_push(export), REPO)
    assert "\n" not in str(caught.value) and hub.waits == []
    assert f"Bearer {TOKEN}" in hub.authorizations
    for error in (caught.value, caught.value.__cause__, caught.value.__context__):  # nothing chained holds the request
        assert error is None or TOKEN not in repr(error)
    assert caught.value.__cause__ is None and caught.value.__context__ is None


def test_the_token_is_in_no_warning_and_no_log_line(hub, export, caplog):
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity_debug()
    try:
        hub.faults = [("POST", "/commit/", 503), ("PUT", "/lfs/", 503), ("POST", "/api/repos/create", "drop")]
        with pytest.warns(UserWarning) as warned:
            push_export(plan_push(export), REPO)
    finally:
        hub_logging.set_verbosity_warning()
    said = caplog.text + "".join(str(w.message) for w in warned)
    assert "503 thrown while requesting PUT" in said  # the client's own line
    assert "refused: ***" in said or "refused: Bearer ***" in said  # the server quoted it
    assert TOKEN not in said and "Signature=signed" not in said


def test_a_token_of_any_shape_is_hidden(hub, export, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "another.kind-of/login")
    hub.faults = [("POST", "/commit/", 403)]
    with pytest.raises(HubError, match=r"it says: refused: Bearer \*\*\* \*\*\*$"):
        push_export(plan_push(export), REPO)


def test_without_a_login_nothing_is_asked(hub, export, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="not logged in.*hf auth login"):
        push_export(plan_push(export), REPO)
    with pytest.raises(HubError, match="'head' is no repository"):
        push_export(plan_push(export), "head")
    assert hub.requests == []


def test_offline_is_said_at_once(hub, export, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        push_export(plan_push(export), REPO)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        download_export(REPO)
    assert hub.requests == [] and hub.waits == []


def test_a_hub_export_is_checked_and_only_its_files_come(hub, export, tiny_folder):
    push_export(plan_push(export), REPO)
    content(hub)["modeling_evil.py"] = b"raise SystemExit('executed')"
    content(hub)["optimizer.pt"] = b"x"
    assert is_hub_id(REPO)
    hub.faults = [("GET", "/resolve/", "drop"), ("GET", "/api/models", 503), ("HEAD", "/resolve/", 503)]
    with pytest.warns(UserWarning):
        result = check(REPO, str(tiny_folder))
    assert result.exit_code == 0 and result.relation == "the trained target"
    assert result.export == REPO
    folder = download_export(REPO)
    assert sorted(p.name for p in folder.iterdir()) == EXPORTED
    assert (folder / "model.safetensors").read_bytes() == (export / "model.safetensors").read_bytes()
    assert Metadata.read(folder) == Metadata.read(export)


def test_a_hub_export_of_a_revision(hub, export, tiny_folder):
    push_export(plan_push(export), REPO, revision="step-100")
    assert check(REPO, str(tiny_folder), revision="step-100").exit_code == 0
    with pytest.raises(ExportError, match="neither headtrain.json nor config.json"):
        check(REPO, str(tiny_folder))
    with pytest.raises(HubError, match="404"):
        check(REPO, str(tiny_folder), revision="nothing")
    with pytest.raises(HubError, match=r"me/other: no such folder here, downloading it: not found \(404\)"):
        check("me/other", str(tiny_folder))


def test_the_verb_lists_and_sends(hub, export):
    from typer.testing import CliRunner

    from headtrain.cli import app

    (export / "optimizer.pt").write_bytes(b"x")
    dry = CliRunner().invoke(app, ["push", str(export), REPO, "--dry-run"])
    assert dry.exit_code == 0 and hub.requests == []
    size = (export / "model.safetensors").stat().st_size
    assert f"{size:,}  model.safetensors" in dry.output and "nothing was sent" in dry.output
    assert "(private)" in dry.output and "stay here, no part of the export: optimizer.pt" in dry.output
    sent = CliRunner().invoke(app, ["push", str(export), REPO, "--revision", "b"])
    assert sent.exit_code == 0 and f"pushed to {constants.ENDPOINT}/{REPO} at" in sent.output
    assert "model.safetensors" in content(hub, "b") and hub.repos[REPO]["private"]


TWO_VERBS = """
import sys
from headtrain.cli import main
for words in {words!r}:
    sys.argv = ["headtrain", *words]
    try:
        main()
    except SystemExit as ended:
        print("exit code", ended.code)
"""


@pytest.mark.slow
def test_the_verbs_with_HF_ENDPOINT(export, tiny_folder, tmp_path):
    """As a user runs them: the environment says where the Hub is and who asks."""
    with hub_server.running() as (server, url):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_OFFLINE"))}
        env |= {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        server.add(REPO, {p.name: p.read_bytes() for p in export.iterdir()})
        server.faults = [("POST", "/api/repos/create", 403)]
        check_it = ["check", REPO, "--target", str(tiny_folder), "--json", "--no-probe"]
        code = TWO_VERBS.format(words=[["push", str(export), "acme/head"], check_it])
        ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        pushed, checked = ran.stdout.split("exit code 2\n")
        assert "4 files for acme/head (private)" in pushed, ran.stderr
        assert ran.stderr.startswith("error: acme/head: making the repository: no permission (403)")
        assert ran.stderr.count("\n") == 1
        checked, code = checked.split("exit code ")
        assert int(code) == 0 and json.loads(checked)["kind"] == "trained target"
        assert TOKEN not in ran.stdout + ran.stderr
        written = [p for p in tmp_path.rglob("*") if p.is_file()]
        assert not [p for p in written if TOKEN.encode() in p.read_bytes()]


def test_a_target_on_the_hub_is_identified_from_its_files(hub, export, tiny_folder):
    files = {p.name: p.read_bytes() for p in tiny_folder.iterdir()} | {"modeling_evil.py": b"raise SystemExit"}
    hub.add("me/target", files | {"original/model.safetensors": b"x"})
    result = check(export, "me/target", probe=False)
    assert result.exit_code == 0 and result.kind == "trained target" and result.target == "me/target"
    asked = {path.split("/")[-1] for _, path in hub.requests if "/resolve/" in path}
    assert "model.safetensors" in asked and "modeling_evil.py" not in asked
    assert not hub.count("GET", "/original/")


def test_a_head_on_the_hub_is_imported(hub, export, tiny_folder, tmp_path):
    from typer.testing import CliRunner

    from headtrain.cli import app

    hub.add(REPO, {p.name: p.read_bytes() for p in export.iterdir() if p.name != "headtrain.json"})
    ran = CliRunner().invoke(app, ["import", REPO, "--target", str(tiny_folder), "--out", str(tmp_path / "in")])
    assert ran.exit_code == 0, ran.output
    assert Metadata.read(tmp_path / "in").imported is not None
