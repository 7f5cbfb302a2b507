from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from deepswe.policy.rows import Pass

HEADS, LANES, SIZE, CAPACITY, ROWS = 4, 2, 8, 96, 9
ROWS_OF_A_PASS = [
    pytest.param([(slot, 10 + slot % 3, 1) for slot in range(ROWS)], id="one token each, like lengths"),
    pytest.param([(0, 3, 1), (1, 90, 1), (4, 0, 1), (5, 50, 1)], id="one token each, lengths apart"),
    pytest.param([(slot, 4, 5) for slot in range(ROWS)], id="as many tokens each"),
    pytest.param([(slot, slot, 2 + slot) for slot in range(ROWS)], id="more and more tokens"),
    pytest.param([(1, 5, 1), (4, 6, 1), (7, 2, 1), (2, 3, 4), (6, 0, 3)], id="with rows between that have none"),
    pytest.param([(2, 7, 1), (3, 9, 1), (0, 0, 40), (1, 0, 2), (5, 30, 3), (8, 1, 2)], id="of all kinds"),
    pytest.param([(3, 0, 96)], id="one whole row"),
]


def storage(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, LANES, CAPACITY, SIZE, generator=generator, dtype=torch.float64)


def one_by_one(
    rows: list[tuple[int, int, int]], query: Tensor, keys: Tensor, values: Tensor, window: int | None
) -> Tensor:
    made, place = torch.empty_like(query), 0
    for slot, start, count in rows:
        for at in range(start, start + count):
            first = 0 if window is None else max(0, at + 1 - window)
            for head in range(HEADS):
                lane = head // (HEADS // LANES)
                scores = keys[slot, lane, first : at + 1] @ query[place, head] * 0.3
                made[place, head] = scores.softmax(0) @ values[slot, lane, first : at + 1]
            place += 1
    return made


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("rows", ROWS_OF_A_PASS)
def test_each_token_gathers_from_its_own_row_up_to_itself(rows: list[tuple[int, int, int]], window: int | None) -> None:
    keys, values = storage(0), storage(1)
    query = torch.randn(sum(count for _, _, count in rows), HEADS, SIZE, dtype=torch.float64)
    made = Pass(rows, windows=[window], device="cpu").attend(0, query, keys, values, 0.3)
    torch.testing.assert_close(made, one_by_one(rows, query, keys, values, window))


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param({slot: 14 + slot % 3 for slot in range(ROWS)}, id="side by side"),
        pytest.param({0: 14, 1: 3, 4: 45, 5: 40, 8: 20}, id="with rows between that have none"),
    ],
)
def test_a_pass_that_moved_on_is_that_of_one_position_later(lengths: dict[int, int]) -> None:
    keys, values = storage(0), storage(1)
    query = torch.randn(len(lengths), HEADS, SIZE, dtype=torch.float64)
    rows = Pass([(slot, start, 1) for slot, start in lengths.items()], windows=[None, 5], device="cpu")
    for ahead in range(45):  # more than what a mask is made for
        now = [(slot, start + ahead, 1) for slot, start in lengths.items()]
        assert rows.longest == max(lengths.values()) + 1 + ahead
        for layer, window in enumerate((None, 5)):
            made = rows.attend(layer, query, keys, values, 0.3)
            torch.testing.assert_close(made, one_by_one(now, query, keys, values, window))
        rows.advance()


def test_layers_of_other_heads_are_attended_along_the_same_pass() -> None:
    # The second shape costs more to read, so that fewer rows are attended at once.
    counts = {2: 2, 3: 6, 7: 6}
    rows = Pass([(2, 5, 2), (3, 0, 6), (7, 0, 6)], windows=[None, None], device="cpu")
    for layer, (heads, lanes, size) in enumerate([(4, 1, 16), (16, 8, 128)]):
        keys, values = torch.randn(2, ROWS, lanes, 64, size).unbind()
        query, first = torch.randn(14, heads, size), 0
        made = rows.attend(layer, query, keys, values, 0.1)
        for slot, count in counts.items():
            alone = Pass([(slot, 5 if slot == 2 else 0, count)], windows=[None, None], device="cpu")
            expected = alone.attend(layer, query[first : first + count], keys, values, 0.1)
            torch.testing.assert_close(made[first : first + count], expected)
            first += count


@pytest.mark.parametrize("rows", ROWS_OF_A_PASS)
def test_what_is_not_written_yet_is_never_read(rows: list[tuple[int, int, int]]) -> None:
    keys, values = storage(0), storage(1)
    query = torch.randn(sum(count for _, _, count in rows), HEADS, SIZE, dtype=torch.float64)
    expected = Pass(rows, windows=[None], device="cpu").attend(0, query, keys, values, 0.3)
    for slot, start, count in rows:
        keys[slot, :, start + count :] = 1e6
        values[slot, :, start + count :] = -1e6
    torch.testing.assert_close(Pass(rows, windows=[None], device="cpu").attend(0, query, keys, values, 0.3), expected)


def test_rows_of_like_length_side_by_side_are_attended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(query: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(len(query))
        return scaled_dot_product_attention(query, *args, **options)

    monkeypatch.setattr("deepswe.policy.rows.scaled_dot_product_attention", counted)
    wide = torch.zeros(ROWS, LANES, 4096, SIZE)
    for rows, expected in (
        ([(slot, 20, 1) for slot in range(ROWS)], [ROWS]),
        ([(slot, 20, 7) for slot in range(ROWS)], [ROWS]),
        ([(0, 20, 1), (1, 20, 1), (2, 500, 1), (3, 500, 1)], [4]),  # another call costs more than what is wasted
        ([(0, 20, 1), (1, 20, 1), (2, 4000, 1), (3, 4000, 1)], [2, 2]),
        ([(0, 20, 1), (1, 20, 1), (3, 20, 1), (7, 20, 1)], [8]),  # with those between
        ([(0, 4000, 1), (8, 4000, 1)], [1, 1]),  # too long for that
        ([(0, 20, 1), (1, 20, 1), (2, 0, 2048)], [2, 1]),
    ):
        calls.clear()
        count = sum(count for _, _, count in rows)
        Pass(rows, windows=[None], device="cpu").attend(0, torch.zeros(count, HEADS, SIZE), wide, wide, 0.3)
        assert calls == expected
