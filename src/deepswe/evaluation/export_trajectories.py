"""Recorded attempts in the formats of others: SWE-agent, mini-swe-agent, and ATIF, which Harbor reads.

ATIF keeps token ids and log-probs where the attempt has a model's own; the other two keep text only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from deepswe import __version__
from deepswe.policy.scripted import ByteRenderer
from deepswe.types import Ending, Message, Step, TokenSpan, Trajectory

Row = dict[str, Any]
ATIF = "ATIF-v1.7"
EXIT_STATUS: Mapping[Ending, str] = {
    Ending.SUBMITTED: "submitted",
    Ending.MAX_STEPS: "exit_steps",
    Ending.MAX_CONTEXT: "exit_context",
    Ending.MAX_COST: "exit_cost",
    Ending.GENERATION_TIMEOUT: "exit_total_execution_time",
    Ending.ENV_TIMEOUT: "exit_total_execution_time",
    Ending.ERROR: "exit_error",
}
"""Our endings in SWE-agent's words."""


@dataclass(frozen=True, slots=True)
class Exporter:
    """What every file says besides the attempt.

    Attributes:
        model: its name.
        text: the stream holds text as bytes, of an endpoint or a script: the opening can be read out of it.
        tools: declarations of the tools.
    """

    model: str
    text: bool
    tools: tuple[Mapping[str, Any], ...] = ()

    def opening(self, trajectory: Trajectory) -> tuple[Message, ...]:
        """The messages before the first turn; only the issue where the stream is a model's tokens."""
        if self.text and trajectory.spans:
            return ByteRenderer().conversation(trajectory.spans[0].tokens)
        return (Message("user", trajectory.tags.get("issue", "")),)


def parts_of(step: Step) -> tuple[str, str, str]:
    """Thinking, what was said, and the text of the call, of one turn."""
    thinking, rest = "", step.completion
    if rest.lstrip().startswith("<think>") and "</think>" in rest:
        thinking, _, rest = rest.partition("</think>")
        thinking = thinking.partition("<think>")[2].strip("\n")
        rest = rest.lstrip("\n")
    starts = [at for mark in ("<function=", "<tool_call>") if (at := rest.find(mark)) >= 0]
    cut = min(starts, default=len(rest))
    return thinking, rest[:cut].rstrip(), rest[cut:]


def to_mini_swe_agent(exporter: Exporter, trajectory: Trajectory) -> Row:
    """A `.traj.json`: info and messages."""
    messages: list[Row] = [{"role": m.role, "content": m.content} for m in exporter.opening(trajectory)]
    for step in trajectory.steps:
        messages.append({"role": "assistant", "content": step.completion})
        if step.observation:
            messages.append({"role": "user", "content": step.observation})
    info = {**_info(trajectory), "config": {"model": {"model_name": exporter.model}}}
    return {
        "info": info,
        "messages": messages,
        "instance_id": trajectory.task_id,
        "trajectory_format": "mini-swe-agent-1.1",
    }


def to_swe_agent(exporter: Exporter, trajectory: Trajectory) -> Row:
    """A `.traj`: the steps with thought, action and observation; the history as messages; info."""
    opening = exporter.opening(trajectory)
    history: list[Row] = [
        {"role": message.role, "content": message.content, "agent": "deepswe", "message_type": "system_prompt"
         if message.role == "system" else "observation"}
        for message in opening
    ]  # fmt: skip
    rows: list[Row] = []
    for step in trajectory.steps:
        thinking, said, action = parts_of(step)
        rows.append(
            {
                "action": action,
                "observation": step.observation,
                "response": step.completion,
                "thought": "\n".join(filter(None, (thinking, said))),
                "execution_time": step.environment_s,
                "state": {},
                "extra_info": {"error": step.error} if step.error else {},
            }
        )
        history.append(
            {"role": "assistant", "content": step.completion, "thought": rows[-1]["thought"], "action": action,
             "agent": "deepswe", "message_type": "action"}
        )  # fmt: skip
        if step.observation:
            history.append(
                {"role": "user", "content": step.observation, "agent": "deepswe", "message_type": "observation"}
            )
    return {
        "environment": "deepswe",
        "instance_id": trajectory.task_id,
        "trajectory": rows,
        "history": history,
        "info": {**_info(trajectory), "model_name": exporter.model},
    }


