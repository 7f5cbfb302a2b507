"""Task directories in Harbor's format: task.toml, instruction.md, environment/Dockerfile, tests/test.sh, solution/.

The verdict is the number that tests/test.sh leaves in /logs/verifier/reward.txt (or `reward` in reward.json).
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deepswe.tasks.sources_rows import Row, RowRefused
from deepswe.tasks.task import HiddenTests, Image, Repository, Task

TIMEOUT_S = 600.0
TEST = "tests/test.sh"
"""The one test of such a task."""
MARKER = "deepswe-harbor-reward:"
"""Begins the line of the log in which the script says what the verifier left."""
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(\S+)", re.MULTILINE | re.IGNORECASE)
_SCRIPT = f"""mkdir -p /logs/verifier
rm -f /logs/verifier/reward.txt /logs/verifier/reward.json
bash /tests/test.sh
echo
for file in /logs/verifier/reward.txt /logs/verifier/reward.json; do
  if [ -f "$file" ]; then echo "{MARKER} $(tr '\\n' ' ' < "$file")"; break; fi
done
"""
_MOVE = """if [ ! -e /testbed ] && [ -d {place} ]; then mv {place} /testbed && ln -s /testbed {place}; fi
mkdir -p /testbed
"""


def harbor_rows(root: Path) -> Iterator[Row]:
    """A row for each task directory under `root`, or for `root` itself if it is one."""
    found = [root] if (root / "task.toml").exists() else sorted(path.parent for path in root.glob("*/task.toml"))
    for number, directory in enumerate(found, 1):
        try:
            yield Row(number, _read(directory))
        except (OSError, ValueError, RecursionError) as error:
            yield Row(number, {"instance_id": directory.name}, f"the directory cannot be read: {error}")


def harbor_task(row: Row) -> tuple[Task, HiddenTests]:
    """A task of a row that `harbor_rows` made.

    Raises:
        RowRefused: it cannot be used.
    """
    name, settings = row.text("instance_id"), row.record.get("settings")
    if not isinstance(settings, Mapping):
        raise RowRefused("task.toml has no settings")
    statement, dockerfile = row.text("instruction"), row.optional_text("dockerfile")
    row.text("test_sh")
    environment, metadata = _table(settings, "environment"), _table(settings, "metadata")
    image, tags = environment.get("docker_image"), {}
    if not isinstance(image, str) or not image:
        if not dockerfile.strip():
            raise RowRefused("there is no image: neither environment.docker_image nor environment/Dockerfile")
        digest = hashlib.sha256(dockerfile.encode()).hexdigest()[:12]
        image = f"deepswe-harbor/{re.sub(r'[^a-z0-9._-]', '-', name.lower())}:{digest}"
        tags["build"] = f"docker build -t {image} {name}/environment"
    for key in ("difficulty", "category"):
        if isinstance(metadata.get(key), str):
            tags[key] = metadata[key]
    timeout = _table(settings, "verifier").get("timeout_sec", TIMEOUT_S)
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or timeout <= 0:
        raise RowRefused(f"verifier.timeout_sec is {timeout!r}, not a number of seconds")
    places = _WORKDIR.findall(dockerfile)
    place = places[-1].strip("\"'") if places else "/app"
    if not re.fullmatch(r"(?:/[A-Za-z0-9._-]+)+", place) or ".." in place.split("/"):
        raise RowRefused(f"WORKDIR {place!r} of the Dockerfile is no plain absolute path")
    task = Task(
        id=name,
        repo=name,
        problem_statement=statement,
        repository=Repository(),
        source="harbor",
        split="train",
        kind=tags.get("category", ""),
        tags=tags,
        image=Image(
            image, setup="" if place == "/testbed" else _MOVE.format(place=place), hide=("/tests", "/solution")
        ),
    )
    hidden = HiddenTests(
        task_id=name,
        files=row.record["tests"],
        fail_to_pass=(TEST,),
        pass_to_pass=(),
        runner="script",
        timeout_s=float(timeout),
        script=_SCRIPT,
        parser="harbor",
    )
    return task, hidden


def _read(directory: Path) -> dict[str, Any]:
    settings = tomllib.loads((directory / "task.toml").read_text(encoding="utf-8"))
    tests = {}
    root = (directory / "tests").resolve()
    for file in sorted(root.rglob("*")):
        if file.is_file():
            if not file.resolve().is_relative_to(root):
                raise ValueError(f"{file.relative_to(root)} leads out of the directory tests")
            tests[f"/tests/{file.relative_to(root).as_posix()}"] = file.read_text(encoding="utf-8")
    dockerfile = directory / "environment" / "Dockerfile"
    return {
        "instance_id": directory.name,
        "settings": settings,
        "instruction": (directory / "instruction.md").read_text(encoding="utf-8"),
        "dockerfile": dockerfile.read_text(encoding="utf-8") if dockerfile.exists() else "",
        "test_sh": tests.get("/tests/test.sh", ""),
        "tests": tests,
    }


def _table(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = settings.get(name, {})
    if not isinstance(value, Mapping):
        raise RowRefused(f"{name} of task.toml is no table")
    return value
