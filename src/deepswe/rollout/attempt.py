"""Which attempt at which task, and the seed that it gets: pure functions of the recipe, so that any process agrees.

And the way to end one attempt early.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt this is; its name is unique in a run.

    Attributes:
        task_id, attempt, phase, step: as in `Trajectory`.
        seed: seeds the sampling of every turn.
        retries: infrastructure failures before this try.
        temperature: of sampling.
    """

    task_id: str
    attempt: int
    phase: str
    step: int
    seed: int
    temperature: float
    retries: int = 0

    @property
    def name(self) -> str:
        """What the engine knows the trajectory by; a retry is another trajectory to it."""
        again = f"~{self.retries}" if self.retries else ""
        return f"{self.phase}/{self.step:06d}/{self.task_id}/{self.attempt:04d}{again}"


class Cut:
    """Ends one attempt from outside, before or while it runs: ``cut("straggler")``. Only the first call counts."""

    def __init__(self) -> None:
        self.reason = ""
        self._timeout: asyncio.Timeout | None = None

    def __call__(self, reason: str) -> None:
        """End it, on the event loop on which it runs; `reason` says why."""
        if self.reason:
            return
        self.reason = reason
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def leash(self) -> AsyncIterator[None]:
        """What is inside can be cut.

        Raises:
            TimeoutError: it was.
        """
        if self.reason:
            raise TimeoutError
        async with asyncio.timeout(None) as self._timeout:
            try:
                yield
            finally:
                self._timeout = None


def derive_seed(*parts: int | str) -> int:
    """A 62-bit seed from what names the thing to seed; the same on every machine and in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
