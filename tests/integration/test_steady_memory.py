"""A thousand updates of the learner and a thousand turns of the engine leave nothing behind.

Counted is what is alive, rather than memory, of which allocators keep some. What each step leaves behind is there as
often as there are steps; the bound is one in nine of them.
"""

import asyncio
import gc
import sys
from collections import deque
from dataclasses import dataclass

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from deepswe.config import AlgorithmConfig, TrainingConfig
from deepswe.policy.base import Sampling
from deepswe.policy.embedded import EmbeddedPolicy
from deepswe.training.learner import Learner
from deepswe.types import Ending, Graded, TokenSpan, Trajectory


@dataclass(frozen=True)
class Alive:
    """What there is now.

    Attributes:
        tensors, objects: those that the garbage collector knows.
        blocks: pieces of memory of Python's allocator, so that numbers and texts count.
        places: in lists, dicts, sets and queues.
        graphs: tensors that hold what made them.
    """

    tensors: int
    objects: int
    blocks: int
    places: int
    graphs: int


def alive() -> Alive:
    getattr(sys, "_clear_internal_caches", sys._clear_type_cache)()  # it keeps names of attributes
    gc.collect()
    objects = gc.get_objects()
    tensors = [item for item in objects if issubclass(type(item), torch.Tensor)]
    return Alive(
        tensors=len(tensors),
        objects=len(objects),
        blocks=sys.getallocatedblocks(),
        places=sum(len(item) for item in objects if type(item) in (list, dict, set, deque)),
        graphs=sum(tensor.grad_fn is not None for tensor in tensors),
    )


def assert_steady(before: Alive, after: Alive, steps: int) -> None:
    assert after.graphs == 0
    for name in ("tensors", "objects", "blocks", "places"):
        grown = getattr(after, name) - getattr(before, name)
        assert grown < steps // 9, f"{grown} {name} more after {steps} steps"


def tiny() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=256,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def group(number: int) -> list[Trajectory]:
    """Three attempts, one of them solved, with tokens that differ from step to step."""
    attempts = []
    for attempt in range(3):
        sampled = TokenSpan((3, attempt, number % 31), True, (-3.4,) * 3, number)
        spans = (TokenSpan((1, 2, number % 32), False), sampled, TokenSpan((4,), False), sampled)
        grade = Graded(float(attempt == 0))
        attempts.append(Trajectory(f"t{number}", attempt, "train", number, spans, (), Ending.SUBMITTED, grade))
    return attempts


MUCH = {"packing": "tree", "epochs": 2, "activation_checkpointing": True}
MORE = {"kl_coefficient": 0.1, "importance": "token_truncated", "old_logprobs": "learner", "entropy_coefficient": 0.01}


@pytest.mark.parametrize(("steps", "training", "algorithm"), [(900, {}, {}), (135, MUCH, MORE)])
def test_updates_leave_nothing_behind(steps: int, training: dict[str, object], algorithm: dict[str, object]) -> None:
    settings = TrainingConfig.model_validate({"learning_rate": 1e-4, **training})
    learner = Learner(tiny(), settings, AlgorithmConfig.model_validate(algorithm), max_tokens=8)
    warm = steps // 9
    for number in range(warm):
        learner.update([group(number)])
    before = alive()
    for number in range(warm, warm + steps):
        learner.update([group(number)])
    assert_steady(before, alive(), steps)
    assert learner.version == (warm + steps) * settings.epochs


async def attempt(policy: EmbeddedPolicy, number: int) -> None:
    """Four turns; every other attempt gives its last one up, and half of the others meet their deadline in it."""
    stream, name = [1, 2, number % 32], f"attempt-{number}"
    for turn in range(3):
        asked = Sampling(max_tokens=2 + turn, temperature=1.0, stop_tokens=frozenset({5}), seed=number)
        stream += [*(await policy.generate(name, stream, asked, timeout_s=60)).tokens, turn]
    asked = Sampling(max_tokens=20, temperature=1.0, stop_tokens=frozenset(), seed=number)
    last = asyncio.ensure_future(policy.generate(name, stream, asked, timeout_s=60 if number % 4 else 0))
    await asyncio.sleep(0)
    if number % 2:
        last.cancel()
    await asyncio.wait([last])
    await policy.release(name)


async def attempts(policy: EmbeddedPolicy, numbers: range) -> None:
    """Four at once, with new weights after them."""
    for first in numbers[::4]:
        await asyncio.gather(*(attempt(policy, number) for number in range(first, first + 4)))
        async with policy.updating():
            policy.version += 1


def test_a_thousand_turns_leave_nothing_behind() -> None:
    with EmbeddedPolicy(tiny()) as policy:
        asyncio.run(attempts(policy, range(28)))
        before = alive()
        asyncio.run(attempts(policy, range(28, 278)))
        assert_steady(before, alive(), 1000)
