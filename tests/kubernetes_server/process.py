"""The server as a process of its own, for tests and benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]


class ServerProcess:
    """Starts the server; ends it on exit. `kubeconfig` is the file to connect with."""

    def __init__(self, directory: Path, *options: str, faults: dict[str, float] | None = None) -> None:
        self.kubeconfig = directory / "kubeconfig"
        self._argv = [sys.executable, "-m", "tests.kubernetes_server", "--kubeconfig", str(self.kubeconfig)]
        self._argv += [*options, "--faults", json.dumps(faults or {})]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._argv, cwd=ROOT)
        deadline = time.monotonic() + 60
        while not self.kubeconfig.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the test server did not start ({self._process.poll()})")
            time.sleep(0.02)
        self.url = self.kubeconfig.read_text().split('server: "')[1].split('"')[0]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def figures(self) -> dict[str, Any]:
        """Counts of requests and faults, and what is left."""
        with urllib.request.urlopen(f"{self.url}/test/figures", timeout=30) as answer:
            made: dict[str, Any] = json.load(answer)
            return made

    def post(self, path: str, body: dict[str, Any]) -> None:
        """Change the faults, or forget the history of pods."""
        data = json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/test/{path}", data=data), timeout=30):
            pass
