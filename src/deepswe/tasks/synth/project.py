"""From a PyPI name, a source tree, an archive or a git repository to a repository that bugs can be put in.

What a project needs is read from its own metadata, resolved once by pip and installed into an environment layer, the
package under test left out. Where its tests are, and how they are run, is found by looking. A project that cannot be
used is refused with a reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from email.parser import Parser
from pathlib import Path, PurePosixPath
from typing import Any

from deepswe.errors import BuildError
from deepswe.progress import Progress
from deepswe.tasks.bundled import RepositoryRecipe, RepositorySource, build_source, is_test_module
from deepswe.tasks.distributions import Pip, keep_tree, note_origins, unpack
from deepswe.tasks.environments import resolve
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.synth.refusal import ProjectRefused

PYTEST = "pytest==8.4.2"
"""The version that tests run with; many projects' tests do not know a later one yet."""

_GIT_TIMEOUT_S = 300.0
_TEST_DIRECTORIES = frozenset({"tests", "test", "testing"})
_NOT_CODE = frozenset(
    {"docs", "doc", "examples", "example", "benchmarks", "benchmark", "scripts", "tools", "build", "dist", "tasks"}
)
_NOT_MODULES = frozenset(
    {"setup.py", "conftest.py", "noxfile.py", "tasks.py", "fabfile.py", "bench.py", "run_tests.py"}
)
_TEST_EXTRAS = ("test", "tests", "testing", "tests-min", "pytest")
_REQUIREMENT_FILES = (
    "requirements-test.txt",
    "requirements-tests.txt",
    "requirements_test.txt",
    "test-requirements.txt",
    "requirements/test.txt",
    "requirements/tests.txt",
    "tests/requirements.txt",
)
_NOT_NEEDED = frozenset(
    {
        "tox",
        "pre-commit",
        "coverage",
        "pytest-cov",
        "black",
        "mypy",
        "flake8",
        "ruff",
        "sphinx",
        "twine",
        "build",
        "nox",
        "codecov",
        "coveralls",
        "pylint",
        "isort",
        "pytest-randomly",
        "pytest-xdist",
        "pytest-sugar",
        "pytest-black",
        "pytest-mypy",
        "pytest-ruff",
        "pytest-checkdocs",
        "pytest-enabler",
        "setuptools",
        "wheel",
        "pip",
        "zest-releaser",
        "pyright",
    }
)
_OF_PYTEST = frozenset({"pytest", "pluggy", "iniconfig", "packaging", "pygments"})
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_SPEC = re.compile(rf"({_NAME.pattern})(?:==([A-Za-z0-9.!+_-]+))?")
_ASKS_FOR_VERSION = re.compile(r"importlib[._]metadata|from importlib import metadata|pkg_resources")


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a project says of itself.

    Attributes:
        name, version, license: "" where it does not say.
        needs: requirements of the code.
        test_needs: requirements of the tests.
        complete: `needs` is all of them; otherwise only pip can tell.
    """

    name: str = ""
    version: str = ""
    license: str = ""
    needs: tuple[str, ...] = ()
    test_needs: tuple[str, ...] = ()
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things are in a tree, relative to its root."""

    code: tuple[str, ...]
    tests: tuple[str, ...]
    pythonpath: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    metadata: bool = False


@dataclass(frozen=True, slots=True)
class Fetched:
    """An archive of a project.

    Attributes:
        archive: the file.
        sha256: names it.
        named: the project's name, where the way to it tells; "" otherwise.
        spec: by which it is fetched again, from any directory; "" for a source distribution of the package index.
    """

    archive: Path
    sha256: str
    named: str = ""
    spec: str = ""


def open_project(spec: str, cache: LayerCache, pip: Pip, progress: Progress) -> RepositorySource:
    """Fetch, look, resolve, install. Layers that are in the cache are not built again.

    Args:
        spec: a name on the package index ("toolz", "toolz==1.2.0"), a directory, a .tar.gz, or what git can clone.
        cache: for layers.
        pip: how pip is called; its time limit is that of a set-up step.
        progress: told of the steps.

    Raises:
        ProjectRefused: with a reason.
    """
    progress.begin(f"Project {spec}", 3)
    with tempfile.TemporaryDirectory(prefix="deepswe-project-") as place:
        fetched = fetch(spec, Path(place), pip)
        progress.advance(note="looks for tests")
        tree = Path(place) / "tree"
        tree.mkdir()
        _unpack(fetched.archive, tree)
        recipe = describe(tree, fetched, cache, pip)
        progress.advance(note="installs what it needs")
        keep_tree(recipe.distribution, fetched.archive, cache)
        try:
            source = build_source(recipe, cache, pip, ())
        except ProjectRefused:
            raise
        except BuildError as error:
            raise _refusal("does-not-build", error) from error
        note_origins(recipe.distribution, fetched.spec, cache)
    progress.advance()
    return source


