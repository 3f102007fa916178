"""Trees: their forms, the greedy choice of a static one against brute force, EAGLE-2's growth against a plain writing
of it, and the text of every tree against the target's own."""

from __future__ import annotations

import itertools

import pytest
import torch
from fakes import MarkovTarget, ScriptedDrafter, TableDrafter, counting
from rigs import PROMPT, head_for, overfit, tiny_target

from headtrain.decode.drafters import HeadDrafter, Sampling
from headtrain.decode.generate import generate
from headtrain.decode.tree import DynamicTree, StaticTree, ancestors, build_static, chain, offered
from headtrain.types import Proposal

BUSHY = StaticTree.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0], [1, 0, 0]])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def text(target):
    return generate(target, PROMPT, max_new_tokens=320, eos_ids=()).tokens


def test_ancestors():
    parents = [-1, 0, 0, 2, -1]
    want = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 1]])
    assert torch.equal(ancestors(parents), want.bool())
    with pytest.raises(ValueError, match="node 1 has parent 1"):
        ancestors([-1, 1])


def test_offered_is_the_longest_branch_below_the_accepted_path():
    tree = Proposal(torch.arange(5), parents=[-1, 0, 1, -1, 3])  # 0-1-2, 3-4
    assert [offered(tree, path) for path in ([], [0], [0, 1, 2], [3], [3, 4])] == [3, 3, 3, 2, 2]
    assert offered(Proposal(torch.arange(4), parents=[-1, -1, 1, 2]), []) == 3  # the longest branch is not the first
    assert offered(Proposal(torch.arange(4)), [0]) == 4 and offered(None, []) == 0


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "at least one path"),
        ([[0], [0]], "each path once"),
        ([[]], "one or more ranks"),
        ([[0], [-1]], "ranks of 0 or above"),
        ([[0, 0]], r"without its beginning \[0\]"),
        ([[1]], r"without its better sibling \[0\]"),
    ],
)
def test_static_trees_that_are_none(paths, message):
    with pytest.raises(ValueError, match=message):
        StaticTree.of(paths)


def test_static_trees_are_in_level_order():
    tree = StaticTree.of([[0, 0], [1], [0]])
    assert tree.paths == ((0,), (1,), (0, 0)) and tree.parents == [-1, -1, 0]
    assert (tree.nodes, tree.depth) == (3, 2)
    assert chain(3).parents == [-1, 0, 1]


@pytest.mark.parametrize("seed", range(4))
def test_the_built_tree_has_the_largest_expected_length(seed):
    """Against every tree of 5 nodes over 3 depths of 3 ranks."""
    accuracy = torch.rand(3, 3, generator=torch.Generator().manual_seed(seed)).sort(1, descending=True).values
    accuracy = (accuracy / accuracy.sum(1, keepdim=True) * 0.9).double()

    def value(path):
        out = 1.0
        for depth, rank in enumerate(path):
            out *= float(accuracy[depth, rank])
        return out

    every = [path for n in (1, 2, 3) for path in itertools.product(range(3), repeat=n)]
    best = 0.0
    for chosen in itertools.combinations(every, 5):
        given = set(chosen)
        if all(len(p) == 1 or p[:-1] in given for p in chosen):
            best = max(best, sum(map(value, chosen)))
    built = build_static(accuracy, 5)
    assert built.nodes == 5 and sum(map(value, built.paths)) == pytest.approx(best, rel=1e-12)


def test_building_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match="7 nodes asked for, but 2 depths of 2 ranks give 6"):
        build_static(torch.full((2, 2), 0.4), 7)
    assert build_static(torch.tensor([[0.9, 0.0], [0.5, 0.0]]), 6).nodes == 6  # worthless nodes fill a budget
    for bad in (torch.tensor([[1.2]]), torch.tensor([[float("nan")]]), torch.zeros(0, 2)):
        with pytest.raises(ValueError, match="values in 0..1"):
            build_static(bad, 1)
    with pytest.raises(ValueError, match="cannot reach depth 6"):
        DynamicTree(nodes=5, depth=6)
    with pytest.raises(ValueError, match="at least 1"):
        DynamicTree(branch=0)


def reference_dynamic(table, before, last, plan: DynamicTree, depth: int) -> set[tuple[int, ...]]:
    """EAGLE-2 by paths: the kept ones."""

    def extend(path):
        a, b = ([before, last, *path])[-2:]
        logp, ids = table[a, b].log_softmax(-1).topk(min(plan.branch, table.shape[0]))
        return [((*path, int(i)), float(p)) for p, i in zip(logp, ids, strict=True)]

    pool = dict(extend(()))
    frontier = list(pool)
    for _ in range(depth - 1):
        born = {}
        for path in frontier:
            for child, logp in extend(path):
                born[child] = pool[path] + logp
        pool |= born
        frontier = sorted(born, key=born.get, reverse=True)[: plan.branch]
    return set(sorted(pool, key=pool.get, reverse=True)[: plan.nodes])


