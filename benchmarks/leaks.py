"""Look for the answer in the agent's sandbox, with everything that the agent could look with.

For every bundled task, and a sample of micro tasks, the sandbox of an attempt is opened as the loop of training opens
it. A program in it then reads all files that an agent can read, and all objects of git, and looks for

    test        the text of a function of a hidden F2P test, or its name where no visible file of the task has it
    file        a hidden test file that is there as it is
    original    the original code around the mutated place; not in a task's own tree where its bugged code has the very
                lines somewhere else, as code that repeats itself does
    patch       a line of the bug next to a line of the solution
    bytecode    compiled code of a mutated file, or any compiled code in the repository
    archive     an archive or a wheel that may hold the package
    git         more than one commit; a pack, a note, a stash, a remote, an alternate, a log of references

In the parts of the file system that all sandboxes share (the system and the interpreter) the program looks once, for
the secrets of all tasks, and reads what has the name of a mutated file or of a hidden test file. In an environment,
which holds other people's packages, names of tests are not looked for, since they mean nothing there.

To show that it would be found, every kind of leak is planted in one more sandbox ("plants", and "plants_found" kinds).

The last line printed is one JSON object: {"tasks", "leaks", "plants", "plants_found", "bundled", "micro", "files",
"objects", "found"}. Exit code 0 if there are no leaks and all
plants are found. `--quick` takes one task of each repository and ten micro tasks.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import base64
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from deepswe.cli.progress import TerminalProgress
from deepswe.config import Recipe, build_recipe
from deepswe.envs.suites import open_suite
from deepswe.envs.swe import SweEnv, SweSuite
from deepswe.progress import Progress
from deepswe.sandbox.base import Sandbox
from deepswe.tasks.task import HiddenTests, Task

SCAN_TIMEOUT_S = 600.0
AT_ONCE = 2
MIN_NAME = 6
KINDS = ("test", "file", "original", "patch")
"""Leaks that are text."""
PLANTS = (*KINDS, "bytecode", "archive", "git")
"""All kinds; the last but one is of packages, which micro tasks have none of."""

SCANNER = r"""
import base64, json, os, re, subprocess, sys
request = json.loads(sys.stdin.buffer.read())
secrets = [(kind, base64.b64decode(text), where) for kind, text, where in request["secrets"]]
plain = [base64.b64decode(name) for name in request["names"]]
names = [(re.compile(rb"(?<!\w)" + re.escape(name) + rb"(?!\w)"), name) for name in plain]
only = set(request["only"])
mutated, packages, skip = request["mutated"], request["packages"], tuple(request["skip"])
if request["git"]:
    skip += (os.path.realpath(sys.base_prefix) + "/",)  # read once, with the system
found, files, objects = [], 0, 0

def look(place, data, by_name):
    for kind, text, where in secrets:
        if text in data:
            found.append([kind, place, where])
    for pattern, name in names if by_name else ():
        if name in data and pattern.search(data):
            found.append(["test", place, name.decode()])

for root in request["roots"]:
    for directory, below, inside in os.walk(root):
        below[:] = [d for d in below if not os.path.join(directory, d).startswith(skip)]
        for name in inside:
            path = os.path.join(directory, name)
            if path.startswith(skip) or os.path.islink(path) or not os.path.isfile(path):
                continue
            if re.search(r"\.(whl|egg|zip|tar|tgz|tar\.\w+)$", name):
                if any(package in name.lower().replace("_", "-") for package in packages):
                    found.append(["archive", path, name])
            if name.endswith((".pyc", ".pyo")):
                stem = name.split(".")[0]
                if path.startswith("/testbed/"):
                    found.append(["bytecode", path, name])
                elif any(m.endswith("/" + stem + ".py") and m.split("/")[-2] in directory.split("/") for m in mutated):
                    found.append(["bytecode", path, name])
                continue
            if only and name not in only:
                continue
            try:
                with open(path, "rb") as file:
                    data = file.read(8 << 20)
            except OSError:
                continue
            files += 1
            look(path, data, not path.startswith("/opt/env/"))

if request["git"]:
    git = "/testbed/.git"
    run = lambda *a: subprocess.run(["git", "-C", "/testbed", *a], capture_output=True)
    listed = run("cat-file", "--batch-all-objects", "--batch-check").stdout.split(b"\n")
    commits = [l for l in listed if b" commit " in l]
    if len(commits) != 1:
        found.append(["git", git, "%d commits" % len(commits)])
    if any(b" tag " in l for l in listed):
        found.append(["git", git, "a tag"])
    for path in ("packed-refs", "objects/info/alternates", "refs/stash", "refs/notes", "refs/remotes", "ORIG_HEAD",
                 "FETCH_HEAD", "logs", "modules", "worktrees", "shallow"):
        if os.path.exists(os.path.join(git, path)):
            found.append(["git", os.path.join(git, path), "is there"])
    if os.path.isdir(git + "/objects/pack") and os.listdir(git + "/objects/pack"):
        found.append(["git", git + "/objects/pack", "a pack"])
    if b"remote" in open(git + "/config", "rb").read():
        found.append(["git", git + "/config", "a remote"])
    whole = run("cat-file", "--batch-all-objects", "--batch").stdout
    objects = len(listed) - 1
    look(git + "/objects", whole, True)
