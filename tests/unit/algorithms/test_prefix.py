import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepswe.algorithms.packing import Branch, collate, make_samples
from deepswe.algorithms.prefix import build_tree, collate_tree, shared_length, split_by_nodes
from deepswe.types import Ending, Graded, TokenSpan, Trajectory

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=7)


def tensors(sequences):
    return [torch.tensor(tokens) for tokens in sequences]


def test_a_shared_prefix_stands_once():
    tree = build_tree(tensors([[5, 6, 7], [5, 6, 8, 9], [5, 6]]))
    assert tree.nodes == 5
    assert tree.branches == (Branch((0, 4), ()), Branch((4, 5), ((0, 2),)))
    assert [nodes.tolist() for nodes in tree.node_of] == [[0, 1, 4], [0, 1, 2, 3], [0, 1]]


@settings(deadline=None)
@given(SEQUENCES)
def test_every_sequence_is_a_path_and_every_prefix_one_node(sequences):
    tree = build_tree(tensors(sequences))
    prefixes = {tuple(tokens[: end + 1]) for tokens in sequences for end in range(len(tokens))}
    assert tree.nodes == len(prefixes)
    node_of_prefix = {}
    for tokens, nodes in zip(sequences, tree.node_of, strict=True):
        for end, node in enumerate(nodes.tolist()):
            assert node_of_prefix.setdefault(tuple(tokens[: end + 1]), node) == node
    assert len(set(node_of_prefix.values())) == len(prefixes)


def test_a_beginning_that_is_too_short_is_not_shared():
    samples = tensors([[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 1]])
    tree = build_tree(samples, least=3)
    assert tree.branches == (Branch((0, 4), ()), Branch((4, 5), ((0, 3),)), Branch((5, 8), ()))
    assert split_by_nodes(samples, 5, least=3) == [[0, 1], [2]]
    assert split_by_nodes(samples, 5, least=4) == [[0], [1], [2]]


@settings(deadline=None)
@given(SEQUENCES, st.integers(1, 30), st.integers(1, 4))
def test_the_sequences_of_a_tree_are_in_the_order_of_the_walk(sequences, budget, least):
    samples = tensors(sequences)
    for batch in split_by_nodes(samples, budget, least=least):
        those = [samples[index] for index in batch]
        assert build_tree(those, least=least, walked=True).nodes == build_tree(those, least=least).nodes


@settings(deadline=None)
@given(SEQUENCES)
def test_branches_fill_the_row_and_come_after_their_prefix(sequences):
    tree = build_tree(tensors(sequences))
    assert [branch.own[0] for branch in tree.branches] == [0, *(branch.own[1] for branch in tree.branches[:-1])]
    paths = [nodes.tolist() for nodes in tree.node_of]
    for branch in tree.branches:
        whole = [node for start, end in (*branch.before, branch.own) for node in range(start, end)]
        assert any(path[: len(whole)] == whole for path in paths)


@settings(deadline=None)
@given(SEQUENCES, st.integers(1, 30))
def test_trees_are_a_partition_within_their_budget(sequences, budget):
    samples = tensors(sequences)
    split = split_by_nodes(samples, budget)
    assert sorted(index for batch in split for index in batch) == list(range(len(samples)))
    for batch in split:
        assert len(batch) == 1 or build_tree([samples[index] for index in batch]).nodes <= budget


def test_trees_can_be_halved_until_every_process_has_one():
    split = split_by_nodes(tensors([[1, 2], [1, 3], [1, 4], [2]]), 100, multiple=3)
    assert sorted(len(batch) for batch in split) == [1, 1, 2]


def trajectory(*spans):
    made = tuple(TokenSpan(tuple(t), sampled, (-1.0 - t[0],) * len(t) if sampled else ()) for t, sampled in spans)
    return Trajectory("t", 0, "train", 0, made, (), Ending.SUBMITTED, Graded(1.0))


def test_a_tree_trains_the_tokens_of_each_sample_and_keeps_their_numbers():
    samples = [
        *make_samples(trajectory(([1, 2], False), ([3, 4], True)), [0.5]),
        *make_samples(trajectory(([1, 2], False), ([3, 5], True)), [-0.5]),
    ]
    tree, flat = collate_tree(samples), collate(samples)
    assert tree.tokens_BT.tolist() == [[1, 2, 3, 4, 5]]
    assert tree.position_BT.tolist() == [[0, 1, 2, 3, 3]]
    assert tree.target_N.tolist() == [3, 4, 3, 5]
    assert tree.from_N.tolist() == [1, 2, 1, 2]  # the 3 that both sampled is predicted by one state, and counts twice
    for name in ("sampler_logp_N", "advantage_N", "row_N", "turn_N"):
        assert torch.equal(getattr(tree, name), getattr(flat, name))


@pytest.mark.parametrize(("left", "right", "count"), [([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([2], [1], 0)])
def test_shared_length_by_hand(left, right, count):
    assert shared_length(torch.tensor(left), torch.tensor(right)) == count
