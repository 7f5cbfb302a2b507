"""All sandboxes of this package, whichever run made them: listed and reaped over every backend that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deepswe.config import SandboxConfig
from deepswe.errors import SandboxError, SandboxUnavailable
from deepswe.sandbox.backends import MODULES, Registry, registry
from deepswe.sandbox.base import SandboxRecord

ANSWER_S = 120.0
"""Longest that one backend may take."""


@dataclass(frozen=True, slots=True)
class Census:
    """What was found.

    Attributes:
        records: the sandboxes.
        silent: backend -> why it could not be asked or did not finish, for those that were not chosen by name.
        absent: those of them that could not be asked at all.
    """

    records: tuple[SandboxRecord, ...]
    silent: Mapping[str, str]
    absent: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """The records as plain values."""
        return [asdict(record) for record in self.records]


async def list_sandboxes(config: SandboxConfig, backend: str | None = None) -> Census:
    """Every sandbox, of one backend or of all.

    Raises:
        SandboxUnavailable: the backend that was named cannot be asked.
    """

    async def ask(module: Registry, chosen: SandboxConfig) -> list[SandboxRecord]:
        return await module.list_sandboxes(chosen)

    return await _over_backends(config, backend, ask)


async def reap(config: SandboxConfig, backend: str | None = None) -> Census:
    """End every sandbox that is orphaned or expired, of one backend or of all; the failure of one stops no other.

    Raises:
        SandboxUnavailable: the backend that was named cannot be asked.
        SandboxError: one of its sandboxes cannot be removed; all others are.
    """

    async def ask(module: Registry, chosen: SandboxConfig) -> list[SandboxRecord]:
        return await module.reap(chosen)

    return await _over_backends(config, backend, ask)


async def _over_backends(config: SandboxConfig, backend: str | None, ask: Any) -> Census:
    records: list[SandboxRecord] = []
    silent: dict[str, str] = {}
    absent: list[str] = []
    for name in [backend] if backend else MODULES:
        chosen = config.model_copy(update={"backend": name})
        try:
            async with asyncio.timeout(ANSWER_S):
                records += await ask(registry(chosen), chosen)
        except TimeoutError as error:
            silent[name] = f"no answer within {ANSWER_S:.0f} s"
            if backend:
                raise SandboxUnavailable(f"{name} gave {silent[name]}") from error
        except SandboxError as error:
            if backend:
                raise
            silent[name] = str(error)
            absent += [name] if isinstance(error, SandboxUnavailable) else []
    return Census(tuple(records), silent, tuple(absent))
