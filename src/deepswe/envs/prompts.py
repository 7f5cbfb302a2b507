"""What the agent is told at the start."""

from __future__ import annotations

from collections.abc import Sequence

from deepswe.config import AgentConfig
from deepswe.tools.calls import document_calls
from deepswe.tools.declare import Tool
from deepswe.types import Message

_ROLE = """You are a software engineer. You work on a repository in {root} through tools, until the issue that the \
user gives you is resolved, and then submit your work.{tools}

Reminders:
- Think first, then make exactly one call in each turn. Only the first call of a turn counts.
- The answer to your call comes in the next message. Wait for it.
- Look before you edit: view the code that you are going to change.
- When you are done, call finish. Work that is not submitted does not count."""

_ISSUE = """The repository in {root} has this issue:

<issue>
{issue}
</issue>

Change the repository so that the issue is resolved.

- Find the cause, reproduce it where that is cheap, fix it, and check the fix, its edge cases included.
- Keep the change small. The tests for this issue are written already and you do not see them: do not edit tests.
- There is no network. What you need is installed."""


def opening_messages(issue: str, agent: AgentConfig, tools: Sequence[Tool], root: str) -> list[Message]:
    """The messages that start an attempt: two with `agent.prompt` "full", the bare issue with "brief".

    With native calls the tools are left to the chat template, which declares them in the model family's own words.
    """
    if agent.prompt == "brief":
        return [Message("user", issue)]
    documented = "" if agent.format == "native" else "\n\n" + document_calls(tools, agent.format)
    system = _ROLE.format(root=root, tools=documented)
    return [Message("system", system), Message("user", _ISSUE.format(root=root, issue=issue))]
