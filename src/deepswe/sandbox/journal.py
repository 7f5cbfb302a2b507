"""The directories of pools on this machine, and in each the journal of the sandboxes that its pool has alive."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deepswe.errors import SandboxUnavailable
from deepswe.sandbox.base import EXPIRES, OWNER, RUN, TASK, SandboxRecord
from deepswe.sandbox.owner import PREFIX, is_abandoned, judge, read_owner, start_time

FILE = "sandboxes.jsonl"
COMPACT_AT = 2000
"""Lines after which the journal is written anew without those that have ended."""


def base_directory() -> Path:
    """Where pools keep their few files: private to this user.

    Raises:
        SandboxUnavailable: somebody else owns it.
    """
    path = Path(tempfile.gettempdir()) / f"deepswe-sandboxes-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise SandboxUnavailable(f"{path} belongs to another user; set TMPDIR to a directory of your own")
    return path


def reap_directories(base: Path) -> list[Path]:
    """End what is left of pools whose owners are dead, and remove their directories; returns these."""
    reap_processes(os.getuid())
    found = []
    for path in base.iterdir():
        try:
            age_s = time.time() - path.stat().st_mtime
        except FileNotFoundError:  # another reaper was faster
            continue
        if is_abandoned(path.name, age_s):
            shutil.rmtree(path, ignore_errors=True)
            found.append(path)
    return found


def reap_processes(uid: int) -> list[int]:
    """Kill the processes of sandboxes whose owners are dead; returns their ids once they are gone, or after 5 s.

    They die with their owners, but for one: a child of bubblewrap whose parent was killed in its first milliseconds.
    It is known by the pool's directory in its arguments.
    """
    found = {pid: start_time(pid) for pid in find_processes(uid, is_abandoned)}
    for pid in found:
        _kill(pid)
    give_up = time.monotonic() + 5
    while any(start_time(pid) == start for pid, start in found.items()) and time.monotonic() < give_up:
        time.sleep(0.01)
    return list(found)


def find_processes(uid: int, wanted: Callable[[str], bool]) -> list[int]:
    """Processes of a user with a pool's directory in their arguments whose name is wanted."""
    pattern = re.compile(rf"/deepswe-sandboxes-{uid}/({PREFIX}[0-9a-z-]+)/".encode())
    found = []
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        try:
            match = pattern.search(Path(f"/proc/{name}/cmdline").read_bytes())
        except OSError:
            continue
        if match and wanted(match[1].decode()):
            found.append(int(name))
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


@dataclass(slots=True)
class Journal:
    """A line for each start and each end, in the order in which they happened. One writer."""

    path: Path
    _alive: dict[str, str] = field(default_factory=dict)
    _lines: int = 0

    def began(self, name: str, labels: Mapping[str, str]) -> None:
        """A sandbox is about to start."""
        row = {"name": name, "created": time.time(), "labels": dict(labels)}
        self._alive[name] = json.dumps(row)
        self._append(self._alive[name])

    def ended(self, name: str) -> None:
        """It has ended."""
        if self._alive.pop(name, None) is not None:
            self._append(json.dumps({"ended": name}))

    def _append(self, line: str) -> None:
        self._lines += 1
        if self._lines > COMPACT_AT + 2 * len(self._alive):
            self._compact()
            return
        data = line.encode() + b"\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            if os.write(descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        finally:
            os.close(descriptor)

    def _compact(self) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text("".join(line + "\n" for line in self._alive.values()), encoding="utf-8")
        fresh.replace(self.path)
        self._lines = len(self._alive)


def read_records(directory: Path, backend: str) -> list[SandboxRecord]:
    """The sandboxes that a pool's journal has alive; those of a dead owner were so when it died."""
    try:
        lines = (directory / FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    rows: dict[str, Mapping[str, object]] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a writer that was killed
            continue
        if "ended" in row:
            rows.pop(row["ended"], None)
        else:
            rows[row["name"]] = row
    owner = read_owner(directory.name)
    return [_record(row, backend, owner.tag if owner else "") for row in rows.values()]


def _record(row: Mapping[str, object], backend: str, owner: str) -> SandboxRecord:
    labels = row["labels"] if isinstance(row["labels"], dict) else {}
    expires = float(labels.get(EXPIRES, "inf"))
    tag = labels.get(OWNER, owner)
    return SandboxRecord(
        backend=backend,
        name=str(row["name"]),
        run=labels.get(RUN, ""),
        task=labels.get(TASK, ""),
        owner=tag,
        created=float(str(row["created"])),
        expires=expires,
        state=judge(tag, expires, time.time()),
    )


def pool_directories(base: Path) -> list[Path]:
    """The directories of all pools, of living and dead owners."""
    return sorted(path for path in base.iterdir() if path.name.startswith(PREFIX))