@pytest.mark.parametrize(
    "plan", [DynamicTree(9, 3, 3), DynamicTree(20, 5, 4), DynamicTree(4, 4, 1), DynamicTree(2, 1, 5)]
)
@pytest.mark.parametrize("limit", [2, 9])
def test_the_dynamic_tree_is_eagle_2s(plan, limit):
    target = MarkovTarget(12, seed=4)
    drafter = TableDrafter(target.table, plan)
    drafter.start(torch.tensor([0]), 50)
    empty = torch.zeros(1, 0, 1), torch.zeros(1, 1)
    proposal = drafter.draft(torch.tensor([5]), *empty, limit, Sampling(0.0, 1.0, 0, torch.Generator()))
    tokens, paths = proposal.tokens.tolist(), []
    for node, parent in enumerate(proposal.parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), tokens[node]))
    assert len(set(paths)) == len(paths) and proposal.q is None
    assert set(paths) == reference_dynamic(target.table, 0, 5, plan, min(limit, plan.depth))


def test_a_static_tree_takes_the_ranks_it_says():
    target = MarkovTarget(12, seed=4)
    drafter = TableDrafter(target.table, BUSHY)
    drafter.start(torch.tensor([0]), 50)
    empty = torch.zeros(1, 0, 1), torch.zeros(1, 1)
    for limit in (1, 2, 4):
        proposal = drafter.draft(torch.tensor([5]), *empty, limit, Sampling(0.0, 1.0, 0, torch.Generator()))
        kept = [path for path in BUSHY.paths if len(path) <= limit]
        for node, path in enumerate(kept):
            text = [0, 5] if limit else []
            for rank in path:
                text.append(int(target.table[text[-2], text[-1]].topk(rank + 1).indices[rank]))
            assert int(proposal.tokens[node]) == text[-1], path
        assert proposal.tokens.numel() == len(kept)
        drafter.start(torch.tensor([0]), 50)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("eagle3", {"depth": 5}),
        ("eagle3", {"draft_ids": range(3, 200)}),
        ("medusa", {"num_heads": 5}),
        ("eagle1", {"depth": 5, "steps": 3}),
        ("mtp", {"depth": 5}),
    ],
)
@pytest.mark.parametrize("plan", [BUSHY, DynamicTree(12, 4, 3), DynamicTree(30, 5, 6)], ids=str)
def test_trees_leave_the_text_as_it_is(target, text, kind, more, plan):
    """Several hundred tokens, with a head that is right often enough for the paths to bend."""
    head = head_for(target, kind, **more)
    overfit(target, head, PROMPT + text[:100], steps=25)
    out = generate(target, PROMPT, drafter=HeadDrafter(head, plan), k=plan.depth, max_new_tokens=320, eos_ids=())
    assert out.tokens == text, f"best two logits: {min(out.gaps):.1e} apart"
    assert 1 + sum(r.committed for r in out.rounds) == 320
    assert max(r.nodes for r in out.rounds) == plan.nodes and max(r.accepted for r in out.rounds) >= 2


def test_a_tree_accepts_at_least_what_its_own_chain_does(target, text):
    """The tree of BUSHY holds the chain of first ranks; it can only do better."""
    head = head_for(target, "eagle3", depth=5)
    overfit(target, head, PROMPT + text[:60], steps=15)
    taus = [
        generate(target, PROMPT, drafter=HeadDrafter(head, plan), k=4, max_new_tokens=200, eos_ids=()).tau
        for plan in (None, BUSHY)
    ]
    assert taus[1] > taus[0] > 1


class Sideways(ScriptedDrafter):
    """A tree whose first branch is wrong at once and whose second is the text."""

    tree = "sideways"

    def draft(self, *args):
        right = super().draft(*args).tokens.tolist()
        tokens, parents = [0, *right], [-1, -1, *range(1, len(right))]
        return Proposal(torch.tensor(tokens), parents=parents)


@pytest.mark.parametrize("end", range(1, 12))
def test_the_end_of_text_inside_an_accepted_branch_stops_exactly_there(end):
    count = list(range(1, 60))
    out = generate(counting(60), [0], drafter=Sideways(count), k=4, max_new_tokens=30, eos_ids=(end,))
    assert out.tokens == count[:end] and out.stop == "eos"
    assert sum(r.committed for r in out.rounds) == end - 1


def test_a_tree_larger_than_the_context_is_refused(target):
    small = tiny_target(max_position_embeddings=32)
    drafter = HeadDrafter(head_for(small, "eagle3", depth=3), DynamicTree(32, 3, 16))
    with pytest.raises(ValueError, match="need 33 positions, the target's context has 32"):
        generate(small, PROMPT, drafter=drafter, k=3, max_new_tokens=9)
    fits = HeadDrafter(head_for(small, "eagle3", depth=3), DynamicTree(20, 3, 16))
    plain = generate(small, PROMPT, max_new_tokens=99, eos_ids=())
    out = generate(small, PROMPT, drafter=fits, k=3, max_new_tokens=99, eos_ids=())
    assert out.tokens == plain.tokens and out.stop == "context"
