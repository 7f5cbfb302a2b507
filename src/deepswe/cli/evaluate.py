"""`deepswe eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from deepswe.config import Recipe
    from deepswe.progress import Progress
    from deepswe.session.evaluate import Actor

Who = Literal["model", "endpoint", "reference", "noop"]


def evaluate(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change, such as run.name=try.")] = None,
    policy: Annotated[
        Who,
        typer.Option(
            help="The recipe's model, loaded here; the model behind its endpoint; the suite's reference solver; "
            "or one that submits nothing."
        ),
    ] = "model",
    checkpoint: Annotated[
        str, typer.Option(help="Of a run instead of the recipe's model: RUN, or RUN@STEP. With --policy model.")
    ] = "",
    split: Annotated[str, typer.Option(help="Which tasks; empty takes the first of evaluation.splits.")] = "",
    attempts: Annotated[int, typer.Option(min=0, help="At each task; 0 takes evaluation.attempts.")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="At most this many tasks; 0 takes evaluation.tasks.")] = 0,
    concurrency: Annotated[int, typer.Option(min=0, help="Attempts in flight; 0 takes rollout.concurrency.")] = 0,
    max_dollars: Annotated[float, typer.Option(min=0, help="Begin no attempt once this is spent; 0: no limit.")] = 0,
    max_wall_s: Annotated[float, typer.Option(min=0, help="Begin no attempt after this time; 0: no limit.")] = 0,
    record: Annotated[Path | None, typer.Option(help="Where a cassette goes, for `deepswe replay`.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on; attempts that are there stay as they are.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Evaluate any policy on any tasks: pass@1 with its intervals, pass@k, what it used, how attempts ended."""
    from deepswe.config import load_recipe
    from deepswe.errors import ConfigError

    wanted = load_recipe(recipe, overrides or ())
    if checkpoint and policy != "model":
        raise ConfigError(f"--checkpoint {checkpoint} goes with --policy model, not with {policy}")

    from deepswe.cli.evaluate_live import LiveEvaluation
    from deepswe.cli.evaluate_tables import evaluation_tables, show
    from deepswe.cli.lines import warn
    from deepswe.session.evaluate import Plan, run_evaluation

    plan = Plan(
        split=split or wanted.evaluation.splits[0],
        attempts=attempts or wanted.evaluation.attempts,
        limit=limit or wanted.evaluation.tasks,
        concurrency=concurrency,
        max_dollars=max_dollars,
        max_wall_s=max_wall_s,
    )
    with LiveEvaluation() as live:
        wanted, actor = choose(wanted, policy, checkpoint, live)
        done = run_evaluation(wanted, plan, actor, resume=resume, progress=live, watch=live.watch, tape=record)
    if as_json:
        print(json.dumps({"run": str(done.run), "phase": done.phase, "stopped": done.stopped, **done.table}))
    else:
        spent = f"  {done.spent:.4f} dollars spent in all" if done.spent else ""
        show(evaluation_tables(f"{actor.name} on {plan.split}", done.table), f"{done.run}:{done.phase}{spent}")
    if done.stopped:
        warn(f"deepswe: stopped early: {done.stopped}; go on with --resume and a larger budget")


def replay(
    cassette: Annotated[Path, typer.Argument(help="Made by `deepswe eval --record`.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Play a cassette back without its model and its sandboxes; exit code 1 where it does not come out the same."""
    from deepswe.cli.evaluate_tables import evaluation_tables, show
    from deepswe.cli.lines import warn
    from deepswe.evaluation.summary import summarise
    from deepswe.session.cassette_play import play

    played = play(cassette)
    table = summarise(played.trajectories, planned=len(played.trajectories))
    if as_json:
        print(json.dumps({"different": played.different, **table}))
    else:
        show(evaluation_tables(cassette.name, table))
    for name in played.different:
        warn(f"deepswe: not the same: {name}")
    if played.different:
        raise typer.Exit(1)


def choose(recipe: Recipe, policy: Who, checkpoint: str, progress: Progress) -> tuple[Recipe, Actor]:
    """Who acts, and the recipe with that model in it. Only what it needs is imported.

    Raises:
        ConfigError: what it needs is not installed, or not there.
    """
    from deepswe.optional import optional_module
    from deepswe.session.evaluate import noop_actor, reference_actor

    if policy == "reference":
        return recipe, reference_actor()
    if policy == "noop":
        return recipe, noop_actor()
    if policy == "endpoint":
        optional_module("aiohttp", "remote", "ask a model that somebody serves")
        from deepswe.session.evaluate_remote import endpoint_actor

        return recipe, endpoint_actor(recipe.endpoint)
    optional_module("torch", "train", "load a model here")
    from deepswe.session.evaluate_model import model_actor, with_checkpoint

    wanted = with_checkpoint(recipe, checkpoint)
    return wanted, model_actor(wanted, progress)
