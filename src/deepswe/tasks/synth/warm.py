"""A warm bench: a repository's tree on disk, and fork servers that run tests and scripts in milliseconds.

For making tasks, not for attempts: what runs here is the repository's own code with a small bug in it. Where bubblewrap
works it sees the machine read-only and has no network; each run has limits on time, processor time and memory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import select
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

from deepswe.errors import TaskError
from deepswe.tasks.bundled import RepositorySource
from deepswe.tasks.synth.isolation import find_bubblewrap

_ZYGOTE = Path(__file__).with_name("zygote.py")
_WITNESS = Path(__file__).with_name("witness.py")
_MEMORY_BYTES = 2 << 30
_FILE_BYTES = 64 << 20
_START_S = 60.0
_FIRST_TIME = 1_000_000_000
_BYTECODE = "/tmp/deepswe-bytecode"
HASH_SEEDS = (0, 1)
"""One fork server each: what depends on the order of hashes differs between them."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How one test failed.

    Attributes:
        line: in the test file, from 1; 0 if unknown.
        parameters: name -> literal; None where a parameter is no plain value.
        fixtures: names of what the test asks for.
        error: name of the exception's type.
        message: what the exception says, such as "assert 3 == 4" and what pytest adds to it.
    """

    line: int
    parameters: Mapping[str, str | None]
    fixtures: tuple[str, ...] = ()
    error: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class TestRun:
    """What a test run gave; without `complete` it was cut short or crashed.

    Attributes:
        complete: the run came to its end in time.
        statuses: test id -> status; the id of a file whose import failed -> "error".
        failures: for failed tests.
        seconds: test id -> processor seconds of the test process.
        timed_out: it was cut short by a limit on time.
        distance: calls between the watched test and the watched function; 0 if none was seen.
        coverage: code file -> line -> tests, where it was asked for.
        modules: what was imported besides the repository, where it was asked for.
        usage_error: pytest refused its arguments or its configuration.
    """

    __test__ = False

    complete: bool
    statuses: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, Failure] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    timed_out: bool = False
    distance: int = 0
    coverage: Mapping[str, Mapping[int, frozenset[str]]] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    usage_error: bool = False

    @property
    def passed(self) -> frozenset[str]:
        """Tests that passed."""
        return frozenset(test for test, status in self.statuses.items() if status == "passed")

    @property
    def broken_files(self) -> tuple[str, ...]:
        """Test files whose import failed."""
        return tuple(test for test, status in self.statuses.items() if status == "error" and "::" not in test)


@dataclass(frozen=True, slots=True)
class Watch:
    """A test, and functions whose distance from it is wanted: (path relative to the root, short name)."""

    test: str
    functions: tuple[tuple[str, str], ...]


class WarmBench:
    """A copy of a repository with its tests, for one thread. Removed, with its processes, when the context ends."""

    def __init__(self, source: RepositorySource, environment: Path, *, tools: Path | None = None) -> None:
        """Name it; nothing is copied or started before the context begins.

        Args:
            source: the repository.
            environment: its environment layer.
            tools: directory that holds coverage, where coverage is wanted.
        """
        self.source = source
        self.environment = environment
        self.tools = tools
        self._place = Path()
        self._servers: dict[int, _Server] = {}
        self._times = itertools.count(_FIRST_TIME)
        self._modules: tuple[str, ...] = ()
        self._past_cpu_s = 0.0

    def __enter__(self) -> Self:
        self._place = Path(tempfile.mkdtemp(prefix="deepswe-warm-"))
        try:
            for root in (self.root, self.pristine):
                shutil.copytree(self.source.base, root)
                for path, text in self.source.tests.items():
                    self.write(path, text, root=root)
            self._support.mkdir()
            shutil.copyfile(_WITNESS, self._support / "deepswe_probe.py")
        except BaseException:
            shutil.rmtree(self._place, ignore_errors=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers.values():
            server.close()
        shutil.rmtree(self._place, ignore_errors=True)

    @property
    def root(self) -> Path:
        """The tree that gets bugs."""
        return self._place / "testbed"

    @property
    def pristine(self) -> Path:
        """A second tree, that never gets any."""
        return self._place / "pristine"

    @property
    def cpu_s(self) -> float:
        """Processor seconds of all fork servers and what they ran. Bubblewrap hides them from this process."""
        return self._past_cpu_s + sum(server.cpu_s for server in self._servers.values())

    @property
    def _support(self) -> Path:
        return self._place / "support"

    def write(self, path: str, text: str, *, root: Path | None = None) -> None:
        """Replace one file. It gets a time stamp of its own, so that no bytecode of another text is taken for it."""
        target = (root or self.root) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())
        stamp = next(self._times)
        os.utime(target, (stamp, stamp))

    def preload(self, modules: Sequence[str]) -> None:
        """Let the fork servers import these once."""
        self._modules = tuple(modules)
        for server in self._servers.values():
            server.ask({"op": "preload", "modules": list(modules)}, _START_S)

    def run_tests(
        self,
        files: Sequence[str],
        tests: Sequence[str] | None = None,
        *,
        timeout_s: float,
        cpu_s: float = 0.0,
        maxfail: int = 0,
        hash_seed: int = 0,
        watch: Watch | None = None,
        measure: Sequence[str] = (),
        modules: bool = False,
        pristine: bool = False,
        write_bytecode: bool = False,
    ) -> TestRun:
        """Run test files, or the given tests in them.

        Args:
            files: relative to the root.
            tests: ids; None runs all of the files.
            timeout_s: wall time of the whole run.
            cpu_s: processor time; as `timeout_s` if 0.
            maxfail: stop after so many failures; 0 never does.
            hash_seed: which fork server.
            watch: of which test a distance is wanted.
            measure: directories whose coverage is wanted.
            modules: also report what was imported.
            pristine: run in the tree that never gets bugs.
            write_bytecode: keep compiled files for later runs.

        Returns:
            The run; it is not complete, either, where a bug ended the fork server itself. The next run starts another.

        Raises:
            TaskError: the fork server does not start.
        """
        root = self.pristine if pristine else self.root
        request: dict[str, Any] = {
            "op": "tests",
            "root": str(root),
            "files": list(files),
            "tests": None if tests is None else list(tests),
            "arguments": list(self.source.recipe.arguments),
            "timeout_s": timeout_s,
            "cpu_s": cpu_s or timeout_s,
            "maxfail": maxfail,
            "modules": modules,
            "write_bytecode": write_bytecode,
        }
        if watch is not None:
            functions = [[str(root / file), name] for file, name in watch.functions]
            request["watch"] = {"test": watch.test, "functions": functions}
        if measure:
            request |= {"measure": [str(root / item) for item in measure], "tools": str(self.tools)}
        answer = self._server(hash_seed).ask(request, timeout_s + _START_S)
        return TestRun(complete=False) if answer is None else _read_run(answer, root)

    def run_script(self, text: str, *, timeout_s: float, hash_seed: int = 0, pristine: bool = False) -> str | None:
        """The standard output of a script that runs at the root, or None if it failed or took too long."""
        root = self.pristine if pristine else self.root
        request = {"op": "script", "root": str(root), "text": text, "timeout_s": timeout_s, "cpu_s": timeout_s}
        answer = self._server(hash_seed).ask(request, timeout_s + _START_S)
        return str(answer["data"]) if answer and answer["ended"] and answer["code"] == 0 else None

    def _server(self, hash_seed: int) -> _Server:
        server = self._servers.get(hash_seed)
        if server is None or not server.alive:
            self._past_cpu_s += server.cpu_s if server is not None else 0.0
            server = self._servers[hash_seed] = self._start(hash_seed)
            if server.ask({"op": "preload", "modules": list(self._modules)}, _START_S) is None:
                raise TaskError(f"the fork server of the test environment {self.environment} does not start")
        return server

    def _start(self, hash_seed: int) -> _Server:
        isolation = self._isolation()
        setup = {
            "root": str(self.root),
            "pythonpath": list(self.source.recipe.pythonpath),
            "support": str(self._support),
            "bytecode": _BYTECODE if isolation else "",
            "reap_all": bool(isolation),
        }
        env = {
            "PATH": f"{self.environment}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self._support),
            "TMPDIR": "/tmp",
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": str(hash_seed),
            "PYTHONPATH": os.pathsep.join(str(self.root / item) for item in self.source.recipe.pythonpath),
            "COVERAGE_CORE": "ctrace",
        }
        python = str(self.environment / "bin" / "python")
        return _Server([*isolation, python, "-P", "-s", str(_ZYGOTE), json.dumps(setup)], env, self.root)

    def _isolation(self) -> list[str]:
        bwrap = find_bubblewrap()
        if not bwrap:
            return []
        namespaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent"]
        mounts = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
        shown = [self._place, self.environment, _ZYGOTE.parent, *([self.tools] if self.tools else [])]
        # Where a path leads through links comes first: under /tmp it is hidden like all else.
        places = dict.fromkeys(str(path) for item in shown for path in (Path(item).resolve(), item))
        mounts += [word for place in places for word in ("--ro-bind", place, place)]
        return [bwrap, *namespaces, *mounts, "--"]


class _Server:
    """One fork server, seen from outside."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], root: Path) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=root,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_limit,
        )
        self._rest = b""
        self.cpu_s = 0.0

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def ask(self, request: Mapping[str, object], timeout_s: float) -> dict[str, Any] | None:
        """One request, one answer; None if the server died or does not answer, and it is then killed."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write((json.dumps(request) + "\n").encode())
            stdin.flush()
            answer: dict[str, Any] = json.loads(self._line(time.monotonic() + timeout_s))
        except (OSError, json.JSONDecodeError):
            self.close()
            return None
        self.cpu_s = float(answer["cpu_s"])
        return answer

    def _line(self, deadline: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        while b"\n" not in self._rest:
            ready = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
            part = os.read(stdout.fileno(), 1 << 16) if ready else b""
            if not part:
                raise OSError("it died" if ready else "it took too long")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def close(self) -> None:
        """End it and all it started."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what a dead server was never told is still in the buffer
                    stream.close()
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _read_run(answer: Mapping[str, Any], root: Path) -> TestRun:
    if not answer["data"] or answer["timed_out"] or not answer["ended"] or answer["code"]:
        return TestRun(complete=False, timed_out=bool(answer["timed_out"]))
    record: dict[str, Any] = json.loads(answer["data"])
    failures = {
        test: Failure(int(item["line"]), item["parameters"], tuple(item["fixtures"]), item["error"], item["message"])
        for test, item in record["failures"].items()
    }
    prefix = f"{root}/"
    coverage = {
        file.removeprefix(prefix): {int(line): frozenset(tests) for line, tests in lines.items()}
        for file, lines in record.get("coverage", {}).items()
    }
    return TestRun(
        record["exit"] in (0, 1, 2, 5),
        record["statuses"],
        failures,
        record["seconds"],
        distance=record["distance"],
        coverage=coverage,
        modules=tuple(record.get("modules", ())),
        usage_error=record["exit"] == 4,
    )


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
