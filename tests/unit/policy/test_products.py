from collections.abc import Iterator

import pytest
import torch
from torch import nn

from deepswe.policy.products import Product


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Matrices are laid out by how many threads compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [7, 128, 1024])
@pytest.mark.parametrize("outputs", [(30, 5), (1030, 5)])
@pytest.mark.parametrize("biased", [(False, False), (True, False), (True, True)])
def test_products_are_those_of_each_map_side_by_side(
    kind: torch.dtype, inputs: int, outputs: tuple[int, int], biased: tuple[bool, bool]
) -> None:
    torch.manual_seed(0)
    maps = [nn.Linear(inputs, count, bias=bias) for count, bias in zip(outputs, biased, strict=True)]
    product = Product(maps, kind)
    tolerance = 1e-4 if kind == torch.float32 else 0.05
    with torch.inference_mode():
        for rows in (1, 3, 40):
            states_TK = torch.randn(rows, inputs)
            made = product(states_TK)
            assert made.dtype == kind
            expected = torch.cat([of(states_TK) for of in maps], dim=-1)
            torch.testing.assert_close(made.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [1, 100, 1100])
def test_a_product_keeps_the_weights_that_it_was_made_of(size: int) -> None:
    only = nn.Linear(size, size, bias=False)
    states_TK = torch.randn(4, size)
    before = only(states_TK)
    product = Product([only], torch.float32)
    with torch.no_grad():
        only.weight.mul_(2.0)
    torch.testing.assert_close(product(states_TK), before, rtol=1e-4, atol=1e-4)
