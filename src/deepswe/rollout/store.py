"""The record of a run: trajectories in append-only segments, one a phase and step, committed by a rename.

    trajectories/train-000012.zst           committed: the whole batch of step 12, and its index
    trajectories/train-000013.partial.zst   in flight, one compressed record a finished trajectory
    trajectories/abandoned/...              what a killed process left and the next one did not take up

A committed segment never changes. A torn last record (the process was killed in the middle of a write) is dropped.
Segments as lines of JSON (`.jsonl`), which earlier versions wrote, are read and taken up as well.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from deepswe.atomic import write_atomically
from deepswe.errors import StoreError
from deepswe.regular import open_regular, read_regular
from deepswe.rollout.frames import (
    Context,
    Entry,
    Frame,
    compress,
    decompress,
    index_frame,
    read_at,
    read_frames,
    read_index,
    whole_size,
)
from deepswe.rollout.packed import pack_trajectory, unpack_head, unpack_trajectory
from deepswe.rollout.record import load_trajectory
from deepswe.types import Ending, Trajectory

_COMMITTED = re.compile(r"(?P<phase>[A-Za-z0-9_]+)-(?P<step>\d{6})\.(?:zst|jsonl)")
PARTIAL = ".partial.zst"
"""How the names of segments in flight end."""
_ABANDONED = re.compile(r"-(\d{4,})\.(?:zst|jsonl)$")
Unpack = Callable[[bytes], Trajectory]
"""A record as it is packed -> what is wanted of it."""
_OLD, _OLD_PARTIAL = ".jsonl", ".partial.jsonl"


class Segment:
    """The batch of one phase and step while it is being made. A context: leaving it closes the file, uncommitted."""

    def __init__(self, partial: Path, committed: Path, entries: Sequence[Entry] = ()) -> None:
        """Open the file.

        Args:
            partial, committed: its names before and after the commit.
            entries: of the records that are in it already.
        """
        self._partial, self._committed, self._entries = partial, committed, list(entries)
        try:
            self._fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"{partial} cannot be opened: {error.strerror}") from error

    def append(self, trajectory: Trajectory) -> None:
        """Write one trajectory and hand it to the kernel before returning, so that killing us does not lose it.

        Raises:
            StoreError: it could not be written whole; what was written before stays readable.
        """
        offset = self._write(compress(*pack_trajectory(trajectory)))
        self._entries.append((trajectory.task_id, trajectory.attempt, offset))

    def commit(self) -> None:
        """Make the segment permanent. After a crash it is there whole or still in flight, never half."""
        self._write(index_frame(self._entries))
        os.fsync(self._fd)
        os.rename(self._partial, self._committed)
        directory = os.open(self._committed.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _write(self, data: bytes) -> int:
        """Write all or nothing; returns where."""
        size = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            if stat.S_ISREG(os.fstat(self._fd).st_mode):
                os.ftruncate(self._fd, size)
            raise StoreError(
                f"{self._partial}: {error.strerror}; nothing recorded before is lost, free the disk and resume"
            ) from error
        return size

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
        self._places: dict[Path, Mapping[tuple[str, int], int]] = {}

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
        if (there := self._committed(phase, step)) is not None:
            raise StoreError(f"{there} is committed already; a batch is recorded once")
        partial = self._path(phase, step, PARTIAL)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._take_up_old(self._path(phase, step, _OLD_PARTIAL), partial)
            found = self._salvage(partial, settled) if keep else self._abandon(partial)
        except OSError as error:
            raise StoreError(f"{self.directory} cannot be written: {error.strerror}") from error
        entries = [(t.task_id, t.attempt, offset) for offset, t in found]
        return Segment(partial, self._path(phase, step, ".zst"), entries), tuple(t for _, t in found)

    def committed(self, phase: str, step: int) -> tuple[Trajectory, ...] | None:
        """A committed batch in the order of its attempts, or None where there is none."""
        path = self._committed(phase, step)
        return None if path is None else tuple(sorted(self._read(path), key=lambda trajectory: trajectory.key))

    def get(self, phase: str, step: int, task_id: str, attempt: int) -> Trajectory | None:
        """One committed trajectory, without reading the others of its batch; None where there is none.

        Raises:
            StoreError: it is damaged.
        """
        path = self._committed(phase, step)
        if path is None:
            return None
        if path.suffix == _OLD:
            begins = f'{{"task_id":{json.dumps(task_id)},"attempt":{attempt},'.encode()
            with _opened(path) as lines:
                return next(_lines(path, (line for line in lines if line.startswith(begins))), None)
        with _opened(path) as file, _named(path):
            if path not in self._places:  # it never changes
                self._places[path] = {(name, number): offset for name, number, offset in read_index(file)}
            offset = self._places[path].get((task_id, attempt))
            return None if offset is None else unpack_trajectory(decompress(read_at(file, offset), Context()))

    def recorded(self, phase: str, step: int) -> tuple[Trajectory, ...]:
        """What is whole of a batch, committed or in flight; it may be nothing."""
        partial, old = self._path(phase, step, PARTIAL), self._path(phase, step, _OLD_PARTIAL)
        if (found := self.committed(phase, step)) is not None:
            return found
        if old.exists():
            return tuple(_lines(old, _whole_lines(old)))
        return tuple(t for _, t in _packed(partial, _frames(partial)))

    def segments(self) -> tuple[tuple[str, int], ...]:
        """(phase, step) of each committed batch, sorted."""
        if not self.directory.exists():
            return ()
        matches = (_COMMITTED.fullmatch(path.name) for path in self.directory.iterdir())
        return tuple(sorted({(match["phase"], int(match["step"])) for match in matches if match}))

    def read(self, phase: str | None = None) -> Iterator[Trajectory]:
        """Every committed trajectory, or those of one phase, batch by batch."""
        for name, step in self.segments():
            if phase in (None, name) and (path := self._committed(name, step)) is not None:
                yield from self._read(path)

    def heads(self, phase: str | None = None) -> Iterator[Trajectory]:
        """As `read`, at a part of its cost: without spans and steps, for counts and tables."""
        for name, step in self.segments():
            if phase in (None, name) and (path := self._committed(name, step)) is not None:
                yield from self._read(path, unpack_head)

    def _path(self, phase: str, step: int, suffix: str) -> Path:
        return self.directory / f"{phase}-{step:06d}{suffix}"

    def _committed(self, phase: str, step: int) -> Path | None:
        paths = (self._path(phase, step, suffix) for suffix in (".zst", _OLD))
        return next((path for path in paths if path.exists()), None)

    def _read(self, path: Path, unpack: Unpack = unpack_trajectory) -> Iterator[Trajectory]:
        with _opened(path) as file:
            if path.suffix == _OLD:
                whole = _lines(path, file)
                yield from whole if unpack is unpack_trajectory else (replace(t, spans=(), steps=()) for t in whole)
                return
            context = Context()
            with _named(path):
                entries = read_index(file)
            for number, (_, _, offset) in enumerate(entries, start=1):
                with _named(path, number):
                    trajectory = unpack(decompress(read_at(file, offset), context))
                yield trajectory

    def _salvage(self, partial: Path, settled: Collection[str]) -> list[tuple[int, Trajectory]]:
        frames = list(_frames(partial))
        size = whole_size(frames)
        if partial.exists() and partial.stat().st_size > size:
            os.truncate(partial, size)
        found = list(_packed(partial, frames))
        kept = [n for n, (_, t) in enumerate(found) if t.ending is not Ending.ERROR or t.task_id in settled]
        if len(kept) == len(found):
            return found
        self._attic(partial).write_bytes(read_regular(partial))
        write_atomically(partial, b"".join(frames[number].data for number in kept))
        places = (frame.offset for frame in _frames(partial))
        return [(offset, found[number][1]) for offset, number in zip(places, kept, strict=True)]

    def _abandon(self, partial: Path) -> list[tuple[int, Trajectory]]:
        if partial.exists():
            os.rename(partial, self._attic(partial))
        return []

    def _take_up_old(self, old: Path, partial: Path) -> None:
        """What an earlier version of this package left in flight, packed."""
        if not old.exists():
            return
        if not partial.exists():
            packed = (compress(*pack_trajectory(trajectory)) for trajectory in _lines(old, _whole_lines(old)))
            write_atomically(partial, b"".join(packed))
        os.rename(old, self._attic(old))

    def _attic(self, partial: Path) -> Path:
        """A new name in `abandoned`: numbered after the highest that is there."""
        attic = self.directory / "abandoned"
        attic.mkdir(exist_ok=True)
        numbers = (int(match[1]) for path in attic.iterdir() if (match := _ABANDONED.search(path.name)))
        return attic / f"{partial.stem}-{max(numbers, default=-1) + 1:04d}{partial.suffix}"


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        file = open_regular(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}; move the file away") from error
    with file:
        yield file


def _whole_lines(path: Path) -> list[bytes]:
    data = read_regular(path)
    return data[: data.rfind(b"\n") + 1].splitlines()


def _frames(partial: Path) -> Iterator[Frame]:
    if partial.exists():
        with _opened(partial) as file, _named(partial):
            yield from read_frames(file)


def _packed(path: Path, frames: Iterable[Frame]) -> Iterator[tuple[int, Trajectory]]:
    context = Context()
    for number, frame in enumerate(frames, start=1):
        with _named(path, number):
            trajectory = unpack_trajectory(decompress(frame.data, context))
        yield frame.offset, trajectory


def _lines(path: Path, lines: Iterable[bytes]) -> Iterator[Trajectory]:
    for number, line in enumerate(lines, start=1):
        try:
            yield load_trajectory(line)
        except StoreError as error:
            raise StoreError(f"{path}:{number}: {error}; move the file away, or take that line out of it") from error


@contextmanager
def _named(path: Path, number: int = 0) -> Iterator[None]:
    """Failures inside name the file, and the record."""
    try:
        yield
    except StoreError as error:
        place = f"{path}: record {number}" if number else f"{path}"
        raise StoreError(f"{place}: {error}; move the file away") from error
