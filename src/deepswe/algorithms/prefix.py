"""Prefix trees: many samples as one row in which every shared prefix stands once.

The attempts of a group share their prompt, and where the history of later turns is stripped of its thinking, the
sequences of one trajectory share all turns before. With causal attention a token's hidden state depends on what is left
of it alone, so equal prefixes have equal states: each is computed once, and its gradient is the sum over those who
share it. A node of the tree is one token after one prefix.

Samples stand in the order of a walk through the tree that takes the way to the longest sample first wherever it
branches. So a sample's new tokens follow each other in the row, its earlier ones are a few stretches of what is there
already (one, where all branch off one long history), and those who branch off at one place are neighbours.

To attend to a stretch elsewhere in the row costs something for every token that does, however short the stretch is; so
a beginning can be too short to be worth sharing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from operator import itemgetter

import torch
from torch import Tensor

from deepswe.algorithms.packing import Branch, EndToEnd, MicroBatch, Stretch, TrainingSample, halved

LEAST_SHARED = 16
"""Tokens of a beginning that a learner shares: a shorter one costs less to compute again."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Samples as one row of nodes.

    Attributes:
        branches: in the order of the row, which they fill.
        node_of: for each sample, as given, the node of each of its tokens.
    """

    branches: tuple[Branch, ...]
    node_of: tuple[Tensor, ...]

    @property
    def nodes(self) -> int:
        """Tokens that are computed."""
        return self.branches[-1].own[1] if self.branches else 0


def shared_length(left: Tensor, right: Tensor) -> int:
    """Tokens at the beginning that two sequences have in common."""
    count = min(len(left), len(right))
    # As arrays, in a third of the time that tensors take.
    differs = (left.numpy()[:count] != right.numpy()[:count]).nonzero()[0]
    return int(differs[0]) if len(differs) else count


def tree_order(samples: Sequence[Tensor]) -> list[int]:
    """The indices of sequences in the order of the walk: each shares most with the one before it."""
    tokens = [sample.tolist() for sample in samples]
    ranked = sorted(range(len(samples)), key=lambda index: (tokens[index], index))
    shared = [shared_length(samples[left], samples[right]) for left, right in pairwise(ranked)]
    walk: list[int] = []
    waiting = [(0, len(ranked))] if ranked else []
    while waiting:
        low, high = waiting.pop()
        longest = max(range(low, high), key=lambda place: len(tokens[ranked[place]]))
        walk.append(ranked[longest])
        left, right = range(longest - 1, low - 1, -1), range(longest + 1, high)
        aside = [*_alike(left, [shared[at] for at in left]), *_alike(right, [shared[at - 1] for at in right])]
        # The last of them is next: those who share most with the longest.
        waiting += [(first, last + 1) for _, first, last in sorted(aside)]
    return walk


def _alike(places: Sequence[int], shared: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Places that have as much in common with where they begin: (how much, the lowest place, the highest).

    Args:
        places: going away from there.
        shared: what each has in common with the one before it.
    """
    for depth, those in groupby(zip(accumulate(shared, min), places, strict=True), key=itemgetter(0)):
        found = [place for _, place in those]
        yield depth, min(found), max(found)


def build_tree(samples: Sequence[Tensor], *, least: int = 1, walked: bool = False) -> PrefixTree:
    """The tree of token sequences, each with at least one token.

    Args:
        samples: the sequences.
        least: a shorter beginning is not shared.
        walked: they stand in the order of the walk already, as those of a batch of `split_by_nodes` do.
    """
    branches: list[Branch] = []
    node_of: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(samples)
    path: list[Stretch] = []
    before: Tensor | None = None
    made = 0
    for index in range(len(samples)) if walked else tree_order(samples):
        tokens = samples[index]
        shared = _worth_sharing(before, tokens, least)
        path = _cut(path, shared)
        if shared < len(tokens):
            own = (made, made + len(tokens) - shared)
            branches.append(Branch(own, tuple(path)))
            path = _joined([*path, own])
            made = own[1]
        node_of[index] = torch.cat([torch.arange(start, end) for start, end in path])
        before = tokens
    return PrefixTree(tuple(branches), tuple(node_of))


def _worth_sharing(before: Tensor | None, tokens: Tensor, least: int) -> int:
    """Tokens that a sequence shares with the one before it; 0 where these are too few."""
    shared = 0 if before is None else shared_length(before, tokens)
    return shared if shared >= least else 0


def split_by_nodes(samples: Sequence[Tensor], budget: int, *, least: int = 1, multiple: int = 1) -> list[list[int]]:
    """Partition the indices of sequences into trees of at most `budget` nodes, neighbours together, in the order of the
    walk.

    A sequence longer than the budget gets a tree of its own.

    Args:
        samples: their tokens.
        budget: most nodes of a tree.
        least: as for `build_tree`.
        multiple: the number of trees is a multiple of it where there are sequences enough.
    """
    batches: list[list[int]] = []
    nodes, before = 0, None
    for index in tree_order(samples):
        tokens = samples[index]
        new = len(tokens) - _worth_sharing(before, tokens, least)
        if batches and nodes + new <= budget:
            batches[-1].append(index)
            nodes += new
        else:
            batches.append([index])
            nodes = len(tokens)
        before = tokens
    return halved(batches, [len(tokens) for tokens in samples], multiple)


def collate_tree(samples: Sequence[TrainingSample], *, least: int = 1, walked: bool = False) -> MicroBatch:
    """Samples as one micro-batch of one row, each shared prefix once; the trained tokens stay those of each sample.

    Args:
        samples: at least one.
        least, walked: as for `build_tree`.
    """
    tree = build_tree([sample.tokens_L for sample in samples], least=least, walked=walked)
    row, node_of_T = EndToEnd(samples), torch.cat(tree.node_of)
    tokens_M, position_M = torch.empty(2, tree.nodes, dtype=torch.int64)
    tokens_M[node_of_T], position_M[node_of_T] = row.tokens_T, row.position_T
    return MicroBatch(
        tokens_BT=tokens_M[None],
        mask_BT=torch.zeros(1, tree.nodes, dtype=torch.bool),
        **row.trained(),
        position_BT=position_M[None],
        target_N=row.tokens_T[row.trained_N],
        from_N=node_of_T[row.trained_N - 1],
        branches=tree.branches,
    )


def _cut(path: Sequence[Stretch], length: int) -> list[Stretch]:
    """The first `length` places of a path."""
    kept: list[Stretch] = []
    for start, end in path:
        if length <= 0:
            break
        kept.append((start, min(end, start + length)))
        length -= end - start
    return kept


def _joined(path: Sequence[Stretch]) -> list[Stretch]:
    """The same path with neighbours made one."""
    made: list[Stretch] = []
    for start, end in path:
        if made and made[-1][1] == start:
            made[-1] = (made[-1][0], end)
        else:
            made.append((start, end))
    return made