sys.stdout.write(json.dumps({"found": found, "files": files, "objects": objects}))
"""
AGENT_ROOTS = ("/testbed", "/opt", "/tmp", "/root", "/home", "/var", "/etc", "/srv", "/mnt", "/run")
SHARED_SKIP = ("/proc", "/sys", "/dev", "/testbed", "/opt/env")


def secrets_of(task: Task, hidden: HiddenTests, visible: str = "") -> list[tuple[str, str, str]]:
    """(kind, text, place) of every text that must not be found; "repeated" is original code that is visible anyhow."""
    found = []
    wanted: dict[str, set[str]] = {}
    for test in hidden.fail_to_pass:
        path, _, rest = test.partition("::")
        wanted.setdefault(path, set()).add(rest.partition("[")[0].rpartition("::")[2])
    for path, names in wanted.items():
        text = hidden.files.get(path, "")
        if len(text) > 80:
            found.append(("file", text, path))
        found += [("test", body, f"{path}::{name}") for name, body in functions(text, names)]
    for old, new in hunks(hidden.gold_patch):
        if len(new) >= 40:
            found.append(("repeated" if new in visible else "original", new, task.id))
        for first in old:
            found.append(("patch", first, task.id))
    return found


def functions(text: str, names: set[str]) -> list[tuple[str, str]]:
    """The source of functions of those names, without their first line; only of three lines or more."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    lines = text.split("\n")
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    bodies = [(node.name, "\n".join(lines[node.lineno - 1 : node.end_lineno])) for node in nodes if node.name in names]
    return [(name, body) for name, body in bodies if body.count("\n") >= 1]


def hunks(patch: str) -> list[tuple[list[str], str]]:
    """For each hunk: the pieces "-bug" + "+solution" as a diff has them, and the text of its new side."""
    found = []
    for hunk in re.split(r"^@@.*@@.*\n", patch, flags=re.MULTILINE)[1:]:
        lines = [line for line in hunk.split("\n") if line[:1] in (" ", "+", "-")]
        new = "\n".join(line[1:] for line in lines if line[0] != "-")
        pieces = re.findall(r"(?:^-.*\n)+(?:^\+.*\n?)+", hunk, flags=re.MULTILINE)
        found.append(([piece.rstrip("\n") for piece in pieces if len(piece) > 20], new))
    return found


def test_names(task: Task, hidden: HiddenTests, visible: str) -> list[str]:
    """Names of F2P tests that no visible text has for another reason."""
    names = {test.partition("[")[0].rpartition("::")[2] for test in hidden.fail_to_pass}
    return sorted(name for name in names if len(name) >= MIN_NAME and not re.search(rf"\b{name}\b", visible))


def mutated_files(hidden: HiddenTests) -> list[str]:
    return re.findall(r"^\+\+\+ b/(.+?)\t?$", hidden.gold_patch, re.MULTILINE)


