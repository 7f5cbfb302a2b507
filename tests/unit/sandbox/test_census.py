import asyncio
from dataclasses import dataclass, field

import pytest

from deepswe.config import SandboxConfig
from deepswe.errors import SandboxError
from deepswe.sandbox import census
from deepswe.sandbox.base import SandboxRecord


@dataclass
class Backend:
    """A registry that ends what it holds, or says why not."""

    failure: str = ""
    reaped: list[str] = field(default_factory=list)

    async def reap(self, config: SandboxConfig) -> list[SandboxRecord]:
        if self.failure:
            raise SandboxError(self.failure)
        self.reaped.append(config.backend)
        return []


def test_a_sandbox_that_cannot_be_removed_keeps_no_other_backend_from_being_reaped(monkeypatch):
    backends = dict.fromkeys(census.MODULES, Backend()) | {next(iter(census.MODULES)): Backend("x cannot be removed")}
    monkeypatch.setattr(census, "registry", lambda config: backends[config.backend])
    found = asyncio.run(census.reap(SandboxConfig()))
    first, *others = census.MODULES
    assert found.silent == {first: "x cannot be removed"}
    assert backends[others[0]].reaped == others
    with pytest.raises(SandboxError, match="x cannot be removed"):
        asyncio.run(census.reap(SandboxConfig(), first))
