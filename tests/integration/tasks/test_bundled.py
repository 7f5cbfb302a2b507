"""Bundled tasks from a tiny source distribution in a local directory: no network."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from deepswe.config import BundledTasks
from deepswe.errors import BuildError, ConfigError, TaskError
from deepswe.progress import Silent
from deepswe.tasks.bundled import (
    Catalogue,
    Difficulty,
    RepositoryRecipe,
    SiteRecipe,
    TaskRecipe,
    bundled_task_set,
    load_catalogue,
    write_catalogue,
)
from deepswe.tasks.distributions import Distribution, Pip, unpack
from deepswe.tasks.layers import LayerCache

CODE = '"""Calc."""\n\n\ndef add(a, b):\n    """Return the sum of two numbers."""\n    return a + b\n'
BACKEND = """import os


def prepare_metadata_for_build_wheel(directory, config_settings=None):
    os.mkdir(os.path.join(directory, "tinycalc-1.0.dist-info"))
    with open(os.path.join(directory, "tinycalc-1.0.dist-info", "METADATA"), "w") as out:
        out.write("Metadata-Version: 2.1\\nName: tinycalc\\nVersion: 1.0\\n")
    return "tinycalc-1.0.dist-info"


def build_wheel(directory, config_settings=None, metadata_directory=None):
    raise NotImplementedError
