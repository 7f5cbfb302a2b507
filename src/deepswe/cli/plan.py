"""`deepswe plan`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from deepswe.training.plan import Plan


def plan(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to change, such as cluster.learner_gpus=8.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as one JSON object.")] = False,
) -> None:
    """Reckon memory, speed, machines and cost of a recipe before it runs; one that cannot fit is refused."""
    from deepswe.config import load_recipe

    wanted = load_recipe(recipe, overrides or ())  # a wrong recipe is told before torch is imported

    from deepswe.session.plan import check_plan

    made = check_plan(wanted)
    print(json.dumps(asdict(made)) if as_json else _text(made))


def _text(made: Plan) -> str:
    parts = [
        f"model: {made.model['parameters'] / 1e9:.3g}B parameters, {made.model['trained'] / 1e9:.3g}B trained, "
        f"{made.model['cache bytes a token'] / 1024:.0f} KiB of keys and values a token",
        f"learner, GiB on each of {made.limit_gib:.1f}: {made.learner_total_gib:.2f}",
        *_lines(made.learner_gib),
    ]
    if made.engine_gib:
        parts += [f"engine, GiB on each of {made.limit_gib:.1f}: {made.engine_total_gib:.2f}", *_lines(made.engine_gib)]
    if made.host_gib:
        parts.append(f"CPU memory for each learner process: {made.host_gib:.0f} GiB")
    speed, step, sandboxes, run = made.tokens_per_s, made.step_s, made.sandboxes, made.run
    return "\n".join(
        [
            *parts,
            f"learner {speed['learner']:,.0f} tokens/s, engine {speed['engine']:,.0f} sampled tokens/s",
            f"step {step['step']:,.0f} s: learner {step['learner']:,.0f} s, rollout {step['rollout']:,.0f} s",
            f"sandboxes: {sandboxes['alive']:,.0f} at once, {sandboxes['cores']:,.0f} cores, "
            f"{sandboxes['memory_gib']:,.0f} GiB of memory, {sandboxes['disk_gib']:,.0f} GiB of disk",
            f"run: {run['steps']:,.0f} steps, {run['days']:.2f} days, {run['gpu_hours']:,.0f} GPU-hours, "
            f"{run['usd']:,.0f} USD",
        ]
    )


def _lines(parts: Mapping[str, float]) -> list[str]:
    return [f"  {name}: {size:.2f}" for name, size in parts.items() if size >= 0.005]