def to_atif(exporter: Exporter, trajectory: Trajectory) -> Row:
    """A trajectory of ATIF 1.7; optional fields that would be empty are left out."""
    steps: list[Row] = []
    for message in exporter.opening(trajectory):
        source = "system" if message.role == "system" else "user"
        steps.append({"step_id": len(steps) + 1, "source": source, "message": message.content})
    sampled = [tuple(spans) for sampled, spans in groupby(trajectory.spans, lambda span: span.sampled) if sampled]
    for number, step in enumerate(trajectory.steps):
        metrics = _metrics(trajectory, number, sampled[number] if number < len(sampled) else (), exporter.text)
        steps.append(_atif_step(step, len(steps) + 1, number, metrics))
    total = {name: sum(getattr(turn, name) for turn in trajectory.usage) for name in ("prompt", "completion", "cached")}
    final: Row = {"total_completion_tokens": total["completion"], "total_prompt_tokens": total["prompt"]}
    final |= {"total_cached_tokens": total["cached"], "total_cost_usd": sum(turn.dollars for turn in trajectory.usage)}
    agent: Row = {"name": "deepswe", "version": __version__, "model_name": exporter.model}
    if exporter.tools:
        agent["tool_definitions"] = [dict(tool) for tool in exporter.tools]
    return {
        "schema_version": ATIF,
        "session_id": f"{trajectory.phase}/{trajectory.task_id}/{trajectory.attempt}",
        "agent": agent,
        "steps": steps or [{"step_id": 1, "source": "user", "message": ""}],
        "final_metrics": {**(final if trajectory.usage else {}), "total_steps": max(len(steps), 1)},
        "extra": {
            "task_id": trajectory.task_id,
            "attempt": trajectory.attempt,
            "ending": trajectory.ending.value,
            "reward": trajectory.reward,
            "patch": trajectory.artifact,
        },
    }


def _atif_step(step: Step, step_id: int, number: int, metrics: Row) -> Row:
    thinking, said, action = parts_of(step)
    message = said if step.call else "\n".join((said, action)).strip()
    row: Row = {
        "step_id": step_id,
        "source": "agent",
        "message": message,
    }
    if thinking:
        row["reasoning_content"] = thinking
    result: Row = {"content": step.observation}
    if step.call is not None:
        name = f"call_{number}"
        call = {"tool_call_id": name, "function_name": step.call.name, "arguments": dict(step.call.arguments)}
        row["tool_calls"] = [call]
        result["source_call_id"] = name
    if step.observation:
        row["observation"] = {"results": [result]}
    if metrics:
        row["metrics"] = metrics
    if step.error:
        row["extra"] = {"error": step.error}
    return row


def _metrics(trajectory: Trajectory, number: int, spans: Sequence[TokenSpan], text: bool) -> Row:
    """Of one turn: an endpoint's counts, or the tokens themselves."""
    if number < len(trajectory.usage):
        turn = trajectory.usage[number]
        return {
            "prompt_tokens": turn.prompt,
            "cached_tokens": turn.cached,
            "completion_tokens": turn.completion,
            "cost_usd": turn.dollars,
        }
    if not spans or text:
        return {}
    tokens = [token for span in spans for token in span.tokens]
    return {
        "completion_tokens": len(tokens),
        "completion_token_ids": tokens,
        "logprobs": [logprob for span in spans for logprob in span.logprobs],
    }


def _info(trajectory: Trajectory) -> Row:
    usage = trajectory.usage
    return {
        "exit_status": EXIT_STATUS[trajectory.ending],
        "submission": trajectory.artifact,
        "model_stats": {
            "instance_cost": sum(turn.dollars for turn in usage),
            "tokens_sent": sum(turn.prompt for turn in usage),
            "tokens_received": trajectory.sampled_length,
            "api_calls": len(trajectory.steps),
        },
        "deepswe_version": __version__,
    }


FORMATS: Mapping[str, tuple[str, Callable[[Exporter, Trajectory], Row]]] = {
    "swe-agent": (".traj", to_swe_agent),
    "mini-swe-agent": (".traj.json", to_mini_swe_agent),
    "atif": (".trajectory.json", to_atif),
}
"""Name of a format -> how its files end, and what makes them."""
