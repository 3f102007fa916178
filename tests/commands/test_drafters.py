"""How deep a head drafts where nobody says: in a tree, and by the launch command of its export."""

from __future__ import annotations

import pytest
import tiny

from headtrain.commands.drafters import Maker
from headtrain.config import RecipeError, TargetSection
from headtrain.decode.drafters import HeadDrafter
from headtrain.export.core import usual_draft
from headtrain.heads.catalog import build_head, parse_head
from headtrain.heads.io import head_metadata
from headtrain.target.load import load_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(TargetSection(path=str(tiny.save(tmp_path_factory.mktemp("target"), num_hidden_layers=8))))


@pytest.mark.parametrize(
    ("config", "trained", "depth", "drafts"),
    [
        ({"kind": "eagle3", "draft_vocab_size": None, "depth": 2}, 2, 2, 2),
        ({"kind": "eagle1", "depth": 5}, 1, 5, 3),  # one step trains, made to draft more
        ({"kind": "eagle1", "depth": 2, "steps": 2}, 2, 2, 2),
        ({"kind": "eagle3", "draft_vocab_size": None, "depth": 2}, None, 6, 3),  # imported: its depth is not known
    ],
)
def test_the_usual_depth(target, config, trained, depth, drafts):
    head = build_head(parse_head(config), target.shape, None)
    head.attach(target.weights())
    metadata = head_metadata(head, target.identity)
    if trained is None:
        metadata.head.depth = None
    assert metadata.head.depth == trained
    drafter = HeadDrafter(head, trained_depth=trained)
    assert Maker(target, None, None).tree(drafter, 32, 5)[1] == depth
    assert Maker(target, None, None, tree_depth=4).tree(drafter, 32, 5)[1] == 4
    assert usual_draft(metadata).count == drafts


def test_the_runs_own_head_is_not_another_ones(target, tmp_path):
    """``head:FOLDER`` would look like ``model:FOLDER``."""
    with pytest.raises(RecipeError, match="`head` is RUN's own; for another one write its folder, runs/other"):
        Maker(target, tmp_path, None).chain("head:runs/other")
