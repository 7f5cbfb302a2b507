"""The SWE-bench family: SWE-bench, SWE-smith, SWE-Gym, SWE-rebench. Repositories lie at /testbed, run by conda."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from deepswe.tasks.benchmarks import EVALUATION_IMAGES
from deepswe.tasks.patches import reverse_patch, touched_paths
from deepswe.tasks.sources_rows import Row, RowRefused
from deepswe.tasks.task import HiddenTests, Image, Repository, Task

TIMEOUT_S = 1800.0
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
EXIT_CODE = ">>>>> Test Exit Code"
CONDA = "/opt/miniconda3"
ENV = {
    "PATH": f"{CONDA}/envs/testbed/bin:{CONDA}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "CONDA_DEFAULT_ENV": "testbed",
    "CONDA_PREFIX": f"{CONDA}/envs/testbed",
}
PYTEST = "pytest -rA"
COMMANDS = {
    "astropy/astropy": "pytest -rA -vv -o console_output_style=classic --tb=no",
    "django/django": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "mwaskom/seaborn": "pytest --no-header -rA",
    "sphinx-doc/sphinx": "tox --current-env -epy39 -v --",
    "sympy/sympy": "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
}
"""How SWE-bench runs the tests of a repository, where it is not `PYTEST` and the row brings no script."""
_SMITH_REPO = re.compile(r"(?:swesmith/)?(?P<owner>.+?)__(?P<name>.+)\.(?P<commit>[0-9a-f]{8})")


def sweb_task(row: Row) -> tuple[Task, HiddenTests]:
    """A task of a row of SWE-bench, Lite, Verified or another set in its schema; they are evaluation tasks.

    The test lists may be JSON text or lists. A row of 5.x brings image, script and parser; an older one gets the image
    by its published name, and a script from the repository's test command.

    Raises:
        RowRefused: it cannot be used.
    """
    name, repo, test_patch = row.text("instance_id"), row.text("repo"), row.patch("test_patch")
    script = row.optional_text("eval_script", "run_tests")
    own = with_exit_code(script) or _script(COMMANDS.get(repo, PYTEST), _directives(repo, test_patch))
    image = row.optional_text("image", "docker_image") or EVALUATION_IMAGES.format(
        name=name.replace("__", "_1776_").lower()
    )
    parser = row.optional_text("log_parser")
    tags = {key: row.optional_text(key) for key in ("version", "difficulty", "eval_type") if row.has(key)}
    task, hidden = _family(row, "swe-bench", image, own, f"swebench:{parser}", "" if script else test_patch)
    return replace(task, evaluation=True, split="test", tags={**tags, "log_parser": parser} if parser else tags), hidden


def swegym_task(row: Row) -> tuple[Task, HiddenTests]:
    """A task of a row of SWE-Gym.

    Raises:
        RowRefused: it cannot be used.
    """
    name = row.text("instance_id")
    image = (
        row.optional_text("image", "docker_image")
        or f"xingyaoww/sweb.eval.x86_64.{name.replace('__', '_s_')}:latest".lower()
    )
    files = _files(row)
    return _family(row, "swe-gym", image, _script(PYTEST, files), "pytest", row.patch("test_patch"))


def swerebench_task(row: Row) -> tuple[Task, HiddenTests]:
    """A task of a row of SWE-rebench: `install_config` says how its tests run.

    Raises:
        RowRefused: it cannot be used.
    """
    name = row.text("instance_id")
    image = row.optional_text("docker_image", "image_name")
    image = image or f"swerebench/sweb.eval.x86_64.{name.replace('__', '_1776_')}:latest".lower()
    config = row.json("install_config")
    command = config.get("test_cmd") if isinstance(config, dict) else None
    if not isinstance(command, str) or not command.strip():
        raise RowRefused("install_config has no test_cmd")
    task, hidden = _family(row, "swe-rebench", image, _script(command, _files(row)), "pytest", row.patch("test_patch"))
    return replace(
        task, license=row.optional_text("license_name"), tags={"version": row.optional_text("version")}
    ), hidden


def swesmith_task(row: Row) -> tuple[Task, HiddenTests]:
    """A task of a row of SWE-smith: `patch` is the bug, its reverse solves the task.

    The image holds the right code. The bug is laid over it, and the files that hold a F2P test are kept from the agent.

    Raises:
        RowRefused: it cannot be used.
    """
    bug, files = row.patch("patch"), _files(row)
    if not bug.strip():
        raise RowRefused("patch is empty or missing, so that there is no bug")
    known = _SMITH_REPO.match(row.optional_text("repo") or row.text("instance_id"))
    if known is None:
        raise RowRefused(f"repo {row.optional_text('repo')!r} is not owner__name.commit")
    hide = sorted({f"/testbed/{test.split('::')[0]}" for test in row.names("FAIL_TO_PASS")})
    script = _script("pytest --disable-warnings --color=no --tb=no --verbose", files)
    task, hidden = _family(
        row, "swe-smith", row.text("image_name"), script, "pytest", "", repo=known["owner"] + "/" + known["name"]
    )
    kind = re.match(r"(?:lm_|func_|combine_|pr_)?[a-z]+", row.text("instance_id").rpartition(".")[2])
    try:
        gold = reverse_patch(bug)
    except ValueError:
        gold = ""
    image = Image(row.text("image_name"), patch=bug, hide=tuple(hide), env=ENV)
    task = replace(task, image=image, base_commit=known["commit"], kind=kind[0].strip("_") if kind else "")
    return task, replace(hidden, gold_patch=gold)


def _family(
    row: Row, source: str, image: str, script: str, parser: str, test_patch: str, *, repo: str = ""
) -> tuple[Task, HiddenTests]:
    name = row.text("instance_id")
    fail_to_pass, pass_to_pass = row.names("FAIL_TO_PASS"), row.names("PASS_TO_PASS")
    if not fail_to_pass:
        raise RowRefused("FAIL_TO_PASS names no test")
    both = set(fail_to_pass) & set(pass_to_pass)
    if both:
        raise RowRefused(f"{min(both)!r} is in FAIL_TO_PASS and in PASS_TO_PASS")
    task = Task(
        id=name,
        repo=repo or row.text("repo"),
        problem_statement=row.text("problem_statement"),
        repository=Repository(),
        source=source,
        split="train",
        kind="pull request",
        image=Image(image, env=ENV),
        base_commit=row.optional_text("base_commit"),
    )
    hidden = HiddenTests(
        task_id=name,
        files={},
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        runner="script",
        timeout_s=TIMEOUT_S,
        gold_patch=row.patch("patch"),
        script=script,
        parser=parser,
        test_patch=test_patch,
        protected=tuple(sorted(touched_paths(row.patch("test_patch")))),
    )
    return task, hidden


def with_exit_code(script: str) -> str:
    """A row's script, which after its end marker also says how the test command itself ended.

    The script goes on after its tests, so its own exit code says nothing about them; a log without a failure of tests
    that ended otherwise is not to be believed.
    """
    lines = script.split("\n")
    place = next((number for number, line in enumerate(lines) if END in line), None)
    if place is None:
        return script
    return "\n".join(
        [*lines[:place], "tests_code=$?", lines[place], f'echo "{EXIT_CODE}: $tests_code"', *lines[place + 1 :]]
    )


def _files(row: Row) -> list[str]:
    """The files whose tests count: those of the ids, which exist once the test patch is applied."""
    return list(dict.fromkeys(test.split("::")[0] for test in row.names("FAIL_TO_PASS") + row.names("PASS_TO_PASS")))


def _directives(repo: str, test_patch: str) -> list[str]:
    """What SWE-bench gives a test command: the files of the test patch, or for Django their modules."""
    data = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
    files = sorted(path for path in touched_paths(test_patch) if not path.endswith(data))
    if not files:
        raise RowRefused("test_patch names no test file, and the row brings no eval_script")
    if repo != "django/django":
        return files
    return [path.removesuffix(".py").removeprefix("tests/").replace("/", ".") for path in files]


def _script(command: str, files: Sequence[str]) -> str:
    words = " ".join("'" + path.replace("'", "'\\''") + "'" for path in files)
    return "\n".join(
        [
            "#!/bin/bash",
            "set -uxo pipefail",
            f"source {CONDA}/bin/activate",
            "conda activate testbed",
            "cd /testbed",
            f": '{START}'",
            f"{command} {words}",
            "code=$?",
            f": '{END}'",
            f'echo "{EXIT_CODE}: $code"',
            "",
        ]
    )
