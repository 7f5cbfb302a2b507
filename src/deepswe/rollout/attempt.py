"""Which attempt at which task, and the seed that it gets: pure functions of the recipe, so that any process agrees."""

from __future__ import annotations

import hashlib
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


def derive_seed(*parts: int | str) -> int:
    """A 62-bit seed from what names the thing to seed; the same on every machine and in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
