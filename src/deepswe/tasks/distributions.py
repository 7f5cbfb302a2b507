"""Layers out of source distributions: the tree without its tests, the tests alone, and the environment to run them in.

pip fetches an exact version and refuses another hash before it looks inside. Archives are unpacked here, by hand, so
that nothing lands outside its layer. An environment holds the packages that the tests need, never the package under
test: no file of a sandbox holds the original of a mutated function.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from deepswe.errors import BuildError
from deepswe.tasks.layers import LayerCache, layer_key

ENVIRONMENT_TARGET = "/opt/env"
"""Where a sandbox shows an environment layer; its scripts name the interpreter there."""

Half = Literal["base", "tests"]

_FORMAT = 1
_MAX_TREE_BYTES = 512 << 20
_MAX_MEMBERS = 50_000
_NEVER = frozenset({".git", ".hg", "__pycache__", ".pytest_cache", ".mypy_cache", ".tox", ".eggs", ".venv"})
_COMPILED = frozenset({".pyc", ".pyo"})


@dataclass(frozen=True, slots=True)
class Distribution:
    """One source distribution and how its tree is divided.

    Attributes:
        name, version: as the index knows them.
        sha256: of the archive, in hexadecimal.
        tests: files and directories that hold tests, relative to the root.
        exclude: files and directories that nobody needs.
        requirements: exact pins ("pytest==8.4.2") of everything that the tests import, their own needs included.
        metadata: whether the code asks for its own version; the environment then has the metadata, without code.
    """

    name: str
    version: str
    sha256: str
    tests: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    metadata: bool = False

    @property
    def base_key(self) -> str:
        """Key of the tree without tests."""
        return layer_key(f"base-{self.name}-{self.version}", self._tree())

    @property
    def tests_key(self) -> str:
        """Key of the tests alone."""
        return layer_key(f"tests-{self.name}-{self.version}", self._tree())

    @property
    def environment_key(self) -> str:
        """Key of the environment, for this interpreter; shared by those that need the same."""
        own = f"{self.name}-{self.version}" if self.metadata else ""
        return layer_key(
            f"env-{own}" if own else "env",
            {
                "format": _FORMAT,
                "requirements": self.requirements,
                "metadata": own,
                "python": [sys.version, sys.base_prefix, sys.platform],
            },
        )

    @property
    def pinned(self) -> dict[str, Any]:
        """What the environment is built from: the pins, and the project whose metadata it has."""
        own = (self.name, self.version) if self.metadata else ("", "")
        return {"requirements": self.requirements, "project": own[0], "version": own[1]}

    def archive(self, half: Half) -> dict[str, Any]:
        """What the tree without tests, or the tests, are unpacked from."""
        return {
            "name": self.name,
            "version": self.version,
            "sha256": self.sha256,
            "half": half,
            "tests": self.tests,
            "exclude": self.exclude,
        }

    def _tree(self) -> dict[str, object]:
        return {"format": _FORMAT, "sha256": self.sha256, "tests": self.tests, "exclude": self.exclude}


@dataclass(frozen=True, slots=True)
class Pip:
    """How pip is called: this interpreter's own, with the user's index settings.

    Attributes:
        arguments: added to every call that fetches, such as ("--no-index", "--find-links", directory).
        timeout_s: for one call.
    """

    arguments: tuple[str, ...] = ()
    timeout_s: float = 600.0

    def run(self, action: str, arguments: Sequence[str], *, path: Sequence[Path] = ()) -> None:
        """Call pip.

        Args:
            action: what is being done, for the error message.
            arguments: of pip, without `self.arguments`.
            path: directories from which build backends are imported.

        Raises:
            BuildError: with the tail of what pip said.
        """
        command = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--no-input",
            *arguments,
            *self.arguments,
        ]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(item) for item in path)}
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        ) as process:
            try:
                out, errors = process.communicate(timeout=self.timeout_s)
            except subprocess.TimeoutExpired as error:
                raise BuildError(f"{action}: pip took longer than {self.timeout_s:.0f} s; try again") from error
            finally:
                # A set-up script may have started processes that outlive pip.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode == 0:
            return
        said = errors.strip() or out.strip()
        if "No module named pip" in said:
            said = f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip`"
        elif "No space left on device" in said:
            said = "the disk is full; free some space"
        lines = [line for line in said.splitlines() if line.strip() and not line.startswith("WARNING: Location")]
        raise BuildError(f"{action} failed: " + "\n".join(lines[-12:]))


def fetch_sdist(distribution: Distribution, cache: LayerCache, pip: Pip, build_requirements: Sequence[str]) -> Path:
    """The archive, fetched once.

    Args:
        distribution: which one.
        cache: keeps it.
        pip: fetches it.
        build_requirements: exact pins of the build backends; pip asks one for the metadata of what it fetches.

    Raises:
        BuildError: it cannot be fetched, or its hash is another one.
    """
    pin = f"{distribution.name}=={distribution.version}"

    def build(directory: Path) -> None:
        backends = _backends(cache, pip, build_requirements)
        requirement = directory / "requirement.txt"
        requirement.write_text(f"{pin} --hash=sha256:{distribution.sha256}\n")
        options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes", "--quiet"]
        pip.run(
            f"download of {pin}",
            ["download", *options, "--dest", str(directory), "--requirement", str(requirement)],
            path=[backends] if backends else [],
        )
        requirement.unlink()

    key = layer_key(f"sdist-{distribution.name}-{distribution.version}", {"sha256": distribution.sha256})
    archives = [item for item in cache.build(key, build).iterdir() if item.is_file()]
    if len(archives) != 1:
        raise BuildError(
            f"download of {pin} gave {len(archives)} files instead of one archive; is there an sdist of it?"
        )
    found = hashlib.sha256(archives[0].read_bytes()).hexdigest()
    if found != distribution.sha256:
        cache.remove(key)
        raise BuildError(f"{archives[0].name} has sha256 {found}, expected {distribution.sha256}; it is not used")
    return archives[0]


def build_layers(distribution: Distribution, cache: LayerCache, pip: Pip, build_requirements: Sequence[str]) -> None:
    """Build the three layers of a distribution where they are not there yet; nothing is fetched if they all are.

    Raises:
        BuildError: naming the distribution, with the tail of pip's output where pip failed.
    """
    if distribution.base_key not in cache or distribution.tests_key not in cache:
        archive = fetch_sdist(distribution, cache, pip, build_requirements)
        keep_tree(distribution, archive, cache)
    action = f"installation of the test requirements of {distribution.name}"
    cache.build(
        distribution.environment_key,
        lambda place: fill_environment(place, pip, action=action, **distribution.pinned),
    )


def keep_tree(distribution: Distribution, archive: Path, cache: LayerCache) -> None:
    """Build the tree and the tests of a distribution out of an archive that is at hand.

    Raises:
        BuildError: see `unpack`.
    """
    cache.build(distribution.base_key, lambda place: unpack(archive, place, _outside(distribution)))
    cache.build(distribution.tests_key, lambda place: unpack(archive, place, _inside(distribution)))


def note_origins(distribution: Distribution, spec: str, cache: LayerCache) -> None:
    """Keep beside the layers of a distribution what they were made from, so that they can be locked.

    Args:
        distribution: whose layers.
        spec: the directory, the archive or the git URL that it is; "" for a source distribution of the index.
        cache: with the layers.

    Raises:
        BuildError: it cannot be written.
    """
    cache.note(distribution.base_key, {"archive": {**distribution.archive("base"), "spec": spec}})
    cache.note(distribution.tests_key, {"archive": {**distribution.archive("tests"), "spec": spec}})
    cache.note(distribution.environment_key, {"pinned": distribution.pinned})


def unpack(archive: Path, place: Path, wanted: Callable[[PurePosixPath], bool], *, skip_links: bool = False) -> None:
    """Unpack the wanted files of a .tar.gz below its one top directory. Caches, bytecode and history are left out.

    Args:
        archive: the file.
        place: an empty directory.
        wanted: tells by the path below the top directory.
        skip_links: leave links out where they would be refused.

    Raises:
        BuildError: it is no such archive, holds links, devices or paths that leave the tree, or is absurdly large.
    """
    try:
        with tarfile.open(archive, "r:*") as tar:
            members = tar.getmembers()
            _check_size(archive, members)
            for member in members:
                if skip_links and (member.issym() or member.islnk()):
                    continue
                path = _safe_path(archive, member)
                if member.isdir() or not path.parts or not _is_kept(path) or not wanted(path):
                    continue
                stream = tar.extractfile(member)
                if stream is None:
                    raise BuildError(f"{archive.name}: member {member.name!r} cannot be read")
                target = place / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with stream, target.open("xb") as out:
                    shutil.copyfileobj(stream, out)
                target.chmod(0o755 if member.mode & 0o100 else 0o644)
    except (tarfile.TarError, EOFError, FileExistsError) as error:
        raise BuildError(f"{archive.name} cannot be unpacked: {error}") from error


def _check_size(archive: Path, members: Sequence[tarfile.TarInfo]) -> None:
    total = sum(member.size for member in members)
    if total > _MAX_TREE_BYTES or len(members) > _MAX_MEMBERS:
        raise BuildError(f"{archive.name} unpacks to {total} bytes in {len(members)} files; that is too much")


def _safe_path(archive: Path, member: tarfile.TarInfo) -> PurePosixPath:
    """The member's path below the top directory; empty for that directory itself."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name or "\0" in member.name:
        raise BuildError(f"{archive.name}: member {member.name!r} would leave its directory; the archive is not used")
    if not (member.isfile() or member.isdir()):
        raise BuildError(f"{archive.name}: member {member.name!r} is a link or a device; the archive is not used")
    return PurePosixPath(*path.parts[1:])


