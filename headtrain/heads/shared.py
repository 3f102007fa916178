"""The target's lm_head as a head's own."""

from __future__ import annotations

from torch import Tensor

from ..types import TargetWeights


def shared_lm_head(weights: TargetWeights, instead: str) -> Tensor:
    """[V, H], for a head whose logits are this matrix times its state. instead: what works for a target of which that
    is not so, for the message. Raises ValueError for such a target: its logits have a bias or a soft cap, which draft
    logits lack in every engine, so that they would be drafts of another distribution than was trained."""
    problems = []
    if weights.lm_head_bias is not None:
        problems.append("a bias on its lm_head")
    if weights.softcap:
        problems.append(f"a soft cap of {weights.softcap:g} on its logits (final_logit_softcapping)")
    if problems:
        raise ValueError(
            f"this head drafts with the target's lm_head alone, and the target has {' and '.join(problems)}; {instead}"
        )
    return weights.lm_head.detach()