def fetch(spec: str, place: Path, pip: Pip) -> Fetched:
    """An archive of the project in `place`.

    Raises:
        ProjectRefused: there is nothing of that name, or fetching it failed or took too long.
    """
    path = Path(spec).expanduser()
    if path.exists():
        return replace(_fetch_here(path.resolve(), place), spec=str(path.resolve()))
    if is_url(spec):
        return replace(_pack(_git_clone(spec.removeprefix("git+"), place), place), spec=spec)
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ProjectRefused("not-found", f"{spec!r} is no directory, archive, git URL or package name")
    return _download(match[1], match[2] or "", place, pip)


def is_url(spec: str) -> bool:
    """Whether git is asked to clone it."""
    return re.match(r"(?:git\+)?(?:https?|ssh|git|file)://|git@", spec) is not None


def _fetch_here(path: Path, place: Path) -> Fetched:
    if path.is_file():
        return Fetched(path, _hash(path))
    return _pack(_git_export(str(path), place) if (path / ".git").exists() else path, place)


def _download(name: str, version: str, place: Path, pip: Pip) -> Fetched:
    target = place / "download"
    pin = f"{name}=={version}" if version else name
    options = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(target)]
    try:
        pip.run(f"download of {pin}", [*options, pin])
    except BuildError as error:
        words = str(error)
        missing = "No matching distribution" in words or "Could not find a version" in words
        raise _refusal("not-found" if missing else "does-not-build", error) from error
    archives = [item for item in target.iterdir() if item.is_file()]
    if len(archives) != 1:
        raise ProjectRefused("not-found", f"download of {pin} gave {len(archives)} files; is there an sdist of it?")
    return Fetched(archives[0], _hash(archives[0]), name)


def _git_clone(url: str, place: Path) -> Path:
    _git(["clone", "--quiet", "--depth", "1", "--", url, str(place / "clone")], f"clone of {url}")
    return _git_export(str(place / "clone"), place)


def _git_export(repository: str, place: Path) -> Path:
    """The files of HEAD, without history."""
    archive, tree = place / "head.tar", place / "head"
    _git(["-C", repository, "archive", "--format=tar", f"--output={archive}", "--prefix=head/", "HEAD"], "git archive")
    tree.mkdir()
    _unpack(archive, tree, links="skip")
    return tree


