"""Policies that need no model: the suite's reference solver, and one that submits at once."""

from __future__ import annotations

from collections.abc import Iterator

from deepswe.config import AgentConfig
from deepswe.envs.base import Suite
from deepswe.errors import ConfigError
from deepswe.policy.base import Renderer
from deepswe.policy.scripted import ScriptedPolicy
from deepswe.rollout.scheduler import Batch
from deepswe.tools.calls import render_call
from deepswe.tools.catalog import TOOLS
from deepswe.types import ToolCall

SUBMIT = ToolCall("finish", {"command": "submit"})


def reference_policy(suite: Suite, batch: Batch, renderer: Renderer, *, seed: int) -> ScriptedPolicy:
    """Plays the reference solver of each task in the batch.

    Args:
        suite: knows the solver.
        batch: what will be attempted.
        renderer: in which tokens.
        seed: the run's seed, from which the attempts get theirs.

    Raises:
        ConfigError: when an attempt begins whose task has no solver.
    """
    plan = {attempt.name: (task, attempt.seed) for task, attempt in batch.plan(seed)}

    def script(name: str) -> Iterator[str]:
        task, attempt_seed = plan[name.partition("~")[0]]
        turns = suite.reference(task, seed=attempt_seed)
        if turns is None:
            raise ConfigError(f"there is no reference solver for task {task.id!r}; use another policy or task set")
        return turns

    return ScriptedPolicy(renderer, script)


def noop_policy(renderer: Renderer, agent: AgentConfig) -> ScriptedPolicy:
    """Submits in its first turn, whatever the task."""
    turn = render_call(SUBMIT, agent.format, TOOLS)
    return ScriptedPolicy(renderer, lambda name: iter([turn]))
