"""A workshop over one real pool for a whole module."""

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import _pytest
import iniconfig
import packaging
import pluggy
import pygments
import pytest

from deepswe.config import SandboxConfig
from deepswe.grading.tree import Workshop
from deepswe.sandbox.pool import SandboxPool, limits_of


def unused_lexers(directory: str, names: list[str]) -> list[str]:
    """What pytest does not need of the largest package that it imports."""
    kept = ("__init__.py", "_mapping.py", "python.py", "diff.py")
    return [name for name in names if directory.endswith("/lexers") and name not in kept]


def link_or_copy(source: str, target: str) -> None:
    """A second name for a file, or a copy where the file system has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def make_environment(path: Path) -> None:
    """A virtual environment that holds pytest alone."""
    packages = path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    for module in (pytest, _pytest, pluggy, iniconfig, packaging, pygments):
        source = Path(str(module.__file__)).parent
        shutil.copytree(source, packages / source.name, copy_function=link_or_copy, ignore=unused_lexers)
        if module is pytest:
            link_or_copy(str(source.parent / "py.py"), str(packages / "py.py"))
    (path / "bin").mkdir()
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    (path / "bin" / "python").symlink_to(base)
    (path / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """One layer, "environment": this interpreter with pytest and no plugins."""
    layers = tmp_path_factory.mktemp("layers")
    make_environment(layers / "environment")
    config = SandboxConfig()
    pool = SandboxPool(config, run="grading-tests")
    yield Workshop(pool.open, layers.joinpath, limits_of(config))
    asyncio.run(pool.close())
