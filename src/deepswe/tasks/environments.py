"""Environments out of exact packages: resolved once, named by what is in them, shared by all who need the same.

An environment holds the packages that tests need and never the code under test, of which it may hold the metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from deepswe.errors import BuildError
from deepswe.tasks.distributions import Pip, fill_environment
from deepswe.tasks.layers import LayerCache, layer_key

DATED_PIP = "pip==26.3"
"""The first pip that can leave out what was published later is 26; this one is fetched where it is asked to."""

_FORMAT = 1
_REPORT = "report.json"
_UNHASHED = frozenset({"pyvenv.cfg", "RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
"""Files that name the place or the tool of the build and hold nothing that tests could import."""


@dataclass(frozen=True, slots=True)
class Package:
    """One exact package.

    Attributes:
        name, version: as the index has them.
        sha256: of the archives that may be installed, in hexadecimal; without any, whatever the index gives.
    """

    name: str
    version: str
    sha256: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        """A line of a requirements file."""
        return " ".join([f"{self.name}=={self.version}", *(f"--hash=sha256:{digest}" for digest in self.sha256)])


@dataclass(frozen=True, slots=True)
class Environment:
    """What an environment holds; its key depends on nothing else.

    Attributes:
        packages: all of them, their own needs included.
        project, version: of the code under test, whose metadata the environment then has; empty leaves it out.
    """

    packages: tuple[Package, ...]
    project: str = ""
    version: str = ""

    @property
    def key(self) -> str:
        """Of its layer, for this interpreter; the same on every machine with the same Python and platform."""
        return layer_key("env", {"format": _FORMAT, **asdict(self), "python": this_python(), "machine": this_machine()})


def this_python() -> str:
    """Version of the interpreter, such as "3.11.7"."""
    return platform.python_version()


def this_machine() -> str:
    """Platform and processor, such as "linux-x86_64"."""
    return f"{sys.platform}-{platform.machine()}"


def resolve(
    requirements: Sequence[str],
    cache: LayerCache,
    pip: Pip,
    *,
    constraints: Sequence[str] = (),
    before: date | None = None,
    needs: bool = True,
) -> tuple[Package, ...]:
    """Exact packages that meet requirements, with hashes. Resolved once: the answer is kept in the cache.

    Args:
        requirements: as in a requirements file.
        cache: keeps the answer.
        pip: how pip is called.
        constraints: further limits on whatever is chosen.
        before: leave out what the index says was published on this day or later.
        needs: also what the requirements themselves require.

    Raises:
        BuildError: pip finds no such set.
    """
    wanted_lines, limit_lines = sorted(set(requirements)), sorted(set(constraints))
    recipe = {
        "requirements": wanted_lines,
        "constraints": limit_lines,
        "before": before.isoformat() if before else "",
        "needs": needs,
        "python": this_python(),
        "machine": this_machine(),
    }
    tools = [_dated_pip(cache, pip)] if before else []

    def build(place: Path) -> None:
        wanted, limits = place / "requirements.txt", place / "constraints.txt"
        wanted.write_text("\n".join(wanted_lines) + "\n")
        limits.write_text("\n".join(limit_lines) + "\n")
        options = ["--quiet", "--dry-run", "--ignore-installed", "--report", str(place / _REPORT)]
        options += ["--uploaded-prior-to", before.isoformat()] if before else []
        options += [] if needs else ["--no-deps"]
        files = ["--requirement", str(wanted), "--constraint", str(limits)]
        pip.run(f"resolution of {', '.join(requirements)}", ["install", *options, *files], path=tools)
        packages = _read_report(place / _REPORT)
        (place / _REPORT).write_text(json.dumps([asdict(package) for package in packages]))

    rows = json.loads((cache.build(layer_key("resolution", recipe), build) / _REPORT).read_text())
    return tuple(Package(row["name"], row["version"], tuple(row["sha256"])) for row in rows)


def _dated_pip(cache: LayerCache, pip: Pip) -> Path:
    key = layer_key("pip", {"requirement": DATED_PIP, "python": sys.version})
    arguments = ["install", "--quiet", "--no-deps", "--target"]
    return cache.build(key, lambda place: pip.run(f"installation of {DATED_PIP}", [*arguments, str(place), DATED_PIP]))


def _read_report(path: Path) -> tuple[Package, ...]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    packages = []
    for item in record["install"]:
        hashes = item["download_info"].get("archive_info", {}).get("hashes", {})
        if "sha256" not in hashes:
            raise BuildError(f"{item['metadata']['name']} is no archive with a hash; name packages of an index only")
        packages.append(Package(item["metadata"]["name"], item["metadata"]["version"], (hashes["sha256"],)))
    return tuple(sorted(packages, key=lambda package: package.name.lower()))


def build_environment(environment: Environment, cache: LayerCache, pip: Pip, *, key: str = "") -> Path:
    """The environment's layer, built if it is not there yet, or was built by an interpreter in another place.

    Args:
        environment: what it holds.
        cache: where it goes.
        pip: how pip is called.
        key: under which key; by default its own.

    Raises:
        BuildError: with the tail of pip's output.
    """
    key = key or environment.key
    if key in cache and not (cache.path(key) / "bin" / "python").exists():
        cache.remove(key)
    place = cache.build(key, lambda place: _fill(environment, place, pip))
    cache.note(key, {"environment": asdict(environment)})
    return place


def _fill(environment: Environment, place: Path, pip: Pip) -> None:
    names = ", ".join(f"{package.name}=={package.version}" for package in environment.packages)
    lines = [package.requirement for package in environment.packages]
    project, version = environment.project, environment.version
    fill_environment(place, pip, lines, action=f"installation of {names}", project=project, version=version)


def hash_layer(place: Path) -> str:
    """SHA-256 over the paths, kinds, execution bits and contents of a layer, in hexadecimal.

    Left out is what differs between two builds of the same: byte code, pip's and venv's notes of where and by what
    they were run, and where the links to the interpreter lead.
    """
    digest = hashlib.sha256()
    for path in sorted(_walk(place), key=lambda item: item.relative_to(place).as_posix()):
        name = path.relative_to(place).as_posix()
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            target = os.readlink(path)
            line = b"link " + (b"" if os.path.isabs(target) else os.fsencode(target))
        else:
            kind = b"program " if mode & stat.S_IXUSR else b"file "
            line = kind + hashlib.sha256(path.read_bytes()).hexdigest().encode()
        digest.update(os.fsencode(name) + b"\0" + line + b"\n")
    return digest.hexdigest()


def _walk(place: Path) -> list[Path]:
    found = []
    for directory, names, files in os.walk(place):
        links = [name for name in names if os.path.islink(os.path.join(directory, name))]
        names[:] = [name for name in names if name != "__pycache__" and name not in links]
        found += [Path(directory, name) for name in (*files, *links) if name not in _UNHASHED]
    return found
