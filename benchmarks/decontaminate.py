"""Plant tasks of a benchmark under other names, and see that decontamination finds each of them.

A made-up benchmark has 40 tasks. 50 plants are disguised tasks of it or of the shipped benchmarks: former owners,
forks, wrapped and bare names, the same commit, the same change in a renamed package, the same text reworded. They are
hidden among tasks that have nothing to do with it, some with repository names or issue texts that look alike.

    {"plants": 50, "recall": 1.0, "precision": ..., "tasks": ..., "by_reason": {...}}
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from dataclasses import replace

from deepswe.tasks.decontaminate import decontaminate, reference_of, shipped_references
from deepswe.tasks.task import HiddenTests, Repository, Task, TaskSet


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = words("""
parser buffer column header session widget token matrix cursor thread handler schema record cache socket branch filter
locale signal region vector packet margin kernel bundle prefix ledger queue channel stream template profile index scope
lexer window dialog digest macro palette resolver iterator encoder decoder table frame axis tick label node edge graph
path route query field form model view group policy role user account invoice order item price tax
""")
VERBS = words("""
drops returns ignores duplicates truncates swaps raises loses reverses rounds merges skips rejects caches
""")
WHEN = words("""
empty nested unicode negative huge reversed missing shared frozen signed lazy sorted quoted escaped zero
""")
LOOKALIKES = words("""
encode/django-rest-framework pytest-dev/pytest-xdist requests/requests-oauthlib maxcountryman/flask-login
readthedocs/sphinx_rtd_theme astropy/astropy-healpix home-assistant/core simdjson/simdjson aio-libs/aiohttp
mkdocs/mkdocs tornadoweb/tornado numpy/numpy bokeh/bokeh sympy-plot/spb scikit-image/scikit-image getmoto/moto
""")
FUNCTIONS = [f"{verb}_{noun}" for verb in ("load", "read", "make", "find", "join", "cut", "fold") for noun in NOUNS]


def issue(rng: random.Random) -> str:
    """An issue text of some 60 words."""
    name, noun, other = rng.choice(FUNCTIONS), rng.choice(NOUNS), rng.choice(NOUNS)
    parts = [
        f"{name} {rng.choice(VERBS)} the {noun} when the {other} is {rng.choice(WHEN)}.",
        f"I call {name}({noun}={rng.randint(0, 99)}, {other}={rng.choice(['None', '[]', '{}', '0'])}) and get "
        f"{rng.randint(0, 999)}, where {rng.randint(0, 999)} is what the manual of the {rng.choice(NOUNS)} says.",
        f"With a {rng.choice(WHEN)} {rng.choice(NOUNS)} it {rng.choice(VERBS)} every second {rng.choice(NOUNS)}.",
        f"Version {rng.randint(1, 9)}.{rng.randint(0, 20)} of the {rng.choice(NOUNS)} did not do that, so this may "
        f"have come with the new {rng.choice(NOUNS)} {rng.choice(NOUNS)}.",
        f"A workaround is to sort the {rng.choice(NOUNS)} before the {rng.choice(NOUNS)} is made.",
    ]
    return "\n\n".join(parts)


def change(rng: random.Random, package: str) -> str:
    """A diff of a few lines."""
    file, name, noun = rng.choice(NOUNS), rng.choice(FUNCTIONS), rng.choice(NOUNS)
    old = f"    return {name}({noun}, {rng.randint(0, 9)})"
    new = [
        f"    if {noun} is None or len({noun}) < {rng.randint(1, 9)}:",
        f"        raise ValueError(f'{rng.choice(NOUNS)} {rng.choice(WHEN)}: {{{noun}!r}}')",
        f"    return {name}({noun}[{rng.randint(0, 9)}:], {rng.choice(NOUNS)}={rng.randint(0, 99)})",
    ]
    lines = [f"-{old}", *(f"+{line}" for line in new)]
    path = f"{package}/{file}.py"
    head = f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -7,3 +7,5 @@\n def f({noun}):\n"
    return head + "\n".join(lines) + "\n \n"


def make(rng: random.Random, name: str, repo: str) -> tuple[Task, HiddenTests]:
    """A task with text, patch and commit of its own."""
    commit = "".join(rng.choices("0123456789abcdef", k=40))
    task = Task(name, repo, issue(rng), Repository(), "made", "train", base_commit=commit)
    return task, HiddenTests(name, {}, ("t.py::a",), (), gold_patch=change(rng, repo.rpartition("/")[2]))


def reworded(rng: random.Random, text: str) -> str:
    """The text as somebody would copy it: framed, a tenth of its words changed, one paragraph moved."""
    paragraphs = text.split("\n\n")
    paragraphs.append(paragraphs.pop(rng.randrange(1, len(paragraphs))))
    words = " \n ".join(paragraphs).split(" ")
    for _ in range(len(words) // 20):
        words[rng.randrange(len(words))] = rng.choice(NOUNS)
        words.pop(rng.randrange(len(words)))
    return f"### Describe the bug\n\n{' '.join(words)}\n\n### Expected behaviour\n\nIt works."


def plants(rng: random.Random, benchmark: TaskSet) -> list[tuple[str, Task, HiddenTests]]:
    """50 disguised tasks as (disguise, task, hidden tests)."""
    names = {
        "owner": ["PyCQA/pylint", "kennethreitz/requests", "mitsuhiko/flask", "stedolan/jq", "antirez/redis"],
        "spelling": ["https://github.com/Django/django.git", "git@github.com:sympy/sympy.git", "SphinX-doc/Sphinx"],
        "fork": ["someone/django", "lab-42/sympy", "acme/scikit-learn", "me/matplotlib-fork", "you/astropy-dev"],
        "fork name": ["a/fork-of-pytest", "b/pylint-ng", "c/xarray-mirror", "d/my-flask", "e/ripgrep-2"],
        "bare": ["sympy", "sklearn", "astropy", "swesmith/pylint-dev__astroid.b114f6b5", "pydicom__pydicom"],
    }
    found = [(kind, *make(rng, f"plant-{repo}", repo)) for kind, repos in names.items() for repo in repos]
    originals = list(benchmark.tasks)
    rng.shuffle(originals)
    for number in range(50 - len(found)):
        original, hidden = originals[number], benchmark.hidden[originals[number].id]
        kind = ("commit", "patch", "text")[number % 3]
        task, tests = make(rng, f"plant-{kind}-{number}", f"renamed/thing{number}")
        if kind == "commit":
            task = replace(task, base_commit=original.base_commit[: rng.choice((8, 12, 40))])
        elif kind == "patch":
            package = original.repo.rpartition("/")[2]
            tests = replace(tests, gold_patch=hidden.gold_patch.replace(f"{package}/", f"thing{number}/core/"))
        else:
            task = replace(task, problem_statement=reworded(rng, original.problem_statement))
        found.append((kind, task, tests))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer clean tasks")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    made = [make(rng, f"bench-{number}", f"bench/project{number % 8}") for number in range(40)]
    benchmark = TaskSet(tuple(task for task, _ in made), {task.id: hidden for task, hidden in made})
    planted = plants(rng, benchmark)
    repos = [*LOOKALIKES, *(f"other/{noun}kit" for noun in NOUNS)]
    clean = [
        make(rng, f"clean-{number}", repos[number % len(repos)]) for number in range(200 if arguments.quick else 1000)
    ]
    rows = [*((task, hidden) for _, task, hidden in planted), *clean]
    rng.shuffle(rows)
    tasks = TaskSet(tuple(task for task, _ in rows), {task.id: hidden for task, hidden in rows})
    answer = decontaminate(tasks, [*shipped_references(), reference_of("made-up", benchmark)])
    gone, wanted = {row.id for row in answer.removed}, {task.id for _, task, _ in planted}
    for kind, task, _ in planted:
        if task.id not in gone:
            print(f"missed ({kind}): {task.id}", file=sys.stderr)
    for row in answer.removed:
        if row.id not in wanted:
            print(f"wrongly removed: {row}", file=sys.stderr)
    result = {
        "plants": len(wanted),
        "recall": round(len(gone & wanted) / len(wanted), 4),
        "precision": round(len(gone & wanted) / max(1, len(gone)), 4),
        "tasks": len(rows),
        "by_reason": dict(Counter(row.reason for row in answer.removed)),
    }
    print(json.dumps(result))
    return 0 if result["plants"] == 50 and result["recall"] == 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
