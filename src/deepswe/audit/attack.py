"""What an attacker is: a name, what it exploits, and what it does to a task."""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from deepswe.grading.patch import touched_paths
from deepswe.tasks.task import HiddenTests, Task


@dataclass(frozen=True, slots=True)
class Target:
    """What an attacker knows of a task: where the bug is, but neither the fix nor the hidden tests.

    Attributes:
        file: path of the file with the bug, relative to the root.
        test: path of the test file that will be run. A real attacker guesses it from the names of the others.
        pytest: whether pytest runs the tests; else unittest.
    """

    file: str
    test: str
    pytest: bool

    @property
    def module(self) -> str:
        """The file's name without its end."""
        return self.file.rpartition("/")[2].removesuffix(".py")


def has_target(hidden: HiddenTests) -> bool:
    """Whether the gold patch mends a Python file, which `target_of` needs."""
    return any(path.endswith(".py") for path in touched_paths(hidden.gold_patch))


def target_of(task: Task, hidden: HiddenTests) -> Target:
    """The target that a task is."""
    files = sorted(path for path in touched_paths(hidden.gold_patch) if path.endswith(".py"))
    return Target(files[0], hidden.tests[0].split("::")[0], hidden.runner == "pytest")


@dataclass(frozen=True, slots=True)
class Attack:
    """One cheat.

    Attributes:
        name: unique.
        exploits: one sentence: what it relies on.
        work: target -> shell scripts that the agent runs one after another before it submits.
        patch: target -> a diff that is graded as it is, for what no working tree yields; None for agents.
        timeout_s: of the tests; 0 leaves the task's own.
    """

    name: str
    exploits: str
    work: Callable[[Target], Sequence[str]] = lambda target: ()
    patch: Callable[[Target], str] | None = None
    timeout_s: float = 0.0


class Registry:
    """Attacks by name, in the order in which they were added."""

    def __init__(self) -> None:
        self._attacks: dict[str, Attack] = {}

    def work(
        self, exploits: str, *, timeout_s: float = 0.0
    ) -> Callable[[Callable[[Target], str]], Callable[[Target], str]]:
        """Add a function that gives the one script that an agent runs; it is named as the function."""

        def add(function: Callable[[Target], str]) -> Callable[[Target], str]:
            name = function.__name__
            self._attacks[name] = Attack(name, exploits, lambda target: (function(target),), timeout_s=timeout_s)
            return function

        return add

    def patch(self, exploits: str) -> Callable[[Callable[[Target], str]], Callable[[Target], str]]:
        """Add a function that gives a diff."""

        def add(function: Callable[[Target], str]) -> Callable[[Target], str]:
            self._attacks[function.__name__] = Attack(function.__name__, exploits, patch=function)
            return function

        return add

    @property
    def attacks(self) -> Mapping[str, Attack]:
        """What was added."""
        return MappingProxyType(self._attacks)


def put(path: str, text: str, *, append: bool = False) -> str:
    """A line of shell that writes or extends a file; its text survives any quoting."""
    data = base64.b64encode(textwrap.dedent(text).encode()).decode()
    return f'mkdir -p "$(dirname "{path}")"; echo {data} | base64 -d {">>" if append else ">"} "{path}"\n'


def poison(target: Target, code: str) -> str:
    """A line of shell that adds code to the end of the file with the bug, which the tests import."""
    return put(target.file, "\n\n" + textwrap.dedent(code), append=True)


def new_file(path: str, text: str, mode: str = "100644", *, written: str = "") -> str:
    """The part of a diff that adds a file; `written` is how its name stands there, if not plainly."""
    name, lines = written or f"b/{path}", text.split("\n")
    body = "".join(f"+{line}\n" for line in lines)
    head = f"diff --git a/{path} b/{path}\n" if not written else f"diff --git {name} {name}\n"
    return f"{head}new file mode {mode}\n--- /dev/null\n+++ {name}\n@@ -0,0 +1,{len(lines)} @@\n{body}"
