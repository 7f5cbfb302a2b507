"""The recipe of a verifier: which runs it learns from, what it reads, and how it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from deepswe.config import (
    Fraction,
    ModelConfig,
    PositiveFloat,
    PositiveInt,
    RunConfig,
    Section,
    build_section,
    read_tree,
)


class VerifierData(Section):
    """Judged attempts."""

    runs: tuple[Path, ...]
    """Run directories whose graded trajectories are the examples."""
    phases: tuple[str, ...] = ("train",)
    """Only trajectories of phases that begin with one of these. Evaluations of held-out tasks are for measuring."""
    split_by: str = "repo"
    """What is whole on one side of the split: "task", or a tag of the tasks such as "repo" or "structure"."""
    heldout_share: Fraction = 0.1
    """Share of these groups that the verifier is measured by, not trained on."""
    most: int = Field(default=0, ge=0)
    """At most this many examples of each side of the split; 0 takes all."""


class VerifierPrompt(Section):
    """What the verifier reads."""

    style: Literal["full", "brief"] = "full"
    """`full` says what is asked; `brief` gives the texts alone, for a small model that learns the question."""
    budget: PositiveInt = 24_000
    """Tokens of a prompt; longer ones are condensed."""
    thinking: bool = False
    """Leave the chat template's thinking mode on where it has one; the answer then follows no thought."""


class VerifierTraining(Section):
    """How it is trained."""

    epochs: PositiveFloat = 2.0
    """Passes over the balanced examples."""
    batch_size: PositiveInt = 16
    learning_rate: PositiveFloat = 1e-5
    warmup_steps: int = Field(default=10, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)
    grad_clip: PositiveFloat = 1.0
    tokens_per_microbatch: PositiveInt = 16_384
    """Tokens in one forward and backward pass."""


class VerifierRecipe(Section):
    """A verifier."""

    version: Literal[1] = 1
    run: RunConfig
    model: ModelConfig = ModelConfig()
    data: VerifierData
    prompt: VerifierPrompt = VerifierPrompt()
    training: VerifierTraining = VerifierTraining()


def load_verifier_recipe(path: Path, overrides: Sequence[str] = ()) -> VerifierRecipe:
    """Read a recipe.

    Args:
        path: a TOML file.
        overrides: `section.key=value` texts, applied in order.

    Raises:
        ConfigError: the file cannot be read, is no TOML, has an unknown key or a wrong value; one line per problem.
    """
    return build_section(VerifierRecipe, read_tree(path, overrides), origin=str(path))
