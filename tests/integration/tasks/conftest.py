"""A package index in a directory: pip works as ever, without a network."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

import _pytest
import iniconfig
import packaging
import pluggy
import pygments
import pytest

from deepswe.tasks.distributions import Pip

LEXERS = ("__init__.py", "_mapping.py", "python.py", "diff.py")


def pack_wheel(directory: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    """Write a wheel of plain Python files."""
    info = f"{name}-{version}.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        rows.append(f"{path},sha256={digest},{len(data)}\n")
    content[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"]).encode()
    target = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for path, data in content.items():
            archive.writestr(zipfile.ZipInfo(path), data)
    return target


@pytest.fixture(scope="session")
def package_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with pytest, all that it needs inside, as version 8.9, and a package `tiny` in two versions."""
    directory = tmp_path_factory.mktemp("package-index")
    files = {"py.py": (Path(pytest.__file__).parent.parent / "py.py").read_bytes()}
    for module in (pytest, _pytest, pluggy, iniconfig, packaging, pygments):
        root = Path(str(module.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            if path.parent.name != "lexers" or path.name in LEXERS:
                files[path.relative_to(root.parent).as_posix()] = path.read_bytes()
    pack_wheel(directory, "pytest", "8.9", files)
    for version in ("1.0", "2.0"):
        pack_wheel(directory, "tiny", version, {"tiny.py": f"VERSION = {version!r}\n".encode()})
    return directory


@pytest.fixture(scope="session")
def offline_pip(package_index: Path) -> Pip:
    """pip over that directory alone."""
    return Pip(("--no-index", "--find-links", str(package_index)), timeout_s=120.0)
