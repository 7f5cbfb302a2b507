"""The commands of `deepswe`: where each is defined, and its line in `deepswe --help`, which imports none of them.

Hardly anything is imported here, so that the help comes at once; `deepswe.cli.app` makes the parsers of this table.
"""

from __future__ import annotations

import textwrap

DESCRIPTION = "Train software-engineering agents by reinforcement learning on executable repositories."

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("deepswe.cli.train:train", "Run a recipe from its first task to its report."),
    "plan": ("deepswe.cli.plan:plan", "Reckon memory, speed, machines and cost of a recipe."),
    "rollout": ("deepswe.cli.rollout:rollout", "Attempt tasks through the same loop as training."),
    "eval": ("deepswe.cli.evaluate:evaluate", "Evaluate any policy on any tasks."),
    "replay": ("deepswe.cli.evaluate:replay", "Play a cassette back without its model and its sandboxes."),
    "sweep": ("deepswe.cli.sweep:sweep", "The score of an evaluation under other limits."),
    "compare": ("deepswe.cli.compare:compare", "Set two results side by side."),
    "export": ("deepswe.cli.export:export", "Write an evaluation in the formats of others."),
    "leaderboard": ("deepswe.cli.leaderboard:leaderboard", "Runs and published results side by side, best first."),
    "report": ("deepswe.cli.report:report", "Write the run's report (one offline HTML file)."),
    "view": ("deepswe.cli.view:view", "Show every attempt of a run in the browser."),
    "analyse": ("deepswe.cli.analyse:analyse", "What the agent does: classes of turns, habits."),
    "watch": ("deepswe.cli.watch:watch", "Watch a run go on."),
    "reproduce": ("deepswe.cli.reproduce:reproduce", "Run an experiment over several seeds."),
    "rank": ("deepswe.cli.rank:rank", "Choose one candidate for each task by its scores."),
    "curves": ("deepswe.cli.rank:curves", "Draw Best@K of each method under Pass@K."),
    "audit": ("deepswe.cli.audit:audit", "Attack the grading of a task set with every scripted cheat."),
    "simulate": ("deepswe.cli.simulate:simulate", "Run the recipe's scheduler in virtual time."),
    "serve": ("deepswe.cli.serve:serve", "Start vLLM servers for the recipe's model."),
    "tasks": ("deepswe.cli.tasks:app", "What is to be solved."),
    "sandbox": ("deepswe.cli.sandbox:app", "Where code runs."),
    "verifier": ("deepswe.cli.verifier:app", "Train a model that tells right patches from wrong ones."),
    "tests": ("deepswe.cli.tests:app", "Write tests for tasks, and run candidates against them."),
}
"""Name -> (module:function, or module:group of commands; one line, at most 65 characters)."""

OPTIONS: dict[str, str] = {
    "--version": "Print the version.",
    "--install-completion": "Install completion for the current shell.",
    "--show-completion": "Show completion for the current shell, to copy it or customize the installation.",
    "--help": "Show this message and exit.",
}
"""The options of the command itself; their parsers are Typer's."""


def top_help() -> str:
    """What `deepswe --help` prints: letter by letter what its parsers would print, on a terminal of 80 columns."""
    return "\n".join(
        [
            "Usage: deepswe [OPTIONS] COMMAND [ARGS]...",
            "",
            *textwrap.wrap(DESCRIPTION, 78, initial_indent="  ", subsequent_indent="  "),
            "",
            "Options:",
            *_columns(OPTIONS),
            "",
            "Commands:",
            *_columns({name: line for name, (_, line) in COMMANDS.items()}),
        ]
    )


def _columns(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows))
    lines = []
    for name, words in rows.items():
        first, indent = f"  {name:{width}}  ", " " * (width + 4)
        lines += textwrap.wrap(words, 78, initial_indent=first, subsequent_indent=indent)
    return lines
