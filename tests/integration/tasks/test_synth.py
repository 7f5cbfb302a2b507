"""From a source tree or a git repository to a task-set file, with an index that is a local directory."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from deepswe.errors import StoreError
from deepswe.progress import Silent
from deepswe.tasks.distributions import Pip
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.synth import project as project_module
from deepswe.tasks.synth.find import Plan, Verdict
from deepswe.tasks.synth.journal import Journal
from deepswe.tasks.synth.project import find_layout, open_project, read_metadata
from deepswe.tasks.synth.refusal import ProjectRefused, failure_reason

CODE = "def add(a, b):\n    return a + b\n"
TESTS = """import pytest
from calc import add


@pytest.mark.parametrize("n", range(6))
def test_add(n):
    assert add(n, 1) == n + 1


def test_nothing():
    assert True
"""
PYPROJECT = """[project]
name = "calc"
version = "1.5"
license = "MIT"
dependencies = ["six>=1"]
[project.optional-dependencies]
test = ["pytest>=7", "pytest-cov", "hypothesis>6"]
[tool.pytest.ini_options]
addopts = "--cov --import-mode=importlib"
"""
NOWHERE = Pip(("--no-index",), timeout_s=60.0)


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {"pyproject.toml": PYPROJECT, "src/calc/__init__.py": CODE, "tests/test_calc.py": TESTS, "docs/x.py": ""}
    return write_tree(tmp_path / "calc", files)


def test_project_says_what_it_needs_and_where_its_tests_are(tree: Path) -> None:
    metadata = read_metadata(tree)
    assert (metadata.name, metadata.version, metadata.license, metadata.complete) == ("calc", "1.5", "MIT", True)
    assert metadata.needs == ("six>=1",)
    assert metadata.test_needs == ("hypothesis>6",)
    layout = find_layout(tree, metadata)
    assert (layout.code, layout.tests, layout.pythonpath) == (("src/calc",), ("tests",), ("src",))
    assert layout.arguments == ("--continue-on-collection-errors", "-o", "addopts=", "--import-mode=importlib")


def test_tests_beside_and_inside_the_code_are_found(tmp_path: Path) -> None:
    files = {"calc/__init__.py": CODE, "calc/tests/test_a.py": TESTS, "test_b.py": TESTS, "setup.py": ""}
    layout = find_layout(write_tree(tmp_path, files), read_metadata(tmp_path))
    assert (layout.code, layout.tests, layout.pythonpath) == (("calc",), ("calc/tests", "test_b.py"), (".",))


def refused(spec: str, tmp_path: Path) -> ProjectRefused:
    with pytest.raises(ProjectRefused) as caught:
        open_project(spec, LayerCache(tmp_path / "cache"), NOWHERE, Silent())
    return caught.value


def test_project_without_tests_is_refused(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "calc", {"pyproject.toml": PYPROJECT, "calc.py": CODE})
    assert refused(str(tree), tmp_path).reason == "no-tests"


def test_archive_that_leaves_its_directory_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "evil-1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        info = tarfile.TarInfo("evil-1/../../out.py")
        tar.addfile(info, io.BytesIO(b""))
    error = refused(str(archive), tmp_path)
    assert error.reason == "unsafe-archive"
    assert not (tmp_path.parent / "out.py").exists()


def test_needs_that_nobody_has_and_specs_that_are_nothing_are_refused(tree: Path, tmp_path: Path) -> None:
    assert refused(str(tree), tmp_path).reason == "does-not-build"
    assert refused("no such thing", tmp_path).reason == "not-found"
    assert refused(f"file://{tmp_path}/nothing.git", tmp_path).reason == "not-found"
    assert refused("absent-project-of-nobody", tmp_path).reason == "not-found"


def test_set_up_that_hangs_is_refused_and_leaves_no_process(tmp_path: Path) -> None:
    backend = "import subprocess, time\nsubprocess.Popen(['sleep', '98.7'])\ntime.sleep(98.7)\n"
    files = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "slow"\nbackend-path = ["."]\n',
        "slow.py": backend,
        "calc.py": CODE,
        "tests/test_calc.py": TESTS,
    }
    tree = write_tree(tmp_path / "calc", files)
    with pytest.raises(ProjectRefused, match="took longer than") as caught:
        open_project(str(tree), LayerCache(tmp_path / "cache"), Pip(("--no-index",), timeout_s=5.0), Silent())
    assert caught.value.reason == "hangs"
    assert subprocess.run(["pgrep", "-f", "sleep 98.7"], capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("gaierror: [Errno -2] Name or service not known", "needs-network"),
        ("TclError no display name and no $DISPLAY environment variable", "needs-display"),
        ("AssertionError assert 1 == 2", "other"),
    ],
)
def test_failures_tell_what_is_missing(words: str, reason: str) -> None:
    assert failure_reason(words) == reason


def test_journal_reads_back_what_it_was_given_and_drops_a_torn_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", {"seed": 1})
    assert journal.read() == ()
    for number in range(3):
        journal.add(Verdict(f"key {number}", "unnoticed"))
    with journal.path.open("a") as file:
        file.write('{"key": "torn')
    assert [verdict.key for verdict in journal.read()] == ["key 0", "key 1", "key 2"]
    journal.add(Verdict("key 3", "flaky"))
    assert len(journal.read()) == 4
    with pytest.raises(StoreError, match="other settings"):
        Journal(journal.path, {"seed": 2}).read()


def test_tasks_of_a_git_repository_are_the_same_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment is this interpreter's own, so that nothing has to be fetched."""
    from deepswe.tasks import bundled
    from deepswe.tasks.synth import find, run
    from deepswe.tasks.taskset import load_task_set

    files = {"pyproject.toml": PYPROJECT, "calc.py": CODE, "tests/test_calc.py": TESTS, ".gitignore": "x\n"}
    tree = write_tree(tmp_path / "calc", files)
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", "-C", str(tree), *command], check=True)
    monkeypatch.setattr(project_module, "resolve_needs", lambda *arguments: ())
    monkeypatch.setattr(
        project_module, "_pytest_arguments", lambda tree: ("-o", "addopts=", "--disable-plugin-autoload")
    )
    monkeypatch.setattr(find, "install_tools", lambda cache, pip: tmp_path)
    real = bundled.build_source

    def with_own_environment(recipe: bundled.RepositoryRecipe, *arguments: object) -> bundled.RepositorySource:
        cache = arguments[0]
        assert isinstance(cache, LayerCache)
        place = cache.root / "layers" / recipe.distribution.environment_key
        if not place.exists():
            place.symlink_to(sys.prefix)
        return real(recipe, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(project_module, "build_source", with_own_environment)
    cache, out = LayerCache(tmp_path / "cache"), tmp_path / "out.jsonl"
    plan = Plan(target=2, max_failing=6)
    whole = run.synthesise(str(tree), plan, out, cache, Silent(), pip=NOWHERE)
    assert whole.tasks == 2
    tasks = load_task_set(out)
    assert {task.source for task in tasks.tasks} == {"mutation"}
    assert tasks.hidden[tasks.tasks[0].id].gold_patch.startswith("diff --git a/calc.py b/calc.py")

    class Stop(Silent):
        def advance(self, pieces: int = 1, note: str = "") -> None:
            if " in add" in note:
                raise KeyboardInterrupt

    again = tmp_path / "again.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run.synthesise(str(tree), plan, again, cache, Stop(), pip=NOWHERE)
    with pytest.raises(StoreError, match="go on with --resume"):
        run.synthesise(str(tree), plan, again, cache, Silent(), pip=NOWHERE)
    resumed = run.synthesise(str(tree), plan, again, cache, Silent(), pip=NOWHERE, resume=True)
    assert dataclasses.asdict(resumed) == dataclasses.asdict(whole)
    assert again.read_bytes() == out.read_bytes()
    assert sorted(path.name for path in tmp_path.glob(".*")) == []
