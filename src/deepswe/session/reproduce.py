"""`deepswe reproduce`: run the arms of an experiment over several seeds, compare them, and write one page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from deepswe.analysis.reproduce import Arm, Effect, compare, measured, render_page
from deepswe.atomic import write_atomically
from deepswe.config import PositiveInt, Recipe, Section, build_section, load_recipe, read_tree
from deepswe.errors import ConfigError
from deepswe.progress import Progress
from deepswe.session.train import train_recipe
from deepswe.training.metrics import read_rows
from deepswe.training.run import write_json

FOLDER = Path("recipes/reproduce")


class ArmConfig(Section):
    """One variant: settings on top of the experiment's recipe."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    label: str
    overrides: tuple[str, ...] = ()


class ComparisonConfig(Section):
    """Which arm is measured against which, and on which side of 1 the ratio is claimed to be."""

    arm: str
    against: str
    expect: Literal["lower", "higher"]


class Experiment(Section):
    """An experiment file."""

    question: str
    recipe: str
    """The recipe that the arms vary, relative to the file."""
    overrides: tuple[str, ...] = ()
    """Settings of all arms."""
    measure: Literal["steps_to_reward", "final_reward"]
    threshold: float = 0.5
    seeds: PositiveInt = 5
    quick: tuple[str, ...] = ()
    """Settings of all arms under --quick."""
    quick_seeds: PositiveInt = 2
    arms: tuple[ArmConfig, ...]
    compare: tuple[ComparisonConfig, ...]

    @model_validator(mode="after")
    def _named(self) -> Experiment:
        names = {arm.name for arm in self.arms}
        for pair in self.compare:
            if missing := {pair.arm, pair.against} - names:
                raise ValueError(f"compare names {', '.join(sorted(missing))}, which is no arm")
        if not self.compare or len(names) != len(self.arms):
            raise ValueError("an experiment needs at least one comparison, and arms with names of their own")
        return self


def find_experiment(name: str) -> Path:
    """The file of an experiment: a path, or a name in recipes/reproduce.

    Raises:
        ConfigError: there is none.
    """
    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        return path
    found = FOLDER / f"{name}.toml"
    if found.is_file() and name != "base":
        return found
    known = sorted(file.stem for file in FOLDER.glob("*.toml") if file.stem != "base")
    raise ConfigError(
        f"there is no experiment {name!r}; give the path of a .toml file"
        + (f", or one of {', '.join(known)}" if known else f", or run it where {FOLDER} is")
    )


def load_experiment(path: Path) -> Experiment:
    """Read an experiment file.

    Raises:
        ConfigError: it is no TOML, or has a wrong key or value.
    """
    return build_section(Experiment, read_tree(path, what="experiment"), origin=f"experiment {path}")


def run_experiment(
    path: Path,
    *,
    directory: Path,
    seeds: int = 0,
    quick: bool = False,
    recipe: Path | None = None,
    overrides: Sequence[str] = (),
    progress: Progress,
) -> dict[str, Any]:
    """Train every arm with every seed, one after another, and compare them. What is finished is not run again.

    Args:
        path: the experiment file.
        directory: where the runs, `result.json` and `report.html` go; quick ones go to a folder of their own.
        seeds: how many, from 0; 0 takes the experiment's own number.
        quick: the small settings of the experiment, which show that it runs, not what it finds.
        recipe: another recipe for the arms to vary, such as a big one.
        overrides: settings of all arms, after all others.
        progress: is told how far it is.

    Returns:
        name, question, seeds, metric, ratio, ci95, holds (of the first comparison), comparisons (all), arms (the
        measure of each seed, and how many never reached the threshold) and figure (the path of the page).

    Raises:
        DeepsweError: a wrong experiment, or a run that failed; what was finished stays.
    """
    experiment = load_experiment(path)
    base = recipe or path.parent / experiment.recipe
    count = seeds or (experiment.quick_seeds if quick else experiment.seeds)
    place = directory / (f"{path.stem}-quick" if quick else path.stem)
    arms = []
    for arm in experiment.arms:
        runs = []
        for seed in range(count):
            progress.say(f"{arm.label}: seed {seed + 1} of {count}")
            settings = [*experiment.overrides, *arm.overrides, *(experiment.quick if quick else ()), *overrides]
            resolved = _resolve(base, [*settings, f"run.seed={seed}"], f"{arm.name}-{seed}", place)
            rows = read_rows(train_recipe(resolved, progress=progress) / "metrics.jsonl")
            runs.append(tuple(sorted((row for row in rows if row["kind"] == "train"), key=lambda row: row["step"])))
        arms.append(Arm(arm.name, arm.label, tuple(runs)))
    return _conclude(experiment, path.stem, arms, range(count), place)


def _resolve(base: Path, settings: Sequence[str], name: str, place: Path) -> Recipe:
    return load_recipe(base, [*settings, f"run.name={name}", f"run.directory={place}"])


def _conclude(
    experiment: Experiment, name: str, arms: Sequence[Arm], seeds: Sequence[int], place: Path
) -> dict[str, Any]:
    named = {arm.name: arm for arm in arms}
    measure, threshold = experiment.measure, experiment.threshold
    effects = [
        compare(named[pair.arm], named[pair.against], measure=measure, threshold=threshold, expect=pair.expect)
        for pair in experiment.compare
    ]
    page = render_page(experiment.question, arms, effects, measure=measure, threshold=threshold, seeds=seeds)
    write_atomically(place / "report.html", page)
    values = {arm.name: measured(arm, measure, threshold) for arm in arms}
    result = {
        "name": name,
        "question": experiment.question,
        "seeds": list(seeds),
        "metric": measure,
        **{key: value for key, value in _effect(effects[0]).items() if key in ("ratio", "ci95", "holds")},
        "comparisons": [_effect(effect) for effect in effects],
        "arms": {arm: {"values": each, "never_reached": missed} for arm, (each, missed) in values.items()},
        "figure": str(place / "report.html"),
    }
    write_json(place / "result.json", result)
    return result


def _effect(effect: Effect) -> dict[str, Any]:
    bounds = [effect.low, effect.high if math.isfinite(effect.high) else None]
    return {
        "arm": effect.arm,
        "against": effect.against,
        "expect": effect.expect,
        "ratio": effect.ratio,
        "ci95": bounds,
        "never_reached": effect.censored,
        "holds": effect.holds,
    }
