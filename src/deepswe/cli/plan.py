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
        f"model: {_count(made.model['parameters'])} parameters, {_count(made.model['trained'])} trained, "
        f"{_size(made.model['cache bytes a token'])} of keys and values a token",
        f"learner, on each of {_gib(made.limit_gib)}: {_gib(made.learner_total_gib)}",
        *_lines(made.learner_gib),
    ]
    if made.engine_gib:
        parts += [f"engine, on each of {_gib(made.limit_gib)}: {_gib(made.engine_total_gib)}", *_lines(made.engine_gib)]
    if made.host_gib:
        parts.append(f"CPU memory for each learner process: {_gib(made.host_gib)}")
    speed, step, sandboxes, run = made.tokens_per_s, made.step_s, made.sandboxes, made.run
    return "\n".join(
        [
            *parts,
            f"learner {speed['learner']:,.0f} tokens/s, engine {speed['engine']:,.0f} sampled tokens/s",
            f"step {step['step']:,.0f} s: learner {step['learner']:,.0f} s, rollout {step['rollout']:,.0f} s",
            f"sandboxes: {sandboxes['alive']:,.0f} at once, {sandboxes['cores']:,.0f} cores, "
            f"{_gib(sandboxes['memory_gib'])} of memory, {_gib(sandboxes['disk_gib'])} of disk",
            f"run: {run['steps']:,.0f} steps, {_time(run['days'])}{_price(run)}",
            *(f"note: {note}" for note in made.notes),
        ]
    )


def _price(run: Mapping[str, float]) -> str:
    """What of the run costs anything."""
    priced = ((run["gpu_hours"], "GPU-hours"), (run["usd"], "USD"))
    return "".join(f", {amount:,.0f} {unit}" for amount, unit in priced if amount)


def _lines(parts: Mapping[str, float]) -> list[str]:
    return [f"  {name}: {_gib(size)}" for name, size in parts.items() if size]


def _count(number: float) -> str:
    """A number of parameters, in the unit that suits it."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.0f}"


def _size(size: float) -> str:
    """Bytes, in the unit that suits them."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            number = size / unit
            return f"{number:,.0f} {name}" if number >= 100 else f"{number:.3g} {name}"
    return f"{size:.0f} B"


def _gib(size: float) -> str:
    return _size(size * (1 << 30))


def _time(days: float) -> str:
    for unit, name in ((1.0, "days"), (1 / 24, "hours")):
        if days >= unit:
            return f"{days / unit:.3g} {name}"
    return f"{days * 1440:.0f} minutes"