def _is_kept(path: PurePosixPath) -> bool:
    return not _NEVER.intersection(path.parts) and path.suffix not in _COMPILED


def _under(path: PurePosixPath, places: Sequence[str]) -> bool:
    return any(path.is_relative_to(place) for place in places)


def _outside(distribution: Distribution) -> Callable[[PurePosixPath], bool]:
    return lambda path: not _under(path, (*distribution.tests, *distribution.exclude))


def _inside(distribution: Distribution) -> Callable[[PurePosixPath], bool]:
    return lambda path: _under(path, distribution.tests) and not _under(path, distribution.exclude)


def _backends(cache: LayerCache, pip: Pip, requirements: Sequence[str]) -> Path | None:
    if not requirements:
        return None
    key = layer_key("backends", {"requirements": tuple(requirements), "python": sys.version})
    action = "installation of the build backends"
    return cache.build(
        key, lambda place: pip.run(action, ["install", "--quiet", "--no-deps", "--target", str(place), *requirements])
    )


def fill_environment(
    place: Path, pip: Pip, requirements: Sequence[str], *, action: str, project: str = "", version: str = ""
) -> None:
    """A virtual environment for `ENVIRONMENT_TARGET`, without pip and without the code under test.

    Args:
        place: an empty directory.
        pip: how pip is called.
        requirements: lines of a requirements file, exact pins; with hashes, if all of them have some.
        action: what is being installed, for the error message.
        project, version: of the code under test, whose metadata it then has; empty leaves it out.

    Raises:
        BuildError: with the tail of pip's output.
    """
    venv.EnvBuilder(symlinks=True, with_pip=False).create(place)
    for script in (place / "bin").iterdir():
        if "activate" in script.name.lower():
            script.unlink()
    if requirements:
        lines = place / "requirements.txt"
        lines.write_text("".join(f"{line}\n" for line in requirements))
        options = ["--quiet", "--no-deps", "--no-warn-script-location", "--requirement", str(lines)]
        hashed = ["--require-hashes"] if all("--hash=" in line for line in requirements) else []
        pip.run(action, ["--python", str(place / "bin" / "python"), "install", *options, *hashed])
        lines.unlink()
    for script in (place / "bin").iterdir():
        if not script.is_symlink():
            _retarget(script)
    if project:
        _write_metadata(next(place.glob("lib/python*/site-packages")), project, version)


def _retarget(script: Path) -> None:
    """Make a console script start the interpreter of `ENVIRONMENT_TARGET`; a script of another kind stays."""
    lines = script.read_bytes().splitlines(keepends=True)
    if not lines or not lines[0].startswith(b"#!") or b"python" not in b"".join(lines[:3]):
        return
    header = 3 if lines[0].startswith(b"#!/bin/sh") else 1
    script.write_bytes(f"#!{ENVIRONMENT_TARGET}/bin/python\n".encode() + b"".join(lines[header:]))


def _write_metadata(site: Path, project: str, version: str) -> None:
    """Make code that asks for its own version find one: metadata without code."""
    directory = site / f"{project.replace('-', '_')}-{version}.dist-info"
    directory.mkdir(exist_ok=True)
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
