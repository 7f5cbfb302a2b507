"""A fork server for tests. It runs inside a repository's environment and imports only the standard library.

It imports what the tests need once (never the repository's own modules), and forks a child for each request, so that a
test run pays neither for an interpreter's start nor for those imports. Requests and answers are lines of JSON on
standard input and output; each request gives one answer. A child gets a session of its own, limits on its processor
time, and an empty temporary directory; when it ends or its time is over, all it started is killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
from typing import Any

TYPES = (ImportError, AttributeError, TypeError, ValueError, RuntimeError, LookupError, OSError)
SCRATCH = "/tmp/deepswe-run"
OUTPUT_LIMIT = 1 << 20


class Worker:
    """What a child does; results are written to one pipe."""

    def __init__(self, root: str, pythonpath: list[str], support: str) -> None:
        self.root = root
        self.pythonpath = pythonpath
        self.support = support

    def enter(self, root: str) -> None:
        """Stand at a root, with its directories on the path."""
        os.chdir(root)
        places = [os.path.normpath(os.path.join(root, item)) for item in self.pythonpath]
        sys.path[:0] = [*places, self.support]
        sys.argv = ["pytest"]

    def tests(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run tests; the record of the probe."""
        self.enter(request.get("root", self.root))
        probe = importlib.import_module("deepswe_probe")
        pytest = importlib.import_module("pytest")
        measurement = self._measure(request["measure"], request["tools"]) if request.get("measure") else None
        probe.begin(request.get("tests"), request.get("watch"), measurement)
        options = ["-q", "-p", "no:cacheprovider", f"--rootdir={request.get('root', self.root)}", *request["arguments"]]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        if request.get("maxfail"):
            options.append(f"--maxfail={request['maxfail']}")
        code = int(pytest.main([*options, *request["files"]], plugins=[probe]))
        record: dict[str, Any] = probe.record()
        record["exit"] = code
        if measurement is not None:
            measurement.stop()
            record["coverage"] = probe.coverage_of(measurement)
        if request.get("modules"):
            record["modules"] = self._outside()
        return record

    def script(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a program as a fresh main module; it prints to standard output."""
        self.enter(request.get("root", self.root))
        exec(compile(request["text"], "example.py", "exec"), {"__name__": "__main__"})
        return {}

    def _measure(self, sources: list[str], tools: str) -> Any:
        sys.path.append(tools)
        coverage = importlib.import_module("coverage")
        measurement = coverage.Coverage(data_file=None, source=sources, config_file=False)
        measurement.start()
        return measurement

    def _outside(self) -> list[str]:
        """Modules that are loaded and not part of the repository or of the support."""
        found = []
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            inside = file.startswith((self.root + "/", self.support + "/"))
            spec = getattr(module, "__spec__", None)
            if not inside and spec is not None and spec.name == name and name != "__main__" and file:
                found.append(name)
        return found


class Server:
    """The loop of the parent."""

    def __init__(self, worker: Worker, reap_all: bool) -> None:
        self.worker = worker
        self.reap_all = reap_all

    def serve(self) -> None:
        """Answer until standard input ends."""
        for line in sys.stdin:
            request = json.loads(line)
            answer = self.preload(request["modules"]) if request["op"] == "preload" else self.fork(request)
            answer["cpu_s"] = sum(os.times()[:4])
            os.write(1, (json.dumps(answer) + "\n").encode())

    def preload(self, modules: list[str]) -> dict[str, Any]:
        """Import modules once for all children."""
        failed = []
        sys.dont_write_bytecode = True
        for name in modules:
            if name not in sys.modules:
                try:
                    importlib.import_module(name)
                except TYPES:
                    failed.append(name)
        gc.collect()
        gc.freeze()
        return {"failed": failed}

    def fork(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one request in a child."""
        shutil.rmtree(SCRATCH, ignore_errors=True)
        os.mkdir(SCRATCH)
        reader, writer = os.pipe()
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            os.close(reader)
            self._child(request, writer)
        os.close(writer)
        data, timed_out = self._read(reader, began + request["timeout_s"])
        os.close(reader)
        status = self._end(child, began + request["timeout_s"] + 0.2)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
        answer = {"data": data.decode("utf-8", "replace"), "ended": os.WIFEXITED(status), "code": status >> 8}
        answer["timed_out"] = timed_out or killed
        answer["wall_s"] = time.monotonic() - began
        return answer

    def _read(self, reader: int, deadline: float) -> tuple[bytes, bool]:
        parts: list[bytes] = []
        size = 0
        while True:
            left = deadline - time.monotonic()
            ready = select.select([reader], [], [], max(0.0, left))[0]
            if not ready:
                return b"".join(parts), True
            part = os.read(reader, 1 << 16)
            if not part:
                return b"".join(parts), False
            size += len(part)
            if size <= 64 * OUTPUT_LIMIT:
                parts.append(part)

    def _end(self, child: int, deadline: float) -> int:
        """The child's wait status; all it started is gone afterwards."""
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                self._sweep(child)
                return status
            time.sleep(0.002)
        self._kill(child)
        status = os.waitpid(child, 0)[1]
        self._sweep(child)
        return status

    def _kill(self, group: int) -> None:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            try:
                os.kill(group, signal.SIGKILL)
            except ProcessLookupError:
                return

    def _sweep(self, group: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        if self.reap_all:
            own = {1, os.getpid(), os.getppid()}
            for name in os.listdir("/proc"):
                if name.isdigit() and int(name) not in own:
                    self._kill(int(name))
            while True:
                try:
                    if os.waitpid(-1, os.WNOHANG)[0] == 0:
                        return
                except ChildProcessError:
                    return

    def _child(self, request: dict[str, Any], writer: int) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        seconds = max(1, int(request["cpu_s"]) + 1)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        os.environ["TMPDIR"] = SCRATCH
        null = os.open("/dev/null", os.O_RDWR)
        script = request["op"] == "script"
        for number, target in ((0, null), (1, writer if script else null), (2, null)):
            os.dup2(target, number)
        code = 1
        try:
            sys.stdin = open(0, closefd=False)  # noqa: SIM115  (the old one holds requests that it has read ahead)
            sys.dont_write_bytecode = not request.get("write_bytecode", False)
            record = self.worker.script(request) if script else self.worker.tests(request)
            if script:
                sys.stdout.flush()
            else:
                self._write(writer, json.dumps(record).encode())
            code = 0
        finally:
            os._exit(code)

    def _write(self, writer: int, data: bytes) -> None:
        while data:
            data = data[os.write(writer, data) :]


def main() -> None:
    """Serve; the one argument is the JSON of the root, the import directories, the support directory and a flag."""
    setup = json.loads(sys.argv[1])
    sys.path[:] = [entry for entry in sys.path if entry and entry != setup["support"]]
    if setup["bytecode"]:
        sys.pycache_prefix = setup["bytecode"]
    Server(Worker(setup["root"], setup["pythonpath"], setup["support"]), setup["reap_all"]).serve()


if __name__ == "__main__":
    main()
