"""Branches of documents: what each query sees, against a table that says it pair by pair."""

import numpy as np
import pytest
import torch

from lightning_cp.geometry.branches import SHARED, BranchMask, read_branches
from lightning_cp.geometry.ranges import Range


def draw(rng, num_samples, length):
    """Draw documents, some of them -1, and their branches: 0 to 3, with or without a beginning."""
    documents, ids = (np.full((num_samples, length), -1) for _ in range(2))
    for row in range(num_samples):
        at, name = 0, 0
        while at < length:
            if rng.random() < 0.15:
                at += int(rng.integers(1, 4))
                continue
            number, start = at, at
            at += int(rng.integers(0, 6))
            for _ in range(rng.integers(0 if at > start else 1, 4)):
                size = int(rng.integers(1, 5))
                ids[row, at : at + size] = name
                at, name = at + size, name + 1
            documents[row, start:at] = number
            if at < length:
                documents[row, at:] = -1
    return documents, ids


def table(documents, ids, padding):
    """Return [B, S, S]: same document, not later, and shared or in the same branch."""
    same = (documents[:, :, None] == documents[:, None]) & (documents[:, None] != -1)
    length = documents.shape[1]
    causal = np.tril(np.ones((length, length), bool))
    branch = (ids[:, None] == SHARED) | (ids[:, :, None] == ids[:, None])
    seen = same & causal & branch
    return seen if padding is None else seen & ~padding[:, None]


@pytest.mark.parametrize(
    "seed",
    [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 40))],
)
def test_the_branches_of_a_document_see_its_beginning_and_themselves(seed):
    rng = np.random.default_rng(seed)
    documents, ids = draw(rng, 2, 37)
    padding = None
    if seed % 2:
        padding = np.arange(37) >= rng.integers(20, 38, (2, 1))
    branches = read_branches(ids, documents, padding)
    if branches is None:
        pytest.skip("no document has two branches")
    exact = table(documents, ids, padding)
    total = np.zeros(exact.shape, int)
    whole = Range(0, 40)
    for number in range(branches.count):
        mask = BranchMask(causal=True, branches=branches, number=number)
        bounds = mask.bounds(37, padded_len=40, documents=documents, padding=padding)
        assert (np.diff(bounds.first) >= 0).all()
        assert (np.diff(bounds.last) >= 0).all()
        seen = bounds.visible(whole, whole).numpy().astype(int)
        assert not seen[:, 37:].any()
        total += np.broadcast_to(seen, (2, 40, 40))[:, :37, :37]
        covered = torch.zeros(40, 40, dtype=torch.int64)
        for tile in bounds.tiles(whole, whole, size=4):
            covered[slice(*tile.query), slice(*tile.keys)] += 1
        assert covered.max() <= 1
        assert (covered.numpy() >= seen.max(0)).all()
    real = np.ones((2, 37), bool) if padding is None else ~padding
    assert (total * real[:, :, None] == exact * real[:, :, None]).all()


def test_a_hidden_branch_costs_few_tiles():
    """10,000 keys that a later branch does not see are neither visited nor cut into pieces."""
    ids = np.repeat([-1, 0, 1], [5_001, 10_007, 3_003])[None]
    mask = BranchMask(causal=True, branches=read_branches(ids, None), number=1)
    bounds = mask.bounds(ids.shape[1])
    whole = Range(0, ids.shape[1])
    tiles = list(bounds.tiles(whole, whole, size=128))
    assert [(tile.query, tile.keys, tile.kind) for tile in tiles] == [
        (Range(15_008, 18_011), Range(15_008, 18_011), "causal"),
        (Range(15_008, 18_011), Range(0, 5_001), "full"),
    ]


def test_nothing_to_do_where_documents_have_one_branch():
    assert read_branches(np.array([[-1, 0, 0, 1, 1]]), np.array([[0, 0, 0, 1, 1]])) is None


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[-1, 0, 0, -1, 1]], "`branch_ids` of sample 0 are -1 at position 3, after a branch"),
        ([[0, 0, 1, 0, 1]], "`branch_ids` uses id 0 again at position 3"),
    ],
)
def test_branches_that_are_not_behind_a_beginning_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        read_branches(np.array(ids), None)
