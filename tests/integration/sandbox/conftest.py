"""One pool for a whole module, and a way to write a test as one coroutine in one sandbox."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from deepswe.config import SandboxConfig
from deepswe.sandbox.base import Sandbox, SandboxSpec
from deepswe.sandbox.pool import SandboxPool

Scenario = Callable[[Sandbox], Awaitable[None]]
InSandbox = Callable[..., None]


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
