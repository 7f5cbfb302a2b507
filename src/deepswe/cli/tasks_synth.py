"""`deepswe tasks synth` and `deepswe tasks grow`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Kind(StrEnum):
    """How tasks are made."""

    mutation = "mutation"
    commits = "commits"


def synth(
    project: Annotated[
        str, typer.Argument(help="A PyPI name (toolz, toolz==1.2.0), a source tree, a .tar.gz, a git directory or URL.")
    ],
    kind: Annotated[Kind, typer.Option(help="Put bugs in, or take the bugs of the history.")] = Kind.mutation,
    count: Annotated[int, typer.Option(min=1, help="How many tasks.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the choice of bugs and of the issue texts.")] = 0,
    out: Annotated[Path, typer.Option(help="The task set to write: .parquet, .jsonl.zst or .jsonl.")] = Path(
        "tasks.jsonl"
    ),
    mutations: Annotated[list[str] | None, typer.Option("--mutation", help="Only these kinds of mutation.")] = None,
    llm_url: Annotated[str, typer.Option(help="An OpenAI-compatible endpoint that rewrites the issues.")] = "",
    llm_model: Annotated[str, typer.Option(help="The model's name there.")] = "",
    setup_timeout_s: Annotated[float, typer.Option(min=1, help="For one step of pip.")] = 600.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted search.")] = False,
) -> None:
    """Make tasks from a repository that has tests; prints counts by verdict as JSON."""
    from deepswe.cli.progress import TerminalProgress
    from deepswe.errors import ConfigError
    from deepswe.optional import optional_module
    from deepswe.tasks.distributions import Pip
    from deepswe.tasks.layers import LayerCache

    if bool(llm_url) != bool(llm_model):
        raise ConfigError("--llm-url and --llm-model go together; give both or none")
    if kind is Kind.commits:
        if mutations or llm_url:
            raise ConfigError("--mutation and --llm-url are for --kind mutation; leave them out")
        from deepswe.cli.tasks_commits import commits

        commits(project, out, tasks=count, resume=resume)
        return
    optional_module("libcst", "synth", "make mutations")
    from deepswe.tasks.synth.find import Plan
    from deepswe.tasks.synth.language import Endpoint, LanguageWriter
    from deepswe.tasks.synth.operators.catalog import KINDS
    from deepswe.tasks.synth.run import synthesise

    unknown = [name for name in mutations or () if name not in KINDS]
    if unknown:
        raise ConfigError(f"--mutation {unknown[0]!r} is no kind of mutation; there are {', '.join(KINDS)}")
    writer = LanguageWriter(Endpoint(llm_url, llm_model)) if llm_url else None
    plan = Plan(target=count, seed=seed, kinds=tuple(mutations or ()), confirm=True)
    with TerminalProgress() as progress:
        made = synthesise(
            project,
            plan,
            out,
            LayerCache.default(),
            progress,
            writer=writer,
            pip=Pip(timeout_s=setup_timeout_s),
            resume=resume,
        )
        if writer is not None and writer.failures:
            progress.say(f"{writer.failures} issues keep their draft: {writer.last_failure}")
    print(json.dumps({**asdict(made), "out": str(out)}))


def grow(
    repositories: Annotated[list[str] | None, typer.Argument(help="Repositories of the set; all if none.")] = None,
    add: Annotated[list[str] | None, typer.Option(help="First add this one: a PyPI name with its version.")] = None,
    target: Annotated[int, typer.Option(min=1, help="Tasks that each repository shall have.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the choice of bugs and of the issue texts.")] = 11,
    file: Annotated[Path | None, typer.Option(help="The file of recipes; by default the bundled one.")] = None,
    journals: Annotated[Path, typer.Option(help="Directory of the journals of unfinished searches.")] = Path("grow"),
    budget_s: Annotated[float, typer.Option(min=1, help="Seconds for each repository.")] = 1800.0,
) -> None:
    """Grow the bundled set of recipes; goes on where an interrupted call was. Prints verdicts as JSON."""
    from deepswe.cli.progress import TerminalProgress
    from deepswe.errors import TaskError
    from deepswe.optional import optional_module
    from deepswe.tasks.bundled import DATA, load_catalogue, write_catalogue
    from deepswe.tasks.distributions import Pip
    from deepswe.tasks.layers import LayerCache

    optional_module("libcst", "synth", "make mutations")
    from deepswe.tasks.synth.grow import GROWTH, grow_catalogue, with_repository
    from deepswe.tasks.synth.project import open_project

    place, cache = file or DATA, LayerCache.default()
    plan = replace(GROWTH, target=target, seed=seed, budget_s=budget_s)
    verdicts: dict[str, object] = {}
    with TerminalProgress() as progress:
        for spec in add or ():
            recipe = open_project(spec, cache, Pip(), progress).recipe
            write_catalogue(with_repository(load_catalogue(place), recipe), place)
        known = load_catalogue(place).names
        if unknown := [name for name in repositories or () if name not in known]:
            raise TaskError(f"{place} has no repository {', '.join(unknown)}; name some of {', '.join(known)}")
        for name in repositories or known:
            try:
                verdicts |= grow_catalogue(place, cache, plan, [name], progress, journals=journals)
            except TaskError as error:
                progress.say(f"{name}: {error}")
                verdicts[name] = str(error)
    print(json.dumps({"verdicts": verdicts, "tasks": len(load_catalogue(place).tasks)}))
