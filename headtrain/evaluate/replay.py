"""Every chain length from one pass over the target's own greedy text.

At temperature 0 a chain is accepted for as long as it says what the text says. A draft of depth j matters only when
the j - 1 before it were right, so what is drafted from a position can be found with the text itself as the draft's
beginning (teacher forcing), for all positions in one batch (``DraftHead.chain_hits``). ``replay`` then walks the text
round by round, as ``decode.generate`` would have, for any k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..decode.drafters import Drafter, HeadDrafter, Sampling
from ..decode.generate import Round
from ..target.model import Target
from ..types import Batch, Features, Row


@dataclass(frozen=True)
class Matches:
    """For each token of an answer, taken as the newest one: how many tokens the drafter proposes after it, and how
    many of these, from the first on, are what follows in the text."""

    proposed: list[int]
    right: list[int]


def replay(
    matches: Matches, k: int, *, prompt: int, limit: int | None = None, context: int | None = None
) -> list[Round]:
    """The rounds that decoding with chains of k would have had.

    prompt: its length. limit: max_new_tokens; context: the target's: near either a round drafts less. None: the text
    was not bounded by it.
    """
    count = len(matches.right)
    rounds, produced = [], 1  # the first token is prefill's
    while produced < count:
        newest = produced - 1
        room = k + 1
        if limit is not None:
            room = min(room, limit - produced)
        if context is not None:
            room = min(room, context - (prompt + newest))
        drafted = min(k, room - 1, matches.proposed[newest])
        accepted = min(drafted, matches.right[newest])
        if produced + accepted == count:  # the end of text lies in the accepted run: what comes after cannot count
            rounds.append(Round(accepted, accepted, accepted, drafted))
        else:
            rounds.append(Round(drafted, accepted, accepted + 1, drafted))
        produced += rounds[-1].committed
    return rounds


def match(target: Target, drafter: Drafter, prompt: Sequence[int], answer: Sequence[int], k: int) -> Matches:
    """What ``drafter`` proposes after each token of ``answer``, at most k deep: in one batched pass for a head, by
    drafting after every token for anything else."""
    if isinstance(drafter, HeadDrafter):
        row = Row([*prompt, *answer], [0] * len(prompt) + [1] * len(answer))
        batch = Batch.pack([row]).to(target.device)
        return match_row(drafter, batch, target.features(batch, drafter.head.wants()), len(prompt), len(answer), k)
    text = torch.tensor([*prompt, *answer], dtype=torch.int64, device=target.device)
    nothing = torch.zeros(len(text), 0, 1), torch.zeros(len(text), 1)
    greedy = Sampling(0.0, 1.0, 0, torch.Generator())
    drafter.start(text[: len(prompt)], len(text) - 1)  # nothing is drafted after the last token, which is never fed
    proposed, right, fed = [], [], 1
    for newest in range(len(prompt), len(text) - 1):
        proposal = drafter.draft(text[fed : newest + 1], *(x[fed : newest + 1] for x in nothing), k, greedy)
        fed = newest + 1
        tokens = [] if proposal is None else proposal.tokens.tolist()
        follows = text[newest + 1 : newest + 1 + len(tokens)].tolist()
        wrong = [j for j, (a, b) in enumerate(zip(tokens, follows, strict=False)) if a != b]
        proposed.append(len(tokens))
        right.append(wrong[0] if wrong else len(follows))
    return Matches([*proposed, 0], [*right, 0])


def match_row(drafter: HeadDrafter, batch: Batch, features: Features, start: int, count: int, k: int) -> Matches:
    """The same for one stored or computed row: the answer is the tokens start .. start + count - 1 of the batch."""
    hits = drafter.head.chain_hits(batch, features, k)[:, start - 1 : start - 1 + count]
    return Matches([k] * count, hits.long().cumprod(0).sum(0).tolist())