"""
FILES = {
    "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    "PKG-INFO": "Metadata-Version: 2.1\nName: tinycalc\nVersion: 1.0\n",
    "backend.py": BACKEND,
    "tinycalc/__init__.py": CODE,
    "tinycalc/__pycache__/__init__.cpython-311.pyc": "stale",
    "tests/conftest.py": "",
    "tests/data.txt": "data",
    "tests/test_add.py": "from tinycalc import add\n\n\ndef test_one():\n    assert add(1, 1) == 2\n\n\n"
    "def test_two():\n    assert add(2, 3) == 5\n\n\ndef test_zero():\n    assert add(1, 0) == 1\n",
    "tests/test_other.py": "def test_other():\n    assert True\n",
    "tests/test_unused.py": "def test_unused():\n    assert True\n",
}


def pack(files: Mapping[str, str], extra: tuple[tarfile.TarInfo, ...] = (), top: str = "tinycalc-1.0/") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(top + name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
        for info in extra:
            tar.addfile(info)
    return stream.getvalue()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("index")
    (directory / "tinycalc-1.0.tar.gz").write_bytes(pack(FILES))
    return directory


@pytest.fixture(scope="module")
def pip(index: Path) -> Pip:
    return Pip(("--no-index", "--find-links", str(index)), timeout_s=60.0)


@pytest.fixture(scope="module")
def catalogue(index: Path) -> Catalogue:
    place = CODE.encode().index(b"a + b")
    repository = RepositoryRecipe(
        name="tinycalc",
        version="1.0",
        sha256=hashlib.sha256((index / "tinycalc-1.0.tar.gz").read_bytes()).hexdigest(),
        license="MIT",
        split="train",
        code=("tinycalc",),
        tests=("tests",),
        requirements=(),
        metadata=True,
        passing={
            "tests/test_add.py": ("test_one", "test_two", "test_zero"),
            "tests/test_other.py": ("test_other",),
        },
    )
    tasks = [
        TaskRecipe(
            id=f"tinycalc-{number:03d}",
            repo="tinycalc",
            kind="swap_arithmetic",
            seed=number,
            sites=(
                SiteRecipe(
                    file="tinycalc/__init__.py", start=place, end=place + 5, replacement="a - b", function="add"
                ),
            ),
            fail_to_pass=("tests/test_add.py::test_one", "tests/test_add.py::test_two"),
            test_files=("tests/test_add.py", "tests/test_other.py"),
            difficulty=Difficulty(sites=1, files=1, failing=2, distance=1),
            issue="add(1, 1) gives 0",
        )
        for number in (1, 2)
    ]
    return Catalogue(repositories=(repository,), tasks=tuple(tasks))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, catalogue: Catalogue, pip: Pip) -> LayerCache:
    cache = LayerCache(tmp_path_factory.mktemp("cache"))
    bundled_task_set(BundledTasks(), cache, catalogue=catalogue, pip=pip)
    return cache


def files_below(place: Path) -> Iterator[Path]:
    return (path for path in place.rglob("*") if path.is_file())


def test_agents_tree_has_the_bug_and_no_hidden_test(cache: LayerCache, catalogue: Catalogue) -> None:
    tasks = bundled_task_set(BundledTasks(), cache, catalogue=catalogue)
    repository = tasks.tasks[0].repository
    assert repository.base is not None
    base = {
        path.relative_to(cache.path(repository.base)).as_posix() for path in files_below(cache.path(repository.base))
    }
    assert base == {"pyproject.toml", "PKG-INFO", "backend.py", "tinycalc/__init__.py"}
    assert repository.files["tinycalc/__init__.py"] == CODE.replace("a + b", "a - b")
    assert set(repository.files) - {"tinycalc/__init__.py"} == {
        "tests/conftest.py",
        "tests/data.txt",
        "tests/test_other.py",
        "tests/test_unused.py",
    }


def test_no_layer_of_the_sandbox_holds_the_original_code_but_the_covered_base(
    cache: LayerCache, catalogue: Catalogue
) -> None:
    [task, _] = bundled_task_set(BundledTasks(), cache, catalogue=catalogue).tasks
    assert task.repository.environment is not None
    environment = cache.path(task.repository.environment)
    own = {path for path in files_below(environment) if "tinycalc" in str(path.relative_to(environment))}
    assert {path.name for path in own} == {"METADATA"}
    assert not [path for path in files_below(environment) if b"a + b" in path.read_bytes()]


def test_hidden_tests_are_what_grading_runs_and_what_it_leans_on(cache: LayerCache, catalogue: Catalogue) -> None:
    tasks = bundled_task_set(BundledTasks(), cache, catalogue=catalogue)
    hidden = tasks.hidden["tinycalc-001"]
    assert set(hidden.files) == {"tests/conftest.py", "tests/data.txt", "tests/test_add.py", "tests/test_other.py"}
    assert hidden.fail_to_pass == ("tests/test_add.py::test_one", "tests/test_add.py::test_two")
    assert hidden.pass_to_pass == ("tests/test_add.py::test_zero", "tests/test_other.py::test_other")


def test_gold_patch_applies_and_gives_the_original(cache: LayerCache, catalogue: Catalogue, tmp_path: Path) -> None:
    tasks = bundled_task_set(BundledTasks(), cache, catalogue=catalogue)
    target = tmp_path / "tinycalc" / "__init__.py"
    target.parent.mkdir()
    target.write_text(tasks.tasks[0].repository.files["tinycalc/__init__.py"])
    patch = tasks.hidden["tinycalc-001"].gold_patch
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tmp_path, check=True)
    assert target.read_text() == CODE


def test_second_build_needs_no_index(cache: LayerCache, catalogue: Catalogue, tmp_path: Path) -> None:
    nowhere = Pip(("--no-index", "--find-links", str(tmp_path / "nowhere")))
    assert len(bundled_task_set(BundledTasks(), cache, catalogue=catalogue, pip=nowhere).tasks) == 2


def test_environment_runs_where_it_is_mounted_and_knows_the_version(cache: LayerCache, catalogue: Catalogue) -> None:
    key = catalogue.repositories[0].distribution.environment_key
    python = cache.path(key) / "bin" / "python"
    program = "import importlib.metadata as m, sys; print(m.version('tinycalc'), sys.prefix)"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1.0", str(cache.path(key))]


def test_wrong_hash_is_refused(catalogue: Catalogue, pip: Pip, tmp_path: Path) -> None:
    wrong = catalogue.model_copy(
        update={"repositories": (catalogue.repositories[0].model_copy(update={"sha256": "0" * 64}),)}
    )
    with pytest.raises(BuildError, match=r"download of tinycalc==1\.0 failed(?s:.*)HASH"):
        bundled_task_set(BundledTasks(), LayerCache(tmp_path), catalogue=wrong, pip=pip)
    assert list((tmp_path / "work").iterdir()) == []


def test_repository_that_does_not_build_is_told_and_the_others_go_on(
    cache: LayerCache, catalogue: Catalogue, tmp_path: Path
) -> None:
    missing = catalogue.repositories[0].model_copy(update={"name": "absent", "sha256": "1" * 64})
    task = catalogue.tasks[0].model_copy(update={"id": "absent-001", "repo": "absent"})
    both = catalogue.model_copy(
        update={"repositories": (missing, *catalogue.repositories), "tasks": (task, *catalogue.tasks)}
    )
    told = dict[str, str]()
    nowhere = Pip(("--no-index", "--find-links", str(tmp_path)))
    tasks = bundled_task_set(
        BundledTasks(),
        cache,
        catalogue=both,
        pip=nowhere,
        on_failure=lambda name, error: told.update({name: str(error)}),
    )
    assert {item.repo for item in tasks.tasks} == {"tinycalc"}
    assert "No matching distribution found for absent==1.0" in told["absent"]


def test_unbuilt_repository_is_said_through_the_progress(
    cache: LayerCache, catalogue: Catalogue, tmp_path: Path
) -> None:
    lines = list[str]()

    class Lines(Silent):
        def say(self, text: str) -> None:
            lines.append(text)

    missing = catalogue.repositories[0].model_copy(update={"name": "absent"})
    task = catalogue.tasks[0].model_copy(update={"id": "absent-001", "repo": "absent"})
    both = catalogue.model_copy(
        update={"repositories": (missing, *catalogue.repositories), "tasks": (task, *catalogue.tasks)}
    )
    nowhere = Pip(("--no-index", "--find-links", str(tmp_path)))
    bundled_task_set(BundledTasks(), cache, Lines(), catalogue=both, pip=nowhere)
    assert lines[0].startswith("bundled repository absent is left out: download of absent==1.0 failed")


def test_limit_takes_repositories_in_turn_and_unknown_ones_are_refused(cache: LayerCache, catalogue: Catalogue) -> None:
    assert [t.id for t in bundled_task_set(BundledTasks(limit=1), cache, catalogue=catalogue).tasks] == ["tinycalc-001"]
    with pytest.raises(ConfigError, match=r"tasks\.repositories names 'nope'; there are tinycalc"):
        bundled_task_set(BundledTasks(repositories=("nope",)), cache, catalogue=catalogue)


def test_catalogue_survives_a_round_trip(catalogue: Catalogue, tmp_path: Path) -> None:
    write_catalogue(catalogue, tmp_path / "c.json")
    assert load_catalogue(tmp_path / "c.json") == catalogue
    (tmp_path / "c.json").write_text(json.dumps({"repositories": [], "surplus": 1}))
    with pytest.raises(TaskError, match="surplus"):
        load_catalogue(tmp_path / "c.json")


def link(kind: bytes, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo("tinycalc-1.0/link")
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("archive", "words"),
    [
        (pack({"../../evil": "x"}), "would leave its directory"),
        (pack({"/evil": "x"}, top=""), "would leave its directory"),
        (pack({}, (link(tarfile.SYMTYPE, "/etc"),)), "is a link or a device"),
        (pack({}, (link(tarfile.LNKTYPE, "../../x"),)), "is a link or a device"),
        (pack({}, (link(tarfile.FIFOTYPE, ""),)), "is a link or a device"),
        (b"no archive", "cannot be unpacked"),
        (pack(FILES)[:200], "cannot be unpacked"),
    ],
)
def test_hostile_or_broken_archive_is_refused(tmp_path: Path, archive: bytes, words: str) -> None:
    file, place = tmp_path / "in" / "a.tar.gz", tmp_path / "in" / "out"
    place.mkdir(parents=True)
    file.write_bytes(archive)
    with pytest.raises(BuildError, match=words):
        unpack(file, place, lambda path: True)
    assert {path.name for path in tmp_path.rglob("*")} <= {"in", "out", "a.tar.gz", *FILES}
    assert not (tmp_path / "evil").exists()


def test_environments_are_shared_by_those_that_need_the_same() -> None:
    one = Distribution("a", "1", "0" * 64, ("tests",), requirements=("pytest==8.4.2",))
    other = replace(one, name="b", sha256="1" * 64)
    assert one.environment_key == other.environment_key
    assert one.base_key != other.base_key
    assert replace(one, metadata=True).environment_key != one.environment_key


def test_hidden_tests_of_the_shipped_set_are_at_least_two_and_the_issue_names_none() -> None:
    shipped = load_catalogue()
    assert len({task.repo for task in shipped.tasks}) >= 6
    assert len({task.kind for task in shipped.tasks}) >= 12
    assert len({task.id for task in shipped.tasks}) == len(shipped.tasks)
    for task in shipped.tasks:
        names = {test.partition("::")[2].partition("[")[0].rpartition("::")[2] for test in task.fail_to_pass}
        assert len(task.fail_to_pass) >= 2
        assert not [name for name in names if name in task.issue]
        assert not [file for file in task.test_files if file in task.issue]