def request(secrets: Sequence[tuple[str, str, str]], names: Sequence[str], **more: Any) -> bytes:
    def pack(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    row = {"secrets": [(kind, pack(text), place) for kind, text, place in dict.fromkeys(secrets)]}
    return json.dumps({**row, "names": [pack(name) for name in names], **more}).encode()


class Scan:
    """The scans of one task set."""

    def __init__(self, suite: SweSuite, tasks: Sequence[Task], progress: Progress) -> None:
        self.suite, self.tasks, self.progress = suite, tasks, progress
        self.found: list[dict[str, str]] = []
        self.files = self.objects = 0
        self.planted: set[str] = set()

    async def run(self) -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(task: Task) -> None:
            async with gate:
                await self._attempt(task)
                self.progress.advance(note=task.id)

        self.progress.begin("sandboxes", len(self.tasks) + 1)
        await self._attempt(self.tasks[0], shared=True)
        await self._attempt(self.tasks[0], plant=True)
        self.progress.advance(note="system")
        await asyncio.gather(*map(one, self.tasks))

    async def _attempt(self, task: Task, *, shared: bool = False, plant: bool = False) -> None:
        env = self.suite.open(task, seed=0)
        assert isinstance(env, SweEnv)
        try:
            await env.start()
            assert env._workspace is not None
            if plant:
                await plant_leaks(env._workspace.sandbox, task, self.suite.tasks.hidden[task.id])
            body = self._shared_request() if shared else self._own_request(task)
            command = ["python3", "-S", "-c", SCANNER]
            result = await env._workspace.sandbox.exec(command, timeout_s=SCAN_TIMEOUT_S, cwd="/", stdin=body)
        finally:
            await env.close()
        if result.exit_code:
            raise RuntimeError(f"the scan of {task.id} failed ({result.exit_code}): {result.stderr[-2000:]!r}")
        answer = json.loads(result.stdout)
        if plant:
            self.planted = {kind for kind, _, _ in answer["found"]}
            return
        self.files += answer["files"]
        self.objects += answer["objects"]
        name = "every task" if shared else task.id
        for kind, place, of in answer["found"]:
            if kind != "repeated" or not place.startswith("/testbed/"):
                self.found.append({"task": name, "kind": kind, "place": place, "of": of})

    def _own_request(self, task: Task) -> bytes:
        hidden = self.suite.tasks.hidden[task.id]
        files = task.repository.files
        visible = "\n".join([task.problem_statement, *files, *files.values()])
        return request(
            secrets_of(task, hidden, visible),
            test_names(task, hidden, visible),
            mutated=mutated_files(hidden),
            packages=[task.repo.lower().replace("_", "-")] if task.source != "micro" else [],
            roots=AGENT_ROOTS,
            skip=("/testbed/.git/",),
            git=True,
            only=[],
        )

    def _shared_request(self) -> bytes:
        hidden = [self.suite.tasks.hidden[task.id] for task in self.tasks]
        secrets = [secret for task, tests in zip(self.tasks, hidden, strict=True) for secret in secrets_of(task, tests)]
        packages = sorted({task.repo.lower().replace("_", "-") for task in self.tasks if task.source != "micro"})
        mutated = sorted({path for tests in hidden for path in mutated_files(tests)})
        only = {path.rpartition("/")[2] for tests in hidden for path in (*mutated_files(tests), *tests.files)}
        more = {"mutated": mutated, "packages": packages, "only": sorted(only - {"__init__.py"})}
        return request(secrets, (), roots=("/",), skip=SHARED_SKIP, git=False, **more)


async def plant_leaks(sandbox: Sandbox, task: Task, hidden: HiddenTests) -> None:
    """One leak of each kind, by the agent's own hand."""
    secrets = secrets_of(task, hidden)
    texts = {kind: next(text for kind_of, text, _ in secrets if kind_of == kind) for kind in PLANTS if kind in KINDS}
    place = mutated_files(hidden)[0].removesuffix(".py")
    files = {f"/tmp/planted-{kind}": f"before\n{text}\nafter\n".encode() for kind, text in texts.items()}
    files[f"/testbed/{place}.cpython-311.pyc"] = b"code"
    files[f"/tmp/{task.repo}-1.0-py3-none-any.whl"] = b"wheel"
    await sandbox.write_files(files)
    command = "git -c user.name=a -c user.email=b commit -q --allow-empty -m more"
    done = await sandbox.exec(["sh", "-c", command], timeout_s=60)
    assert done.exit_code == 0, done.stderr


def make_recipe(kind: str) -> Recipe:
    tasks = {"kind": "bundled"} if kind == "bundled" else {"kind": "micro", "train": 40, "heldout": 40, "unseen": 20}
    limits = {"concurrency": AT_ONCE, "memory_mib": 2048, "output_bytes": 16 << 20}
    return build_recipe({"run": {"name": "leaks"}, "tasks": tasks, "sandbox": limits}, origin="benchmarks/leaks.py")


async def scan(kind: str, quick: bool, progress: Progress) -> Scan:
    async with open_suite(make_recipe(kind), progress) as opened:
        assert isinstance(opened.suite, SweSuite)
        tasks = opened.suite.tasks.tasks
        if kind == "micro":
            tasks = tuple(task for split in ("train", "heldout", "unseen") for task in opened.suite.split(split))
            tasks = tasks[:: 10 if quick else 1]
        elif quick:
            tasks = tuple({task.repo: task for task in reversed(tasks)}.values())
        result = Scan(opened.suite, tasks, progress)
        await result.run()
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("bundled", "micro"), help="one of the two sets")
    arguments = parser.parse_args()
    kinds = [arguments.only] if arguments.only else ["bundled", "micro"]
    with TerminalProgress() as progress:
        scans = {kind: asyncio.run(scan(kind, arguments.quick, progress)) for kind in kinds}
    found = [row for result in scans.values() for row in result.found]
    for row in found:
        print(json.dumps(row), file=sys.stderr)
    counts = {kind: len(scans[kind].tasks) if kind in scans else 0 for kind in ("bundled", "micro")}
    plants = {(kind, leak) for kind in kinds for leak in PLANTS if (kind, leak) != ("micro", "archive")}
    seen = {(kind, leak) for kind, one in scans.items() for leak in one.planted} & plants
    result = {
        "tasks": sum(counts.values()),
        "leaks": len(found),
        "plants": len(plants),
        "plants_found": len(seen),
        **counts,
        "files": sum(one.files for one in scans.values()),
        "objects": sum(one.objects for one in scans.values()),
        "found": found[:20],
    }
    print(json.dumps(result))
    for missed in sorted(plants - seen):
        print(f"a planted leak was not found: {missed}", file=sys.stderr)
    return 0 if result["tasks"] and not found and seen == plants else 1


if __name__ == "__main__":
    sys.exit(main())
