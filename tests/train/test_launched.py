"""What of a launcher's config is refused, what accelerate does not see, and the commands that the documents print."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from unittest import mock

import pytest
import toyhead
from accelerate.commands.config.config_args import load_config_from_file
from rich.console import Console

from headtrain.config import RecipeError, load_recipe
from headtrain.train import __main__ as command
from headtrain.train import launched
from headtrain.train.backend import Backend
from headtrain.train.plan import check_accumulation
from headtrain.train.watch import Watch

ROOT = Path(__file__).parents[2]
BACKENDS = sorted((ROOT / "recipes/backend").glob("*.yaml"))


@pytest.fixture(autouse=True)
def two(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")


def test_a_config_file_of_deepspeed_is_refused_and_not_passed_over(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "zero.json")
    with pytest.raises(RecipeError, match="deepspeed_config_file zero.json is not read; set zero_stage and offload"):
        launched.strategy()


def test_loading_on_one_rank_alone_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    with pytest.raises(RecipeError, match="fsdp_cpu_ram_efficient_loading: true, expected false"):
        launched.strategy()


@pytest.mark.parametrize("name", [launched.FSDP, launched.DEEPSPEED])
def test_accelerate_sees_neither_flag(monkeypatch, name):
    monkeypatch.setenv(name, "true")
    with launched.hidden():
        assert name not in os.environ
    assert os.environ[name] == "true"


def test_gpus_that_no_rank_uses_are_named(monkeypatch, tmp_path):
    for local, there, line in (
        ("2", 8, "2 of this node's 8 GPUs are used. For all: accelerate launch .* --num_processes 8 "),
        (None, 2, "1 of this node's 2 GPUs is used"),
        ("8", 8, None),
        ("2", 1, None),  # ranks that share one
    ):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local) if local else monkeypatch.delenv("LOCAL_WORLD_SIZE", False)
        found = launched.idle_gpus(there)
        assert re.match(line, found) if line else found is None

    class OnGpus(Backend):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            self.idle_gpus = launched.idle_gpus(2)

    monkeypatch.delenv("LOCAL_WORLD_SIZE", False)
    monkeypatch.setattr(command, "Backend", OnGpus)
    monkeypatch.setattr(command, "prepare_run", mock.Mock(side_effect=RecipeError("enough")))
    said = io.StringIO()
    with pytest.raises(RecipeError, match="enough"), Watch() as watch:
        command.run(toyhead.recipe(tmp_path / "run"), watch, Console(file=said, width=400), False)
    assert "warning: 1 of this node's 2 GPUs is used" in said.getvalue()


@pytest.mark.parametrize("path", BACKENDS, ids=lambda path: path.stem)
def test_a_backend_file_leaves_the_number_of_processes_to_the_command(path):
    """accelerate refuses to guess it then (-1); with a number in the file, 8 GPUs would be 2 without a word."""
    assert load_config_from_file(str(path)).num_processes == (1 if path.stem == "single" else -1)


def printed() -> list[tuple[str, str]]:
    """(backend, the rest of the command) of each `accelerate launch` in documents, recipes, scripts and help texts."""
    places = [ROOT / "README.md", *(ROOT / "recipes").rglob("*.*"), *(ROOT / "scripts").rglob("*.*")]
    found = []
    for place in [*places, *(ROOT / "headtrain").rglob("*.py")]:
        if place.suffix in (".md", ".yaml", ".sh", ".sbatch", ".py"):
            text = re.sub(r"\\\n#? *", "", place.read_text())  # lines that go on
            text = re.sub(r'"\n +f?"', "", text)  # strings of Python that go on
            found += re.findall(r"accelerate launch .*?--config_file recipes/backend/(\w[\w-]*)\.yaml(.*)", text)
    return found


def test_every_printed_command_says_how_many_processes():
    commands = printed()
    assert len(commands) > 15
    assert [c for c in commands if c[0] not in ("single",) and not c[1].startswith(" --num_processes ")] == []


def test_printed_commands_divide_their_micro_batches():
    whole = [
        (int(count), ROOT / recipe, overrides.split())
        for _, rest in printed()
        for count, recipe, overrides in re.findall(
            r"--num_processes (\d+) -m headtrain\.train (recipes/[\w.-]+\.yaml)((?: [\w.]+=\S+)*)", rest
        )
    ]
    assert {path.stem for _, path, _ in whole} >= {"quickstart", "qwen3-8b-eagle3", "llama-3.3-70b-eagle3"}
    for count, path, overrides in whole:
        check_accumulation(load_recipe(path, overrides), count, resumes=False)
