"""Heads that draft with the target's lm_head: what the target does to its logits besides."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from reference_recurrent import SHAPE, H, V

from headtrain.capture import head_wants
from headtrain.config import RecipeError
from headtrain.heads.catalog import build_head, parse_head
from headtrain.types import TargetWeights

WEIGHTS = TargetWeights(torch.randn(V, H), torch.randn(V, H), torch.ones(H))
SHARING = [{"kind": "eagle1"}, {"kind": "mtp"}, {"kind": "mtp", "modules": 3}, {"kind": "medusa", "own_lm_head": False}]
OWN = [{"kind": "eagle3"}, {"kind": "mtp", "own_lm_head": True}, {"kind": "medusa"}]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"softcap": 30.0}, r"a soft cap of 30 on its logits \(final_logit_softcapping\); "),
        ({"lm_head_bias": torch.zeros(V)}, "a bias on its lm_head; "),
    ],
)
@pytest.mark.parametrize("options", SHARING, ids=str)
def test_a_target_whose_logits_are_more_than_its_lm_head_is_refused_at_once(options, more, said):
    head = build_head(parse_head(options), SHAPE, None)
    for call in (head.attach, head.check_start):
        call(WEIGHTS)
        with pytest.raises(ValueError, match=said + ".*(own_lm_head=true|head.kind=eagle3)"):
            call(dataclasses.replace(WEIGHTS, **more))


@pytest.mark.parametrize("options", OWN, ids=str)
def test_a_head_with_an_lm_head_of_its_own_takes_any_target(options):
    head = build_head(parse_head(options), SHAPE, None if options["kind"] != "eagle3" else torch.arange(V))
    capped = dataclasses.replace(WEIGHTS, softcap=30.0, lm_head_bias=torch.zeros(V))
    head.check_start(capped)
    head.attach(capped)
    head.init_from_target(capped)


def test_a_recipe_is_refused_before_anything_is_captured():
    from headtrain.config import Recipe

    recipe = Recipe.model_validate({"name": "x", "target": {"path": "x"}, "data": {"train": ["x"]}, "head": SHARING[1]})
    with pytest.raises(RecipeError, match="target x: .* a soft cap of 30 .*head.own_lm_head=true"):
        head_wants(recipe, SHAPE, dataclasses.replace(WEIGHTS, softcap=30.0))
