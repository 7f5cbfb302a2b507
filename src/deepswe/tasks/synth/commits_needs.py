"""What a project says that it needs, read from its metadata as it was at one commit. None of its code is run."""

from __future__ import annotations

import ast
import configparser
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

METADATA_FILES = (
    "pyproject.toml",
    "setup.cfg",
    "setup.py",
    "tox.ini",
    "requirements-test.txt",
    "requirements-tests.txt",
    "test-requirements.txt",
    "requirements-dev.txt",
    "requirements_dev.txt",
    "dev-requirements.txt",
    "requirements/test.txt",
    "requirements/tests.txt",
    "requirements/dev.txt",
)
KNOWN_GOOD = ("pytest<9", "setuptools<81")
"""Limits within which old test suites still run; they are dropped where a project cannot be had within them."""

_TEST_GROUPS = ("test", "tests", "testing", "pytest", "dev", "develop", "development")
_NOT_NEEDED = re.compile(
    "bandit|black|build|bump2version|bumpversion|codecov|commitizen|coveralls|docutils|flake8|flit|"
    "furo|gha-update|hatch|isort|mypy|nox|pdbpp|pip|pip-tools|pre-commit|pre-commit-uv|prospector|pycodestyle|"
    "pyflakes|pylint|pyright|pytest-codspeed|pytest-flake8|pytest-mypy|pytest-pycodestyle|"
    "pytest-pylint|pytest-randomly|pytest-sugar|pytest-watch|pytest-xdist|pyupgrade|ruff|sphinx|tox|tox-uv|"
    "twine|typeguard|uv|virtualenv|wheel|zest-releaser"
)
_DOCUMENTATION = ("sphinx", "mkdocs", "types-", "flake8-")
_LONGEST_LICENSE = 60
_VERSION = re.compile(r"^__version__\s*(?::\s*\w+\s*)?=\s*[\"']([^\"']+)[\"']", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a project's tests need.

    Attributes:
        name: of the project, as its metadata has it; "" if unknown.
        version: "" where the metadata does not say it.
        runtime: requirements of the code.
        tests: further requirements of the tests.
        version_file: a file that the build would write, such as "src/x/_version.py"; "" if none.
        license: "" where the metadata does not say it in a few words.
    """

    name: str = ""
    version: str = ""
    runtime: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    version_file: str = ""
    license: str = ""

    def requirements(self, *, tests: bool = True) -> tuple[str, ...]:
        """Everything to install, pytest included."""
        wanted = dict.fromkeys((*self.runtime, *(self.tests if tests else ()), "pytest"))
        named = {canonicalize_name(Requirement(text).name) for text in wanted if text != "pytest"}
        return tuple(sorted(text for text in wanted if text != "pytest" or "pytest" not in named))


def read_needs(files: Mapping[str, str]) -> Needs:
    """Read metadata.

    Args:
        files: path -> text, of those of `METADATA_FILES` that there are. Malformed ones count as absent.
    """
    pyproject = _toml(files.get("pyproject.toml", ""))
    setup, config = _setup_calls(files.get("setup.py", "")), _ini(files.get("setup.cfg", ""))
    project = _table(pyproject, "project")
    poetry = _table(pyproject, "tool", "poetry")
    name = _first(project.get("name"), poetry.get("name"), _option(config, "metadata", "name"), setup.get("name"))
    version = _first(project.get("version"), poetry.get("version"), setup.get("version"))
    runtime = [
        *_texts(project.get("dependencies")),
        *_lines(_option(config, "options", "install_requires")),
        *_texts(setup.get("install_requires")),
        *_poetry(_table(poetry, "dependencies")),
    ]
    tests = list(_test_requirements(pyproject, config, setup)) or list(_listed(files))
    return Needs(
        name=name,
        version=version,
        runtime=_clean(runtime, name),
        tests=_clean(tests, name, drop=True),
        version_file=_version_file(pyproject),
        license=_license(project, _first(_option(config, "metadata", "license"), setup.get("license"))),
    )


def _test_requirements(
    pyproject: dict[str, Any], config: configparser.ConfigParser, setup: dict[str, Any]
) -> Iterator[str]:
    optional = _table(pyproject, "project", "optional-dependencies")
    groups = _table(pyproject, "dependency-groups")
    extras = setup.get("extras_require")
    poetry = _table(pyproject, "tool", "poetry")
    for group in _TEST_GROUPS:
        yield from _texts(optional.get(group))
        yield from _group(groups, group, ())
        yield from _lines(_option(config, "options.extras_require", group))
        yield from _texts(extras.get(group)) if isinstance(extras, dict) else ()
        yield from _poetry(_table(poetry, "group", group, "dependencies"))
    yield from _poetry(_table(poetry, "dev-dependencies"))
    yield from _lines(_option(config, "options", "tests_require"))
    yield from _texts(setup.get("tests_require"))


def _listed(files: Mapping[str, str]) -> Iterator[str]:
    """Requirements files, and what tox installs."""
    for path, text in files.items():
        if path.endswith(".txt"):
            yield from _lines(text)
    for line in _lines(_option(_ini(files.get("tox.ini", "")), "testenv", "deps")):
        condition, separator, rest = line.partition(":")
        yield rest.strip() if separator and " " not in condition.strip() else line


def _group(groups: Mapping[str, Any], name: str, above: tuple[str, ...]) -> Iterator[str]:
    """A dependency group of PEP 735 with those that it includes."""
    rows = groups.get(name)
    if name in above or not isinstance(rows, list):
        return
    for row in rows:
        if isinstance(row, str):
            yield row
        elif isinstance(row, dict) and isinstance(row.get("include-group"), str):
            yield from _group(groups, row["include-group"], (*above, name))


def _clean(texts: Sequence[str], project: str, *, drop: bool = False) -> tuple[str, ...]:
    """Requirements that hold for this interpreter, without addresses, options and the project itself."""
    kept: dict[str, None] = {}
    for text in texts:
        try:
            requirement = Requirement(text.split(" #")[0].strip())
        except InvalidRequirement:
            continue
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if requirement.url or name == canonicalize_name(project) or (marker and not marker.evaluate({"extra": ""})):
            continue
        if drop and (_NOT_NEEDED.fullmatch(name) or name.startswith(_DOCUMENTATION)):
            continue
        requirement.marker = None
        kept[str(requirement)] = None
    return tuple(sorted(kept))


def _poetry(table: Mapping[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        text = value if isinstance(value, str) else value.get("version", "") if isinstance(value, dict) else ""
        if name.lower() == "python" or (isinstance(value, dict) and value.get("optional")):
            continue
        yield f"{name}{_poetry_version(text)}"


def _poetry_version(text: str) -> str:
    """Poetry's caret and tilde as plain bounds."""
    match = re.fullmatch(r"([\^~])\s*(\d+)(?:\.(\d+))?(.*)", text.strip())
    if not match:
        return text if re.fullmatch(r"[<>=!~,.\d\s*]*[\d*]", text) and text[:1] in "<>=!~" else ""
    sign, major, minor, rest = match[1], int(match[2]), match[3], match[4]
    low = f"{major}.{minor}{rest}" if minor is not None else str(major)
    narrow = minor is not None and (sign == "~" or major == 0)
    high = f"{major}.{int(minor) + 1}" if narrow and minor is not None else str(major + 1)
    return f">={low},<{high}"


def _version_file(pyproject: dict[str, Any]) -> str:
    places = (
        _table(pyproject, "tool", "hatch", "build", "hooks", "vcs").get("version-file"),
        _table(pyproject, "tool", "setuptools_scm").get("version_file"),
        _table(pyproject, "tool", "setuptools_scm").get("write_to"),
    )
    found = _first(*places)
    return found if found.endswith(".py") and not found.startswith(("/", "..")) else ""


def _license(project: Mapping[str, Any], elsewhere: str) -> str:
    value = project.get("license")
    text = _first(value, value.get("text") if isinstance(value, dict) else "", elsewhere)
    for classifier in _texts(project.get("classifiers")):
        if not text and classifier.startswith("License :: OSI Approved :: "):
            text = classifier.rpartition(" :: ")[2]
    return text.strip() if len(text) <= _LONGEST_LICENSE and "\n" not in text.strip() else ""


def _setup_calls(text: str) -> dict[str, Any]:
    """Literal arguments of `setup(...)`, and of names at module level that it is given."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    names = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == "setup":
            for keyword in call.keywords:
                value = keyword.value
                value = names.get(value.id, value) if isinstance(value, ast.Name) else value
                try:
                    found[keyword.arg or ""] = ast.literal_eval(value)
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    continue
    return found


def find_version(texts: Sequence[str]) -> str:
    """The first `__version__ = "..."` in these texts, or ""."""
    return next((match[1] for text in texts if (match := _VERSION.search(text))), "")


def _toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return {}


def _ini(text: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        return configparser.ConfigParser()
    return parser


def _option(config: configparser.ConfigParser, section: str, name: str) -> str:
    return config.get(section, name, fallback="")


def _table(tree: Mapping[str, Any], *path: str) -> dict[str, Any]:
    node: Any = tree
    for name in path:
        node = node.get(name) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def _first(*values: object) -> str:
    return next((value for value in values if isinstance(value, str) and value), "")


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return _lines(value)
    return [item for item in value if isinstance(item, str)] if isinstance(value, list | tuple) else []


def _lines(text: str) -> list[str]:
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(("#", "-"))]
