"""The record of a run: trajectories in append-only segments, one a phase and step, committed by a rename.

    trajectories/train-000012.jsonl           committed: the whole batch of step 12
    trajectories/train-000013.partial.jsonl   in flight, one line a finished trajectory
    trajectories/abandoned/...                what a killed process left and the next one did not take up

A committed segment never changes. A torn last line (the process was killed in the middle of a write) is dropped.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from deepswe.atomic import write_atomically
from deepswe.errors import StoreError
from deepswe.shapes import misfit
from deepswe.types import Ending, Graded, Step, TokenSpan, ToolCall, Trajectory, Ungraded, Usage

_COMMITTED = re.compile(r"(?P<phase>[A-Za-z0-9_]+)-(?P<step>\d{6})\.jsonl")


def dump_trajectory(trajectory: Trajectory) -> bytes:
    """One line of JSON, newline included. Any text survives, lone surrogates as escapes."""
    record = {item.name: getattr(trajectory, item.name) for item in fields(trajectory)}
    record["spans"] = [
        {"tokens": s.tokens, "sampled": s.sampled, "logprobs": s.logprobs, "version": s.version}
        for s in trajectory.spans
    ]
    record["steps"] = [asdict(step) for step in trajectory.steps]
    record["grade"] = asdict(trajectory.grade)
    record["usage"] = [asdict(turn) for turn in trajectory.usage]
    return json.dumps(record, separators=(",", ":")).encode("ascii") + b"\n"


def load_trajectory(line: bytes | str) -> Trajectory:
    """The inverse of `dump_trajectory`.

    Raises:
        StoreError: the line is no trajectory.
    """
    try:
        record = json.loads(line)
        record["spans"] = tuple(_load_span(span) for span in record["spans"])
        record["steps"] = tuple(_load_step(step) for step in record["steps"])
        record["grade"] = (Graded if record["grade"]["kind"] == "graded" else Ungraded)(**record["grade"])
        record["ending"] = Ending(record["ending"])
        record["starts"] = tuple(record.get("starts", ()))
        record["usage"] = tuple(Usage(**turn) for turn in record.get("usage", ()))
        trajectory = Trajectory(**record)
        wrong = misfit(trajectory, Trajectory)
        if not wrong and isinstance(trajectory.grade, Graded) and not math.isfinite(trajectory.grade.reward):
            wrong = f"grade.reward is {trajectory.grade.reward}, not a number"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StoreError(f"not a trajectory record ({error}); the line begins {line[:80]!r}") from error
    if wrong:
        raise StoreError(f"not a trajectory record ({wrong}); the line begins {line[:80]!r}")
    return trajectory


def _load_span(record: dict[str, Any]) -> TokenSpan:
    return TokenSpan(tuple(record["tokens"]), record["sampled"], tuple(record["logprobs"]), record["version"])


def _load_step(record: dict[str, Any]) -> Step:
    call = record.pop("call")
    return Step(call=call and ToolCall(**call), **record)


def _loaded(path: Path, lines: Iterable[bytes]) -> Iterator[Trajectory]:
    for number, line in enumerate(lines, start=1):
        try:
            yield load_trajectory(line)
        except StoreError as error:
            raise StoreError(f"{path}:{number}: {error}; move the file away, or take that line out of it") from error


class Segment:
    """The batch of one phase and step while it is being made. A context: leaving it closes the file, uncommitted."""

    def __init__(self, partial: Path, committed: Path) -> None:
        self._partial, self._committed = partial, committed
        try:
            self._fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"{partial} cannot be opened: {error.strerror}") from error

    def append(self, trajectory: Trajectory) -> None:
        """Write one trajectory and hand it to the kernel before returning, so that killing us does not lose it.

        Raises:
            StoreError: it could not be written whole; what was written before stays readable.
        """
        line = dump_trajectory(trajectory)
        size = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, line)
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError as error:
            if stat.S_ISREG(os.fstat(self._fd).st_mode):
                os.ftruncate(self._fd, size)
            raise StoreError(
                f"{self._partial}: {error.strerror}; nothing recorded before is lost, free the disk and resume"
            ) from error

    def commit(self) -> None:
        """Make the segment permanent. After a crash it is there whole or still in flight, never half."""
        os.fsync(self._fd)
        os.rename(self._partial, self._committed)
        directory = os.open(self._committed.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


class TrajectoryStore:
    """All trajectories of one run directory. One writer at a time; any number of readers."""

    def __init__(self, run: Path) -> None:
        self.directory = run / "trajectories"

    def begin(
        self, phase: str, step: int, *, keep: bool, settled: Collection[str] = ()
    ) -> tuple[Segment, tuple[Trajectory, ...]]:
        """Open the segment of a batch.

        Args:
            phase, step: the batch.
            keep: take up what a killed process recorded of this batch; otherwise that goes to `abandoned`. Attempts
                that the infrastructure ended are not taken up: it may be whole again.
            settled: ids of tasks whose attempts are taken up whatever their ending, since they were trained on.

        Returns:
            The segment, and the trajectories already in it.

        Raises:
            StoreError: the batch is committed already, or the directory cannot be written.
        """
        partial, committed = self._paths(phase, step)
        if committed.exists():
            raise StoreError(f"{committed} is committed already; a batch is recorded once")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            found = self._salvage(partial, settled) if keep else self._abandon(partial)
        except OSError as error:
            raise StoreError(f"{self.directory} cannot be written: {error.strerror}") from error
        return Segment(partial, committed), found

    def committed(self, phase: str, step: int) -> tuple[Trajectory, ...] | None:
        """A committed batch in the order of its attempts, or None where there is none."""
        path = self._paths(phase, step)[1]
        if not path.exists():
            return None
        return tuple(sorted(self._read(path), key=lambda trajectory: trajectory.key))

    def recorded(self, phase: str, step: int) -> tuple[Trajectory, ...]:
        """What is whole of a batch, committed or in flight; it may be nothing."""
        partial, committed = self._paths(phase, step)
        if committed.exists() or not partial.exists():
            return self.committed(phase, step) or ()
        data = partial.read_bytes()
        return tuple(_loaded(partial, data[: data.rfind(b"\n") + 1].splitlines()))

    def segments(self) -> tuple[tuple[str, int], ...]:
        """(phase, step) of each committed batch, sorted."""
        if not self.directory.exists():
            return ()
        matches = (_COMMITTED.fullmatch(path.name) for path in self.directory.iterdir())
        return tuple(sorted((match["phase"], int(match["step"])) for match in matches if match))

    def read(self, phase: str | None = None) -> Iterator[Trajectory]:
        """Every committed trajectory, or those of one phase, batch by batch."""
        for name, step in self.segments():
            if phase in (None, name):
                yield from self._read(self._paths(name, step)[1])

    def _paths(self, phase: str, step: int) -> tuple[Path, Path]:
        stem = f"{phase}-{step:06d}"
        return self.directory / f"{stem}.partial.jsonl", self.directory / f"{stem}.jsonl"

    def _read(self, path: Path) -> Iterator[Trajectory]:
        with path.open("rb") as lines:
            yield from _loaded(path, lines)

    def _salvage(self, partial: Path, settled: Collection[str]) -> tuple[Trajectory, ...]:
        if not partial.exists():
            return ()
        data = partial.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(partial, len(whole))
        found = tuple(_loaded(partial, whole.splitlines()))
        kept = tuple(t for t in found if t.ending is not Ending.ERROR or t.task_id in settled)
        if len(kept) < len(found):
            self._attic(partial).write_bytes(whole)
            write_atomically(partial, b"".join(dump_trajectory(trajectory) for trajectory in kept))
        return kept

    def _abandon(self, partial: Path) -> tuple[Trajectory, ...]:
        if partial.exists():
            os.rename(partial, self._attic(partial))
        return ()

    def _attic(self, partial: Path) -> Path:
        """A new name in `abandoned`."""
        attic = self.directory / "abandoned"
        attic.mkdir(exist_ok=True)
        return attic / f"{partial.stem}-{len(list(attic.iterdir())):04d}.jsonl"
