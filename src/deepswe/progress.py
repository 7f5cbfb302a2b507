"""How long work tells that it goes on. The command shows it with rich; libraries may pass `Silent`."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """One stage at a time."""

    def begin(self, stage: str, total: int) -> None:
        """A stage of `total` pieces begins; the one before is over."""
        ...

    def advance(self, pieces: int = 1, note: str = "") -> None:
        """Some pieces are done; `note` replaces the text beside the bar."""
        ...

    def say(self, text: str) -> None:
        """A line that stays."""
        ...


class Silent:
    """Says nothing."""

    def begin(self, stage: str, total: int) -> None:
        """Nothing."""

    def advance(self, pieces: int = 1, note: str = "") -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""
