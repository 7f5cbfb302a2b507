import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from deepswe.algorithms.packing import Branch
from deepswe.algorithms.prefix import build_tree
from deepswe.training import forward_parts
from deepswe.training.forward_parts import Part, attend, attend_backward, attend_in_parts, parts_of, thinned

SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=6)


def branches_of(sequences):
    return build_tree([torch.tensor(tokens) for tokens in sequences]).branches


def seen_by(branches):
    """Which keys (columns) each query (row) of a row of branches sees."""
    size = branches[-1].own[1]
    seen = torch.zeros(size, size, dtype=torch.int64)
    for branch in branches:
        for start, end in branch.before:
            seen[slice(*branch.own), start:end] = 1
        for token in range(*branch.own):
            seen[token, branch.own[0] : token + 1] = 1
    return seen


def one_by_one(parts):
    """(queries, keys, causal) of each of the parts."""
    for part in parts:
        for number in range(part.times):
            queries, keys = (
                (start + number * apart, end + number * apart)
                for (start, end), apart in zip((part.queries, part.keys), part.apart, strict=True)
            )
            yield queries, keys, part.causal


@pytest.fixture(autouse=True)
def _(monkeypatch):
    """Parts that are cut where a test's sequences are long enough for it."""
    monkeypatch.setattr(forward_parts, "CUT", 3)
    monkeypatch.setattr(forward_parts, "SHORT", 8)


@settings(deadline=None)
@given(SEQUENCES)
def test_every_query_has_each_of_its_keys_in_one_part(sequences):
    branches = branches_of(sequences)
    counted = torch.zeros_like(seen_by(branches))
    for queries, keys, causal in one_by_one(parts_of(branches)):
        square = torch.ones(queries[1] - queries[0], keys[1] - keys[0], dtype=torch.int64)
        counted[slice(*queries), slice(*keys)] += square.tril() if causal else square
    assert torch.equal(counted, seen_by(branches))


@settings(deadline=None)
@given(SEQUENCES)
def test_each_query_has_itself_in_its_first_part_and_only_there(sequences):
    parts = list(one_by_one(parts_of(branches_of(sequences))))
    own = [(queries, keys) for queries, keys, causal in parts if causal]
    assert [causal for _, _, causal in parts[: len(own)]] == [True] * len(own)
    assert all(queries == keys for queries, keys in own)


def test_neighbours_that_branch_off_at_one_place_are_one_part():
    branches = (Branch((0, 6), ()), Branch((6, 8), ((0, 4),)), Branch((8, 9), ((0, 4),)), Branch((9, 10), ((0, 2),)))
    assert [part for part in parts_of(branches) if part.keys in ((0, 4), (0, 2))] == [
        Part((6, 9), (0, 4), False),
        Part((9, 10), (0, 2), False),
    ]


def test_a_short_stretch_is_cut_and_a_long_one_is_not():
    assert parts_of([Branch((0, 7), ())]) == [
        Part((0, 3), (0, 3), True),
        Part((3, 7), (3, 7), True),
        Part((3, 7), (0, 3), False),
    ]
    assert parts_of([Branch((0, 4), ())]) == [Part((0, 4), (0, 4), True)]
    assert parts_of([Branch((0, 8), ())]) == [Part((0, 8), (0, 8), True)]


def test_parts_alike_are_one_call_of_the_kernel():
    alike = [Branch((start, start + 2), ()) for start in (0, 2, 4)]
    assert parts_of([*alike, Branch((6, 7), ())]) == [
        Part((0, 2), (0, 2), True, times=3, apart=(2, 2)),
        Part((6, 7), (6, 7), True),
    ]
    (last,) = thinned(alike, torch.tensor([1, 3, 5]), torch.float64)
    assert last[:2] == ((0, 1), (0, 2))
    assert last[4:] == (3, (1, 2))
    assert last.mask.tolist() == [[[[0.0, 0.0]]]] * 3


def test_parts_alike_at_other_distances_are_calls_of_their_own():
    branches = [Branch((0, 2), ()), Branch((2, 3), ()), Branch((3, 5), ()), Branch((5, 7), ())]
    assert parts_of(branches) == [
        Part((0, 2), (0, 2), True),
        Part((2, 3), (2, 3), True),
        Part((3, 5), (3, 5), True, times=2, apart=(2, 2)),
    ]


@settings(deadline=None, max_examples=40)
@given(SEQUENCES)
def test_outcome_and_gradients_are_those_of_one_masked_attention(sequences):
    branches = branches_of(sequences)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(1, 2, branches[-1].own[1], 4, dtype=torch.float64, generator=generator) for _ in range(4)]
    weights = states.pop()
    found, wanted = [], []
    for made in (found, wanted):
        inputs = [s.clone().requires_grad_() for s in states]
        if made is found:
            gathered = attend_in_parts(*inputs, parts_of(branches), scaling=0.7)
        else:
            gathered = scaled_dot_product_attention(*inputs, attn_mask=seen_by(branches).bool(), scale=0.7)
        (gathered * weights).sum().backward()
        made += [gathered.detach(), *(s.grad for s in inputs)]
    for got, right in zip(found, wanted, strict=True):
        assert torch.allclose(got, right, atol=1e-12)


def test_a_gradient_without_strides_serves():
    query, key, value = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    attend_in_parts(query, key, value, parts_of([Branch((0, 5), ())]), scaling=None).sum().backward()
    assert torch.allclose(value.grad.sum(), torch.tensor(40.0))  # each query's weights add up to 1


def test_states_of_half_the_width_are_added_up_in_float32():
    generator = torch.Generator().manual_seed(0)
    branches = branches_of([[0, 0, 1, 1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0], [1]])
    exact = [torch.randn(1, 2, branches[-1].own[1], 8, generator=generator).bfloat16() for _ in range(3)]
    narrow, wide = ([s.to(kind, copy=True).requires_grad_() for s in exact] for kind in (torch.bfloat16, torch.float32))
    for inputs in (narrow, wide):
        attend_in_parts(*inputs, parts_of(branches), scaling=None).square().sum().backward()
    for got, right in zip(narrow, wide, strict=True):
        assert got.grad.dtype == torch.bfloat16
        assert torch.allclose(got.grad.float(), right.grad, atol=0.05, rtol=0.05)


@settings(deadline=None)
@given(SEQUENCES, st.randoms(use_true_random=False))
def test_some_queries_alone_gather_and_give_back_what_they_do_among_all(sequences, random):
    branches = branches_of(sequences)
    count = branches[-1].own[1]
    kept_R = torch.tensor(sorted(random.sample(range(count), random.randint(1, count))))
    generator = torch.Generator().manual_seed(2)
    query, gradient = (torch.randn(1, 4, count, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    key, value = (torch.randn(1, 2, count, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    whole, some = parts_of(branches), thinned(branches, kept_R, torch.float64)
    made, total = attend(query, key, value, whole, 0.7)
    few, few_total = attend(query[:, :, kept_R], key, value, some, 0.7)
    assert torch.allclose(few, made[:, :, kept_R], atol=1e-12)
    only = torch.zeros_like(gradient).index_copy_(2, kept_R, gradient[:, :, kept_R])
    wanted = attend_backward(only, query, key, value, made, total, whole, 0.7)
    found = attend_backward(gradient[:, :, kept_R], query[:, :, kept_R], key, value, few, few_total, some, 0.7)
    assert torch.allclose(found[0], wanted[0][:, :, kept_R], atol=1e-12)
    assert torch.allclose(found[1], wanted[1], atol=1e-12)
    assert torch.allclose(found[2], wanted[2], atol=1e-12)
