"""The layer cache: read-only directory trees, each built once and named by what it was built from."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from deepswe.atomic import write_atomically
from deepswe.errors import BuildError

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,150}")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_POLL_S = 0.05

Builder = Callable[[Path], None]
"""Fills the empty directory that it is given. It may raise `OSError` or `BuildError`; what it left is then removed."""


def default_cache_root(environ: Mapping[str, str]) -> Path:
    """`DEEPSWE_CACHE`, else `deepswe` under `XDG_CACHE_HOME`, else `~/.cache/deepswe`."""
    if environ.get("DEEPSWE_CACHE"):
        return Path(environ["DEEPSWE_CACHE"])
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "deepswe"
    return Path(environ.get("HOME") or Path.home()) / ".cache" / "deepswe"


def layer_key(name: str, recipe: Mapping[str, object]) -> str:
    """A key that changes whenever anything in `recipe` (JSON values) does: `name` and 16 hex digits."""
    text = json.dumps(recipe, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class LayerCache:
    """A directory of finished layers. Safe for any number of builders, in any number of processes.

    A layer appears under its key by one rename, whole or not at all. Builders of one key wait for each other. What a
    killed builder left is removed by the next one. All files are readable by everybody and none is writable by others.
    """

    def __init__(self, root: Path, *, lock_timeout_s: float = 1800.0) -> None:
        """Name a cache; nothing is written before the first build.

        Args:
            root: its directory.
            lock_timeout_s: how long to wait for another builder of the same layer.
        """
        self.root = root
        self.lock_timeout_s = lock_timeout_s

    @classmethod
    def default(cls) -> LayerCache:
        """The cache of this user; see `default_cache_root`."""
        return cls(default_cache_root(os.environ))

    def __contains__(self, key: str) -> bool:
        return self._place(key).is_dir()

    def path(self, key: str) -> Path:
        """The directory of a finished layer.

        Raises:
            BuildError: there is none of that key.
        """
        place = self._place(key)
        if not place.is_dir():
            raise BuildError(f"layer {key} is not in the cache {self.root}; build its task set again")
        return place

    def build(self, key: str, builder: Builder) -> Path:
        """The layer's directory, filled by `builder` if it is not there yet.

        Raises:
            BuildError: the builder failed, the disk is full, the cache cannot be written, or another builder of the
                same layer took longer than `lock_timeout_s`. Nothing is left behind.
        """
        place = self._place(key)
        if place.is_dir():
            return place
        try:
            for directory in (self._layers, self._locks, self._work):
                directory.mkdir(parents=True, exist_ok=True)
            self._reap()
            with self._locked(key):
                if not place.is_dir():
                    self._build_locked(key, place, builder)
        except OSError as error:
            raise BuildError(self._explain(key, error)) from error
        return place

    def remove(self, key: str) -> None:
        """Forget a layer; an absent one is ignored. The caller knows that no sandbox uses it."""
        shutil.rmtree(self._place(key), ignore_errors=True)

    def note(self, key: str, origin: Mapping[str, object]) -> None:
        """Keep what a layer was built from, beside it; the first note stands.

        Raises:
            BuildError: it cannot be written.
        """
        path = self._origins / f"{key}.json"
        if path.exists():
            return
        try:
            write_atomically(path, json.dumps(origin))
        except OSError as error:
            raise BuildError(self._explain(key, error)) from error

    def origin(self, key: str) -> dict[str, object] | None:
        """What `note` kept of a layer, or None."""
        path = self._origins / f"{key}.json"
        if not path.is_file():
            return None
        record: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
        return record

    def _build_locked(self, key: str, place: Path, builder: Builder) -> None:
        work = self._work / key
        shutil.rmtree(work, ignore_errors=True)
        try:
            work.mkdir()
            builder(work)
            _open_to_readers(work)
            work.rename(place)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _reap(self) -> None:
        """Remove the unfinished layers of builders that died: those whose lock nobody holds."""
        for leftover in list(self._work.iterdir()):
            with _try_lock(self._locks / leftover.name) as gained:
                if gained:
                    shutil.rmtree(leftover, ignore_errors=True)

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        deadline = time.monotonic() + self.lock_timeout_s
        while True:
            with _try_lock(self._locks / key) as gained:
                if gained:
                    yield
                    return
            if time.monotonic() > deadline:
                raise BuildError(
                    f"layer {key}: another process has been building it for {self.lock_timeout_s:.0f} s; "
                    f"see who holds {self._locks / key}, or set DEEPSWE_CACHE to another directory"
                )
            time.sleep(_POLL_S)

    def _explain(self, key: str, error: OSError) -> str:
        if error.errno in _FULL:
            return f"layer {key}: the disk of {self.root} is full; free some space or set DEEPSWE_CACHE to another disk"
        return f"layer {key} cannot be built in {self.root}: {error}; set DEEPSWE_CACHE to a directory you can write"

    def _place(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise BuildError(f"layer key {key!r} is not a plain name of letters, digits, dots, dashes and underscores")
        return self._layers / key

    @property
    def _layers(self) -> Path:
        return self.root / "layers"

    @property
    def _origins(self) -> Path:
        return self.root / "origins"

    @property
    def _locks(self) -> Path:
        return self.root / "locks"

    @property
    def _work(self) -> Path:
        return self.root / "work"


@contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _open_to_readers(root: Path) -> None:
    """Make every directory and file readable by all and writable by the owner only. Links are left as they are."""
    for directory, _, names in os.walk(root):
        os.chmod(directory, 0o755)
        for name in names:
            file = os.path.join(directory, name)
            mode = os.lstat(file).st_mode
            if stat.S_ISREG(mode):
                os.chmod(file, 0o755 if mode & stat.S_IXUSR else 0o644)
