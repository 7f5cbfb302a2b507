"""What `deepswe plan` reckons against what is measured: peak memory on this CPU, and published figures of GPUs.

Three recipes train two updates each, in processes of their own; the peak of their anonymous memory over what was there
before the model is compared with the plan of the same recipe. For GPUs the plan's tokens a second are compared
with figures that others have published. Prints one JSON object as its last line:

- `cases`: for each, `name`, `predicted` and `measured`
- `max_error`: the largest relative difference

Exits 0 only where it is at most 0.10. `--quick` takes the smallest of the CPU recipes.

Of the planner's constants one, the learner's share of a GPU's peak, was set by the two published figures; so they show
that one number fits both, a small model on one GPU and a larger one on eight.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import torch
from peak_memory import PeakMemory
from transformers import Qwen3ForCausalLM

from deepswe.config import Recipe, build_recipe
from deepswe.session.plan import model_configuration, plan_recipe
from deepswe.training.learner import Learner
from deepswe.training.plan import learner_tokens_per_s
from deepswe.training.plan_trace import model_facts
from deepswe.types import Ending, Graded, TokenSpan, Trajectory

TOLERANCE = 0.10
PUBLISHED = {
    "Qwen3-4B, all weights, 65,536 tokens, 8 H200: tokens/s": ("Qwen/Qwen3-4B", "h200", 8, 65_536, 29_500.0),
    "Qwen3-0.6B, all weights, 65,536 tokens, 1 H100: tokens/s": ("Qwen/Qwen3-0.6B", "h100", 1, 65_536, 11_900.0),
}
"""Of prime-rl; the length of the second is not said there, and taken to be the first's."""

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""Each tensor gets pages of its own and gives them back: what is measured is tensors, not the C library's fragments."""

CASES: dict[str, dict[str, Any]] = {
    "deep, short rows": {
        "model": {"scratch": {"hidden_size": 256, "layers": 8, "heads": 4, "intermediate_size": 768}},
        "length": 512,
        "rows": 4,
        "training": {},
    },
    "long rows, layers computed again": {
        "model": {"scratch": {"hidden_size": 512, "layers": 6, "heads": 8, "intermediate_size": 1536}},
        "length": 3072,
        "rows": 1,
        "training": {"activation_checkpointing": True},
    },
    "a large vocabulary": {
        "model": {
            "scratch": {"hidden_size": 256, "layers": 3, "heads": 4, "intermediate_size": 512, "vocabulary": 100_000}
        },
        "length": 1024,
        "rows": 2,
        "training": {},
    },
}


def recipe_of(name: str) -> Recipe:
    case = CASES[name]
    tree = {
        "run": {"name": "planned", "threads": 1},
        "model": case["model"],
        "tasks": {"kind": "frozenlake"},
        "rollout": {
            "tasks_per_step": 1,
            "group_size": 2 * case["rows"],
            "max_tokens": case["length"],
            "max_turn_tokens": case["length"],
        },
        "algorithm": {"kl_start_every": 0},
        "training": {"tokens_per_microbatch": case["rows"] * case["length"], **case["training"]},
    }
    return build_recipe(tree, origin=name)


def predicted_mib(recipe: Recipe) -> float:
    """The learner's share of the plan; the engine is not run here."""
    parts = plan_recipe(recipe).learner_gib
    return 1024 * sum(size for name, size in parts.items() if not name.startswith("engine"))


def measured_mib(recipe: Recipe) -> float:
    """The peak of two updates over what there was before the model; in a process of its own."""
    torch.set_num_threads(1)
    rollout = recipe.rollout
    config = model_configuration(recipe.model)
    warm_up()
    torch.manual_seed(0)
    with PeakMemory() as peak:
        learner = Learner(Qwen3ForCausalLM(config), recipe.training, recipe.algorithm, max_tokens=rollout.max_tokens)
        for _ in range(2):
            learner.update([make_group(rollout.group_size, rollout.max_tokens, config.vocab_size)])
    return peak.mib


def warm_up() -> None:
    """One update of a very small model, so that libraries which load themselves at their first use are there."""
    tree = {"run": {"name": "warm"}, "tasks": {"kind": "frozenlake"}, "model": {"scratch": {"hidden_size": 32}}}
    recipe = build_recipe({**tree, "algorithm": {"kl_start_every": 0}}, origin="warm-up")
    config = model_configuration(recipe.model)
    learner = Learner(Qwen3ForCausalLM(config), recipe.training, recipe.algorithm, max_tokens=16)
    learner.update([make_group(2, 16, config.vocab_size)])


def make_group(size: int, length: int, vocabulary: int) -> list[Trajectory]:
    """Attempts of full length, of which all but the first token are sampled."""
    generator = torch.Generator().manual_seed(0)

    def attempt(number: int) -> Trajectory:
        tokens = tuple(torch.randint(0, vocabulary, (length,), generator=generator).tolist())
        spans = (TokenSpan(tokens[:1], False), TokenSpan(tokens[1:], True, (-10.0,) * (length - 1)))
        return Trajectory("task", number, "train", 0, spans, (), Ending.SUBMITTED, Graded(float(number % 2)))

    return [attempt(number) for number in range(size)]


def published(name: str) -> dict[str, Any]:
    path, gpu, gpus, length, figure = PUBLISHED[name]
    tree = {
        "run": {"name": "published"},
        "model": {"path": path, "dtype": "bfloat16"},
        "tasks": {"kind": "frozenlake"},
        "training": {"activation_checkpointing": True},
        "cluster": {"gpu": gpu, "learner_gpus": gpus},
    }
    recipe = build_recipe(tree, origin=name)
    facts = model_facts(model_configuration(recipe.model))
    return {
        "name": name,
        "predicted": learner_tokens_per_s(recipe, facts, length, cores=1),
        "measured": figure,
    }


def compared(name: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--one", name],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ALLOCATOR},
    )
    measured = float(done.stdout.strip().splitlines()[-1])
    return {"name": f"{name}: MiB", "predicted": predicted_mib(recipe_of(name)), "measured": measured}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one CPU recipe instead of three")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(measured_mib(recipe_of(arguments.one)))
        return 0
    names = list(CASES)[:1] if arguments.quick else list(CASES)
    cases = [*(compared(name) for name in names), *(published(name) for name in PUBLISHED)]
    worst = max(abs(case["predicted"] - case["measured"]) / case["measured"] for case in cases)
    print(json.dumps({"cases": cases, "max_error": worst}))
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
