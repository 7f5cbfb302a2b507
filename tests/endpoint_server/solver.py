"""What the pretended model says: the reference solver's next call, from nothing but the conversation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from deepswe.config import MicroTasks
from deepswe.tasks.synth.micro.making import micro_task_set
from deepswe.tasks.synth.micro.solver import micro_solver
from deepswe.types import ToolCall

_ISSUE = re.compile(r"<issue>\n(.*?)\n</issue>", re.DOTALL)
_PLAN = re.compile(r"Plan (\d+)\.")


class Solver:
    """Stateless. The first turn of a conversation picks a plan by the request's seed and says it; later ones read it.

    Args:
        tasks: as of the recipe under test.
        mistakes: share of the plans that are wrong.
    """

    def __init__(self, tasks: MicroTasks, mistakes: float = 0.5) -> None:
        made = micro_task_set(tasks)
        self._tasks = {task.problem_statement.strip(): (task, made.hidden[task.id]) for task in made.tasks}
        self._mistakes = mistakes

    def turn(self, texts: Sequence[Mapping[str, str]], seed: int) -> tuple[str, ToolCall]:
        """The text and the call of the next turn.

        Args:
            texts: the conversation as {role, content}, with what tools answered as role "tool" or "user".
            seed: of the request.
        """
        opening = next(message["content"] for message in texts if message["role"] == "user")
        found = _ISSUE.search(opening)
        task, hidden = self._tasks[(found[1] if found else opening).strip()]
        start = next((at for at, message in enumerate(texts) if message["role"] == "assistant"), len(texts))
        said = texts[start:]
        plan = int(_PLAN.search(said[0]["content"])[1]) if said else seed % 1000  # type: ignore[index]
        calls = micro_solver(task, hidden, seed=plan, mistakes=self._mistakes)
        call = next(calls)
        for message in said:
            if message["role"] != "assistant":
                call = calls.send(message["content"])
        return (f"Plan {plan}." if not said else "On."), call


def flatten(body: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages of either format as {role, content}; calls are left out."""
    rows = []
    for message in body["messages"]:
        content = message.get("content")
        if isinstance(content, str) or content is None:
            rows.append({"role": message["role"], "content": content or ""})
            continue
        for block in content:
            if block["type"] == "text":
                rows.append({"role": message["role"], "content": block["text"]})
            elif block["type"] == "tool_result":
                rows.append({"role": "tool", "content": block["content"]})
    return rows