def _git(arguments: Sequence[str], action: str) -> None:
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null", *arguments]
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, said = process.communicate(timeout=_GIT_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise ProjectRefused("hangs", f"{action} took longer than {_GIT_TIMEOUT_S:.0f} s") from error
    if process.returncode:
        raise ProjectRefused("not-found", f"{action} failed: {said.decode('utf-8', 'replace').strip()[-300:]}")


def _pack(tree: Path, place: Path) -> Fetched:
    """An archive of a tree; the hash is that of names and contents alone, so that it is the same everywhere."""
    digest = hashlib.sha256()
    archive = place / "project.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for file in sorted(tree.rglob("*")):
            name = file.relative_to(tree).as_posix()
            if file.is_symlink() or not file.is_file() or _is_debris(PurePosixPath(name)):
                continue
            data = file.read_bytes()
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
            tar.add(file, f"project/{name}", recursive=False)
    return Fetched(archive, digest.hexdigest(), tree.name if tree.name != "head" else "")


def _is_debris(path: PurePosixPath) -> bool:
    return bool({".git", ".hg", "__pycache__", ".venv", "venv", ".tox", "node_modules"}.intersection(path.parts))


def _unpack(archive: Path, tree: Path, links: str = "refuse") -> None:
    try:
        unpack(archive, tree, lambda path: True, skip_links=links == "skip")
    except BuildError as error:
        raise _refusal("unsafe-archive", error) from error


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def describe(tree: Path, fetched: Fetched, cache: LayerCache, pip: Pip) -> RepositoryRecipe:
    """The recipe of an unpacked project.

    Raises:
        ProjectRefused: it has no tests or no code, or its needs cannot be resolved.
    """
    metadata = read_metadata(tree)
    layout = find_layout(tree, metadata, fetched.named)
    name = metadata.name or fetched.named or "project"
    if not metadata.complete:
        metadata = _ask_pip(tree, metadata, pip)
    requirements = resolve_needs(name, metadata, cache, pip)
    if any(line.startswith("pytest-benchmark") for line in requirements):
        layout = Layout(
            layout.code, layout.tests, layout.pythonpath, (*layout.arguments, "--benchmark-disable"), layout.metadata
        )
    return RepositoryRecipe(
        name=name,
        version=metadata.version or "0",
        sha256=fetched.sha256,
        license=metadata.license,
        split="train",
        code=layout.code,
        tests=layout.tests,
        requirements=requirements,
        metadata=layout.metadata,
        pythonpath=layout.pythonpath,
        arguments=layout.arguments,
    )


def resolve_needs(name: str, metadata: Metadata, cache: LayerCache, pip: Pip) -> tuple[str, ...]:
    """Exact pins of what code and tests need, without the project itself. Test needs that clash are left out.

    Raises:
        ProjectRefused: not even the needs of the code can be met.
    """
    if _normal(name) in _OF_PYTEST:
        raise ProjectRefused("broken-tests", f"pytest itself needs {name}, so a bug in it would break every test")
    needs = [PYTEST, *metadata.needs]
    try:
        packages = resolve([*needs, *metadata.test_needs], cache, pip)
    except BuildError:
        try:
            packages = resolve(needs, cache, pip)
        except BuildError as error:
            raise _refusal("does-not-build", error) from error
    own = _normal(name)
    return tuple(sorted(f"{_normal(item.name)}=={item.version}" for item in packages if _normal(item.name) != own))


def _ask_pip(tree: Path, metadata: Metadata, pip: Pip) -> Metadata:
    """Let pip build the metadata of a project that has none in its files."""
    report = tree.parent / "report.json"
    options = ["install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", str(report)]
    try:
        pip.run("metadata of the project", [*options, str(tree)])
    except BuildError as error:
        raise _refusal("does-not-build", error) from error
    said: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["install"][0]["metadata"]
    needs = [line for line in said.get("requires_dist", ()) if "extra ==" not in line]
    extras = [line for line in said.get("requires_dist", ()) if _is_test_extra(line)]
    return Metadata(
        metadata.name or said["name"],
        metadata.version or said["version"],
        metadata.license or _license(str(said.get("license_expression") or said.get("license") or ""), ()),
        tuple(needs),
        _wanted((*metadata.test_needs, *(line.partition(";")[0] for line in extras))),
        True,
    )


def read_metadata(tree: Path) -> Metadata:
    """What the files of a project say, without running any of them."""
    project = _read_pyproject(tree)
    table: Mapping[str, Any] = project.get("project", {})
    tests = _declared_test_needs(tree, project)
    information = tree / "PKG-INFO"
    if information.is_file():
        fields = Parser().parsestr(information.read_text(encoding="utf-8", errors="replace"))
        lines = fields.get_all("Requires-Dist") or []
        extras = [line.partition(";")[0] for line in lines if _is_test_extra(line)]
        return Metadata(
            fields["Name"] or "",
            fields["Version"] or "",
            _license(fields["License-Expression"] or fields["License"] or "", fields.get_all("Classifier") or []),
            tuple(line for line in lines if "extra ==" not in line),
            _wanted((*extras, *tests)),
            True,
        )
    static = "name" in table and not {"dependencies", "optional-dependencies"} & set(table.get("dynamic", ()))
    license_text = table.get("license", "")
    return Metadata(
        str(table.get("name", "")),
        str(table.get("version", "")),
        _license(
            license_text if isinstance(license_text, str) else str(license_text.get("text", "")),
            table.get("classifiers", ()),
        ),
        tuple(table.get("dependencies", ())),
        _wanted(tests),
        static,
    )


def _declared_test_needs(tree: Path, project: Mapping[str, Any]) -> tuple[str, ...]:
    table: Mapping[str, Any] = project.get("project", {})
    found: list[str] = []
    for groups in (table.get("optional-dependencies", {}), project.get("dependency-groups", {})):
        for extra in _TEST_EXTRAS:
            found += [line for line in groups.get(extra, ()) if isinstance(line, str)]
    for name in _REQUIREMENT_FILES:
        file = tree / name
        if file.is_file():
            lines = [line.partition("#")[0].strip() for line in file.read_text(errors="replace").splitlines()]
            found += [line for line in lines if line[:1].isalnum() and "://" not in line]
    return tuple(found)


def _wanted(requirements: Sequence[str]) -> tuple[str, ...]:
    """Without what only checks style or measures, and without another pytest."""
    kept = []
    for line in requirements:
        match = _NAME.match(line.strip())
        if match and _normal(match[0]) not in _NOT_NEEDED and _normal(match[0]) != "pytest":
            kept.append(line.strip())
    return tuple(dict.fromkeys(kept))


def _is_test_extra(line: str) -> bool:
    match = re.search(r"extra == ['\"]([^'\"]+)['\"]", line)
    return match is not None and match[1] in _TEST_EXTRAS


def _license(text: str, classifiers: Sequence[str]) -> str:
    first = text.strip().splitlines()[0].strip() if text.strip() else ""
    if first and len(first) <= 40:
        return first
    named = [item.rpartition("::")[2].strip() for item in classifiers if item.startswith("License ::")]
    return named[0] if named else ""


def find_layout(tree: Path, metadata: Metadata, named: str = "") -> Layout:
    """Where code and tests are.

    Raises:
        ProjectRefused: there are no tests, or no code.
    """
    tests = _test_places(tree)
    name = metadata.name or named or "the project"
    if not tests:
        raise ProjectRefused("no-tests", f"{name} has no file named test_*.py or *_test.py")
    code, pythonpath = _code_places(tree, tests)
    if not code:
        raise ProjectRefused("does-not-build", f"{name} has no Python package or module outside of its tests")
    texts = [file.read_text(errors="replace") for place in code for file in _python_files(tree / place)]
    return Layout(
        code,
        tests,
        (pythonpath,),
        _pytest_arguments(tree),
        any(_ASKS_FOR_VERSION.search(text) for text in texts),
    )


def _test_places(tree: Path) -> tuple[str, ...]:
    """Directories called tests (or so) that hold test modules, and test modules outside of such directories."""
    places: set[str] = set()
    for file in sorted(tree.rglob("*.py")):
        path = file.relative_to(tree)
        if not is_test_module(path.as_posix()) or _is_debris(PurePosixPath(path.as_posix())):
            continue
        depth = next((at for at, part in enumerate(path.parts[:-1]) if part in _TEST_DIRECTORIES), None)
        places.add(path.as_posix() if depth is None else "/".join(path.parts[: depth + 1]))
    return tuple(sorted(places))


def _code_places(tree: Path, tests: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Packages and modules, and the directory from which they are imported."""
    for base in ("src", "lib", "."):
        root = tree / base
        if not root.is_dir():
            continue
        packages = [
            item
            for item in sorted(root.iterdir())
            if (item / "__init__.py").is_file() and item.name not in _NOT_CODE | _TEST_DIRECTORIES
        ]
        modules = [
            item
            for item in sorted(root.glob("*.py"))
            if item.name not in _NOT_MODULES and not is_test_module(item.name)
        ]
        found = [*packages, *modules] if base != "." or not packages else packages
        places = [item.relative_to(tree).as_posix() for item in found]
        places = [place for place in places if place not in tests]
        if places:
            return tuple(places), base
    return (), "."


def _python_files(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def _pytest_arguments(tree: Path) -> tuple[str, ...]:
    """The project's own options may ask for plug-ins that are no use here; only how it imports is kept."""
    arguments = ["--continue-on-collection-errors"]
    options = ""
    for name in ("pytest.ini", "pyproject.toml", "setup.cfg", "tox.ini"):
        file = tree / name
        text = file.read_text(errors="replace") if file.is_file() else ""
        if "addopts" in text:
            options = text[text.index("addopts") :]
            arguments += ["-o", "addopts="]
            break
    mode = re.search(r"--import-mode[= ](\w+)", options)
    return (*arguments, *([f"--import-mode={mode[1]}"] if mode else []))


def _read_pyproject(tree: Path) -> dict[str, Any]:
    file = tree / "pyproject.toml"
    try:
        return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ProjectRefused("does-not-build", f"pyproject.toml cannot be read: {error}") from error


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _refusal(reason: Any, error: BuildError) -> ProjectRefused:
    if "took longer than" in str(error):
        return ProjectRefused("hangs", str(error))
    return ProjectRefused(reason, str(error))
