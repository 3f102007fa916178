"""The estimate from stored rows, and the rank accuracies, against plain walks over the same text."""

from __future__ import annotations

import pytest
import tiny
import torch

from headtrain.data.loader import OnlineSource
from headtrain.decode.drafters import HeadDrafter
from headtrain.decode.generate import Round, generate
from headtrain.evaluate.acceptance import Case, Prompt, Settings, measure
from headtrain.evaluate.ranks import rank_accuracy
from headtrain.evaluate.replay import Matches, replay
from headtrain.evaluate.report import notes
from headtrain.evaluate.stored import measure_stored
from headtrain.heads.catalog import build_head, parse_head
from headtrain.target.model import Target
from headtrain.types import Batch, Row

HEADS = [{"kind": "eagle3", "depth": 4}, {"kind": "medusa", "num_heads": 4}]
PROMPTS = [Prompt([5, 17, 230 + n, 41, 8, 99 + n, 7], "ab"[n % 2], str(n)) for n in range(4)]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.of(tiny.model(0, tie_word_embeddings=False, num_hidden_layers=4, initializer_range=0.2))


def drafter_of(target, config, rows) -> HeadDrafter:
    torch.manual_seed(3)
    ids = torch.arange(0, 384, 2) if config["kind"] == "eagle3" else None
    head = build_head(parse_head(config | ({} if ids is None else {"draft_vocab_size": 192})), target.shape, ids)
    head.attach(target.weights())
    head.init_from_target(target.weights())
    batch = Batch.pack(rows)
    features = target.features(batch, head.wants())
    optimizer = torch.optim.AdamW(head.trainable().values(), lr=5e-3)
    for _ in range(40):
        sums = head.loss(batch, features, target.teacher(), 4)
        (sums.total / sums.count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return HeadDrafter(head.requires_grad_(False))


class Rows(OnlineSource):
    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Row:
        return self.rows[index]


def answers(target) -> list[Row]:
    rows = []
    for p in PROMPTS:
        text = generate(target, p.ids, max_new_tokens=24, eos_ids=()).tokens
        rows.append(Row(p.ids + text, [0] * len(p.ids) + [1] * 24, p.id, p.route))
    return rows


def settled(rounds: list[Round], k: int) -> list[Round]:
    """Those that end before the last k + 1 tokens: a stored answer has no limit that shortens its last drafts."""
    out, produced = [], 1
    for r in rounds:
        produced += r.committed
        if produced + k + 1 > 24:
            break
        out.append(r)
    return out


@pytest.mark.parametrize("config", HEADS, ids=lambda c: c["kind"])
def test_the_targets_own_text_gives_the_decoded_rounds(target, config, monkeypatch):
    """In batches of several rows and of one; a second turn in a row is an answer of its own."""
    from headtrain.evaluate import stored as module

    rows = answers(target)
    drafter = drafter_of(target, config, rows[:2])
    settings = Settings(max_new_tokens=24, eos_ids=())
    want = measure(target, [Case(drafter, k) for k in (1, 3)], PROMPTS, settings, quiet=True)
    for tokens in (4096, 40):
        monkeypatch.setattr(module, "BATCH_TOKENS", tokens)
        got = measure_stored(
            Rows(rows, target.features, drafter.head.wants()), drafter, target.teacher(), [1, 3], {}, {}, quiet=True
        )
        for a, b in zip(got.cases, want.cases, strict=True):
            assert a.settings["mode"] == "stored" and [r.route for r in a.results] == list("abab")
            for mine, theirs in zip(a.results, b.results, strict=True):
                assert sum(x.committed for x in mine.rounds) == sum(x.committed for x in theirs.rounds) == 23
                assert settled(mine.rounds, 3) == settled(theirs.rounds, 3) != []
    assert max(x.accepted for r in got.cases[1].results for x in r.rounds) >= 2
    two = Row(rows[0].ids + rows[1].ids, rows[0].turn + [2 * t for t in rows[1].turn], "both", "c")
    (case,) = measure_stored(
        Rows([two], target.features, drafter.head.wants()), drafter, target.teacher(), [3], {}, {}, quiet=True
    ).cases
    assert [(r.id, r.speculative.tokens) for r in case.results] == [("both#1", 24), ("both#2", 24)]
    assert case.results[0].rounds == got.cases[1].results[0].rounds


@pytest.mark.parametrize("config", HEADS, ids=lambda c: c["kind"])
@pytest.mark.parametrize("text", ["own", "foreign"])
def test_training_and_stored_rows_have_one_simulated_tau(target, config, text, monkeypatch):
    """Training's number comes back from the same rows, whatever text they have. tau itself judges by the text,
    and the report says how much of that is the target's own."""
    from headtrain.evaluate import stored as module
    from headtrain.train.metrics import report

    rows = answers(target)
    drafter = drafter_of(target, config, rows)
    if text == "foreign":  # every fourth token is another
        rows = [Row([(x + 5) % 384 if n > 7 and n % 4 == 0 else x for n, x in enumerate(r.ids)], r.turn) for r in rows]
    batch = Batch.pack(rows)
    with torch.no_grad():
        features = target.features(batch, drafter.head.wants())
        sums = drafter.head.loss(batch, features, target.teacher(), drafter.head.wants().depth)
    monkeypatch.setattr(module, "BATCH_TOKENS", 70)
    stored = Rows(rows, target.features, drafter.head.wants())
    sweep = measure_stored(stored, drafter, target.teacher(), [4], {"name": "t", "dtype": "float32"}, {}, quiet=True)
    got, trained, walked = sweep.simulated, report(sums), sweep.cases[0].summary().tau
    assert got.tau == pytest.approx(trained["tau"], abs=0.02) and got.tau > 1.02
    assert got.alpha == pytest.approx(trained["alpha"], abs=0.05)  # one near-tie may fall otherwise
    lines = "\n".join(notes(sweep))
    assert f"simulated tau {got.tau:.3f}" in lines and f"at {got.own:.1%} of its tokens" in lines
    if text == "own":
        assert got.own > 0.98 and walked > 1.3 and "is no estimate of decoding's" not in lines
    else:
        assert 0.05 < got.own < 0.9 and "is no estimate of decoding's" in lines


def test_a_turn_that_begins_a_row_cannot_be_drafted(target):
    drafter = drafter_of(target, HEADS[1], answers(target)[:1])
    row = Row([5, 6, 7, 8], [1, 1, 0, 2], "x")
    (case,) = measure_stored(
        Rows([row], target.features, drafter.head.wants()), drafter, target.teacher(), [2], {}, {}, quiet=True
    ).cases
    assert [(r.id, r.rounds) for r in case.results] == [("x#2", [])]
    assert replay(Matches([2], [0]), 2, prompt=3) == [] and Round(0, 0, 1) != Round(0, 0, 1, 1)


@pytest.mark.parametrize("config", HEADS, ids=lambda c: c["kind"])
def test_rank_accuracies_are_counted_on_the_text(target, config):
    """Reference: a fresh session for every position, fed with everything before it."""
    rows = answers(target)[:2]
    drafter = drafter_of(target, config, rows[:1])
    got, seen = rank_accuracy(target, drafter, rows, depths=3, ranks=4, quiet=True)
    head, hits, offered = drafter.head, torch.zeros(3, 4), torch.zeros(3)
    for row in rows:
        ids = torch.tensor(row.ids)
        _, layers, final = target.step(ids[None], target.new_cache(), head.wants().layers)
        for i in range(len(row) - 2):
            if not row.turn[i + 1]:
                continue
            session = head.session(len(row))
            logits = session.extend(ids[1 : i + 2], layers[: i + 1], final[: i + 1])
            for depth in range(min(3, len(row) - i - 2)):
                if depth:
                    logits = session.expand(torch.tensor([depth - 2]), ids[i + 1 + depth : i + 2 + depth])[0]
                best = logits.topk(4).indices
                best = best if head.draft_ids is None else head.draft_ids[best]
                offered[depth] += 1
                hits[depth] += best == ids[i + 2 + depth]
    assert seen == int(offered[0]) == 46
    torch.testing.assert_close(got, hits / offered[:, None], rtol=0, atol=1.5 / seen)  # one near-tie may fall otherwise
    assert got[0].sum() > 0.2 and (got.sum(1) <= 1).all()
    few, some = rank_accuracy(target, drafter, rows, depths=1, ranks=4, positions=10, quiet=True)
    assert some == 23  # the row that passes the number is the last
    with pytest.raises(ValueError, match="no answer of 4 tokens among 1 rows"):
        rank_accuracy(target, drafter, [Row([5, 6, 7, 8], [0, 1, 1, 1])], depths=3, quiet=True)
