from collections.abc import Callable

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from deepswe.types import Ending, Graded, TokenSpan, Trajectory, Ungraded


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def make_model() -> Callable[..., Qwen3ForCausalLM]:
    def make(dtype: torch.dtype = torch.float64, seed: int = 0) -> Qwen3ForCausalLM:
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
        return Qwen3ForCausalLM(config).to(dtype)

    return make


@pytest.fixture
def make_group() -> Callable[..., list[Trajectory]]:
    """A group of ragged two-turn trajectories with the given rewards (None: ungraded)."""

    def make(rewards, task: str = "task", ending: Ending = Ending.SUBMITTED, seed: int = 0) -> list[Trajectory]:
        generator = torch.Generator().manual_seed(seed)

        def draw(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(0, 32, (count,), generator=generator).tolist())

        def span(count: int, sampled: bool) -> TokenSpan:
            return TokenSpan(draw(count), sampled, (-3.4,) * count if sampled else ())

        group = []
        for number, reward in enumerate(rewards):
            spans = (span(4, False), span(2 + number, True), span(3 * number + 1, False), span(3, True))
            grade = Ungraded("sandbox died", "sandbox.exec") if reward is None else Graded(reward)
            group.append(Trajectory(task, number, "train", 0, spans, (), ending, grade))
        return group

    return make
