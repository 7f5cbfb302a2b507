"""How a test run is started in a sandbox: the runner, its request and its nonce, all on standard input."""

from __future__ import annotations

import functools
import importlib.util
import marshal
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepswe.errors import GradingError
from deepswe.grading.tree import ENVIRONMENT, ROOT
from deepswe.tasks.task import Runner, Task

PARTS = Path(__file__).parent / "runner"
RUNNERS: tuple[Runner, ...] = ("pytest", "unittest")
RUN_ENVIRONMENT: Mapping[str, str] = {
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": "",
    "PYTHONSTARTUP": "",
    "PYTEST_ADDOPTS": "",
    "PYTEST_PLUGINS": "",
}
"""Nothing of the sandbox's environment steers the run."""
_HEADER_BYTES = 64


def runner_command(task: Task) -> list[str]:
    """How Python is started; without packages it needs no `site`, which saves half of its start."""
    python = ["python3", "-S"] if task.image is None else ["python"]
    if task.repository.environment is not None:
        python = [f"{ENVIRONMENT}/bin/python"]
    return [*python, "-s", "-B", "-c", _text("start")]


def runner_input(nonce: str, runner: Runner, task: Task, arguments: Sequence[str], tests: Sequence[str]) -> bytes:
    """The runner's standard input; see `runner/start.py`. Byte code saves the time to compile the text.

    Raises:
        GradingError: there is no such runner.
    """
    if runner not in RUNNERS:
        raise GradingError(f"task {task.id} asks for the runner {runner!r}; there are {', '.join(RUNNERS)}")
    code, text = _runner(runner)
    request = marshal.dumps((ROOT, tuple(task.repository.pythonpath), tuple(arguments), tuple(tests)), 2)
    sizes = f"{importlib.util.MAGIC_NUMBER.hex()} {len(code)} {len(text)} {len(request)}"
    return sizes.ljust(_HEADER_BYTES).encode() + code + text + request + nonce.encode()


@functools.cache
def _text(name: str) -> str:
    return (PARTS / f"{name}.py").read_text(encoding="utf-8")


@functools.cache
def _runner(runner: Runner) -> tuple[bytes, bytes]:
    """Byte code of this Python, and text."""
    text = _text("core") + "\n\n" + _text(f"{runner}_runner")
    return marshal.dumps(compile(text, "<runner>", "exec", dont_inherit=True, optimize=2)), text.encode()
