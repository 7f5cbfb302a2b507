"""R2E-Gym (Subset, Lite, V1): an image a commit, and a map from test to the status that it has on the right code.

Keys of the map are node ids without the file, joined by ".". Some tests are expected to fail or to end in an error.
The repository lies at /testbed, with its environment in /testbed/.venv; the tests and `run_tests.sh`, which runs them,
lie beside it or at the root of the file system, where the agent must not find them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deepswe.tasks.patches import diff_files, touched_paths
from deepswe.tasks.sources_rows import Row, RowRefused
from deepswe.tasks.task import HiddenTests, Image, Repository, Task

TIMEOUT_S = 300.0
HIDE = ("/testbed/run_tests.sh", "/testbed/r2e_tests", "/r2e_tests", "/root/run_tests.sh", "/root/r2e_tests")
PATH = (
    "/testbed/.venv/bin:/root/.local/bin:/root/.cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
STATUSES = {"PASSED": "passed", "FAILED": "failed", "ERROR": "error", "SKIPPED": "skipped", "XFAIL": "xfailed"}
_SCRIPT = """cd /testbed
for tests in /testbed/r2e_tests /r2e_tests /root/r2e_tests; do
  if [ -d "$tests" ]; then
    [ -e /testbed/r2e_tests ] || ln -s "$tests" /testbed/r2e_tests
    break
  fi
done
for script in /testbed/run_tests.sh /root/run_tests.sh; do
  if [ -f "$script" ]; then exec bash "$script"; fi
done
echo 'this image has no run_tests.sh' >&2
exit 127
"""
_ISSUE = re.compile(r"\[ISSUE\](.*?)\[/ISSUE\]", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def r2e_task(row: Row) -> tuple[Task, HiddenTests]:
    """A task of a row.

    Raises:
        RowRefused: it cannot be used.
    """
    repo, commit = row.text("repo_name", "repo"), row.text("commit_hash", "git_commit_hash")
    statement = row.text("problem_statement")
    issue = _ISSUE.search(statement)
    statement = (issue[1] if issue else statement).strip()
    if not statement:
        raise RowRefused("problem_statement is empty")
    expected = read_expected(row.statuses("expected_output_json"))
    gold, sizes = _gold(row.json("parsed_commit_content"))
    name = f"{repo.replace('/', '__')}-{commit}"
    task = Task(
        id=name,
        repo=repo,
        problem_statement=statement,
        repository=Repository(),
        source="r2e-gym",
        split="train",
        kind="commit",
        tags=sizes,
        image=Image(row.text("docker_image"), hide=HIDE, env={"PATH": PATH, "VIRTUAL_ENV": "/testbed/.venv"}),
        base_commit=f"{commit}^",
    )
    hidden = HiddenTests(
        task_id=name,
        files={},
        fail_to_pass=(),
        pass_to_pass=tuple(expected),
        runner="script",
        timeout_s=TIMEOUT_S,
        gold_patch=gold,
        expected={test: status for test, status in expected.items() if status != "passed"},
        script=_SCRIPT,
        parser="r2e-gym",
        protected=("run_tests.sh", "r2e_tests", "r2e_tests/*"),
    )
    return task, hidden


def read_expected(words: Mapping[str, str]) -> dict[str, str]:
    """The expected statuses in our words, colours taken out of the names.

    Raises:
        RowRefused: there is no test, or an unknown status.
    """
    expected = {}
    for name, word in words.items():
        if word not in STATUSES:
            raise RowRefused(f"expected_output_json gives {name!r} the unknown status {word!r}")
        plain = _COLOUR.sub("", name)
        if plain:
            expected[plain] = STATUSES[word]
    if not expected:
        raise RowRefused("expected_output_json names no test")
    return expected


def _gold(commit: Any) -> tuple[str, dict[str, str]]:
    """The commit's change of everything but tests, as a diff, and how large it is."""
    if not isinstance(commit, dict) or not isinstance(commit.get("file_diffs"), list):
        return "", {}
    patch, files = "", 0
    for item in commit["file_diffs"]:
        try:
            path = item["header"]["file"]["path"]
            before, after = item.get("old_file_content") or "", item.get("new_file_content") or ""
            if not all(isinstance(text, str) for text in (path, before, after)):
                raise RowRefused("parsed_commit_content has a file whose content is no text")
        except (TypeError, KeyError) as error:
            raise RowRefused(f"parsed_commit_content is not as R2E-Gym writes it: {error!r}") from error
        if "test" not in path.lower().rpartition("/")[2] and "tests/" not in path.lower():
            patch += diff_files(before, after, path)
            files += 1
    if any(path.startswith("/") or ".." in path.split("/") for path in touched_paths(patch)):
        raise RowRefused("parsed_commit_content names a path outside the repository")
    return patch, {"files": str(files)}
