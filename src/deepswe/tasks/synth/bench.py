"""A work bench: one repository's tree on disk, in which tests and scripts run under limits.

For making tasks, not for attempts: what runs here is the repository's own code with a small bug in it. Every command
gets a time limit, resource limits and, where bubblewrap works, a read-only view of the machine without a network.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from deepswe.tasks.bundled import RepositorySource
from deepswe.tasks.synth.isolation import find_bubblewrap

PROBE = Path(__file__).with_name("probe.py")
_MEMORY_BYTES = 2 << 30
_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Failure:
    """How one test failed.

    Attributes:
        line: in the test file, from 1; 0 if unknown.
        parameters: name -> literal; None where a parameter is no plain value.
        fixtures: names of what the test asks for.
    """

    line: int
    parameters: Mapping[str, str | None]
    fixtures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TestRun:
    """What a test run gave; without `complete` it was cut short or crashed.

    Attributes:
        complete: the run came to its end in time.
        statuses: test id -> status; the id of a file whose import failed -> "error".
        failures: for failed tests.
        seconds: test id -> wall seconds.
        timed_out: it was cut short by its time limit.
        cpu_s: processor seconds from the interpreter's start to the end of the session.
    """

    __test__ = False

    complete: bool
    statuses: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, Failure] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    timed_out: bool = False
    cpu_s: float = 0.0

    @property
    def passed(self) -> frozenset[str]:
        """Tests that passed."""
        return frozenset(test for test, status in self.statuses.items() if status == "passed")


class Bench:
    """A copy of a repository with its tests, for one thread. Removed when the context ends."""

    def __init__(self, source: RepositorySource, environment: Path) -> None:
        """Name it; nothing is copied before the context begins.

        Args:
            source: the repository.
            environment: its environment layer.
        """
        self.source = source
        self.environment = environment
        self._place = Path()

    def __enter__(self) -> Self:
        self._place = Path(tempfile.mkdtemp(prefix="deepswe-bench-"))
        shutil.copytree(self.source.base, self.root)
        self._home.mkdir()
        shutil.copyfile(PROBE, self._home / "deepswe_probe.py")
        for path, text in self.source.tests.items():
            self.write(path, text)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._place, ignore_errors=True)

    @property
    def root(self) -> Path:
        """The tree."""
        return self._place / "testbed"

    @property
    def _home(self) -> Path:
        return self._place / "home"

    def write(self, path: str, text: str) -> None:
        """Replace one file of the tree."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())

    def run_tests(
        self,
        files: Sequence[str],
        tests: Sequence[str] = (),
        *,
        timeout_s: float,
        launcher: Sequence[str] = ("-m", "pytest"),
        path: Sequence[Path] = (),
    ) -> TestRun:
        """Run test files, or the given tests in them.

        Args:
            files: relative to the root.
            tests: ids; all of the files if empty.
            timeout_s: for the whole run.
            launcher: how the interpreter starts pytest.
            path: more directories to import from.
        """
        output, wanted = self._home / "report.json", self._home / "tests.json"
        output.unlink(missing_ok=True)
        wanted.write_text(json.dumps(list(tests)))
        env = {"DEEPSWE_PROBE_OUTPUT": str(output), "DEEPSWE_PROBE_TESTS": str(wanted) if tests else ""}
        options = ["-q", "-p", "no:cacheprovider", "-p", "deepswe_probe", f"--rootdir={self.root}"]
        arguments = [*launcher, *options, *self.source.recipe.arguments, *files]
        started = time.monotonic()
        finished = self._run(arguments, env, timeout_s, path) is not None
        if not finished or not output.is_file():
            return TestRun(complete=False, timed_out=time.monotonic() - started >= timeout_s)
        record: dict[str, Any] = json.loads(output.read_text())
        failures = {
            test: Failure(int(item["line"]), item["parameters"], tuple(item["fixtures"]))
            for test, item in record["failures"].items()
        }
        return TestRun(
            record["exit"] in (0, 1, 2), record["statuses"], failures, record["seconds"], cpu_s=record["cpu_s"]
        )

    def run_script(self, text: str, *, timeout_s: float, hash_seed: int = 0) -> str | None:
        """The standard output of a script that runs at the root, or None if it failed or took too long."""
        script = self._home / "script.py"
        script.write_text(text, encoding="utf-8")
        return self._run([str(script)], {"PYTHONHASHSEED": str(hash_seed)}, timeout_s, ())

    def _run(
        self, arguments: Sequence[str], env: Mapping[str, str], timeout_s: float, path: Sequence[Path]
    ) -> str | None:
        imports = [self.root / item for item in self.source.recipe.pythonpath]
        whole = {
            "PATH": f"{self.environment}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self._home),
            "TMPDIR": "/tmp",
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(str(item) for item in (*imports, self._home, *path)),
            **env,
        }
        command = [*self._isolation(path), str(self.environment / "bin" / "python"), "-s", *arguments]
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=whole,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_limit,
        ) as process:
            try:
                out, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(process)
        text = out.decode("utf-8", "replace")
        return text if process.returncode in (0, 1) else None

    def _isolation(self, path: Sequence[Path]) -> list[str]:
        bwrap = find_bubblewrap()
        if not bwrap:
            return []
        place = str(self._place)
        namespaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent"]
        mounts = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--bind", place, place]
        shown = [word for item in (self.environment, *path) for word in ("--ro-bind", str(item), str(item))]
        return [bwrap, *namespaces, *mounts, *shown, "--"]


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
