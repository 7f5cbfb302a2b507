"""Tasks out of the history of a repository (SWE-GEN of R2E-Gym): commits that make tests pass.

For each small commit that changes code and tests, the commit's tests are laid over its parent and run there, then
again with the commit's code. It is a task where at least one test fails before and passes after, and none that passed
before fails after. Nothing but ids is recorded while searching; `assemble` makes the tasks.
"""

from __future__ import annotations

import json
import queue
import random
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from deepswe.cores import usable_cores
from deepswe.errors import BuildError, StoreError, TaskError
from deepswe.jsonl import append_line, read_lines
from deepswe.progress import Progress
from deepswe.tasks.bundled import RepositoryRecipe, RepositorySource
from deepswe.tasks.distributions import Pip
from deepswe.tasks.environments import Environment, Package, build_environment, resolve
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.synth.bench import Bench, TestRun
from deepswe.tasks.synth.commits_history import Commit, History
from deepswe.tasks.synth.commits_issue import compose, hidden_names, leaks, message_text
from deepswe.tasks.synth.commits_needs import KNOWN_GOOD, METADATA_FILES, Needs, find_version, read_needs
from deepswe.tasks.synth.commits_select import Candidate, Limits, files_to_run, select
from deepswe.tasks.synth.issue import (
    Case,
    Outcome,
    Sight,
    documentation_of,
    extract_case,
    read_replay,
    replay_script,
    write_issue,
)

TASK = "task"
"""The verdict on a commit that is kept."""
ARGUMENTS = ("-o", "addopts=", "--continue-on-collection-errors")
"""Of pytest: a project's own options may ask for plug-ins that are no use here."""

_SCRIPT_TIMEOUT_S = 20.0
_CASES_TRIED = 3
_SLACK_S, _SLOWER = 10.0, 4.0
"""The old code gets this many seconds more than so many times what the new one took."""
_ASKS_FOR_VERSION = r"importlib[._]metadata|pkg_resources|_metadata import"


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """How a history is searched.

    Attributes:
        tip: where the walk begins.
        tasks: stop after this many tasks; 0 searches on.
        commits: look at no more than this many commits; 0 looks at all.
        candidates: run no more than this many; 0 runs all.
        limits: on the size of a commit.
        first_parent: see each merge into the main line as one change, and not the commits that it brings.
        dated: choose the versions of packages that were published before the commit's quarter ended, where the index
            says when they were; else the newest within `KNOWN_GOOD`.
        repeats: runs of each side; a test counts where they agree.
        timeout_s: of one run.
        seed: of the issue texts.
        workers: runs at once; 0 takes one a core.
    """

    tip: str = "HEAD"
    tasks: int = 0
    commits: int = 0
    candidates: int = 0
    limits: Limits = field(default_factory=Limits)
    first_parent: bool = False
    dated: bool = False
    repeats: int = 1
    timeout_s: float = 60.0
    seed: int = 0
    workers: int = 0


class CommitRow(BaseModel):
    """The verdict on one candidate, as it is recorded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    commit: str
    verdict: str
    """`TASK`, or why it is none."""
    detail: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """Test modules that were run."""
    packages: tuple[Package, ...] = ()
    project: str = ""
    version: str = ""
    """Of the code, where it asks for it."""
    version_file: str = ""
    pythonpath: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    issue: str = ""
    issue_style: str = ""
    license: str = ""
    seconds: float = 0.0
    """Of one run with the commit's code."""

    @property
    def environment(self) -> Environment:
        """What its tests run in."""
        return Environment(self.packages, self.project, self.version if self.project else "")


@dataclass(frozen=True, slots=True)
class CommitsFound:
    """The result of a search.

    Attributes:
        rows: the tasks, newest first.
        candidates: commits that were run.
        verdicts: end -> commits that met it, those that were never run included.
    """

    rows: tuple[CommitRow, ...]
    candidates: int
    verdicts: Mapping[str, int]

    @property
    def valid_share(self) -> float:
        """Tasks per candidate."""
        return len(self.rows) / self.candidates if self.candidates else 0.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """What two runs say.

    Attributes:
        refusal: why it is no task, or "".
        fail_to_pass, pass_to_pass: in the order of the second run.
        detail: more about a refusal.
    """

    refusal: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    detail: str = ""


def judge(before: TestRun, after: TestRun) -> Judgement:
    """Compare the commit's tests on the old and on the new code."""
    if not after.complete:
        return Judgement("tests do not end" if after.timed_out else "tests do not run")
    if not before.complete:
        return Judgement("old code does not end" if before.timed_out else "tests do not run")
    passed = [test for test, status in after.statuses.items() if status == "passed"]
    if not passed:
        return Judgement("no passing test")
    lost = sorted(test for test in before.passed if test in after.statuses and test not in after.passed)
    if lost:
        return Judgement("regression", detail=lost[0])
    failing = tuple(test for test in passed if test not in before.passed)
    if not failing:
        return Judgement("no failing test")
    return Judgement("", failing, tuple(test for test in passed if test in before.passed))


def agree(runs: Sequence[TestRun]) -> TestRun:
    """One run out of several: tests whose statuses differ are left out."""
    first, *others = runs
    if not all(run.complete for run in runs):
        return next(run for run in runs if not run.complete)
    statuses = {
        test: status for test, status in first.statuses.items() if all(_same(run, test, status) for run in others)
    }
    return replace(first, statuses=statuses)


def _same(run: TestRun, test: str, status: str) -> bool:
    return run.statuses.get(test) == status


class Record:
    """The rows of a search, append-only; a torn last line is dropped."""

    def __init__(self, path: Path, header: Mapping[str, object]) -> None:
        """Open or begin a record.

        Args:
            path: of the file.
            header: what the rows depend on.

        Raises:
            TaskError: the file is of another search, or no record.
        """
        self.path = path
        self.rows: dict[str, CommitRow] = {}
        line = json.dumps(header, sort_keys=True).encode()
        try:
            lines, rest = read_lines(path)
            if not (lines[0] == line if lines else line.startswith(rest)):
                raise TaskError(
                    f"{path} is no record of this search (its settings are other); remove it or name another"
                )
            self.rows = {row.commit: row for row in map(CommitRow.model_validate_json, lines[1:])}
        except (OSError, ValidationError) as error:
            raise TaskError(f"record {path} cannot be used: {error}; remove it to begin anew") from error
        if not lines:
            self._write(line)

    def add(self, row: CommitRow) -> None:
        """Keep a row, written before this returns.

        Raises:
            StoreError: it could not be written; what was written before stays.
        """
        self._write(row.model_dump_json(exclude_defaults=True).encode())
        self.rows[row.commit] = row

    def _write(self, line: bytes) -> None:
        try:
            append_line(self.path, line)
        except OSError as error:
            raise StoreError(f"record {self.path} cannot be written: {error.strerror}") from error


def search(
    history: History,
    name: str,
    plan: CommitPlan,
    record: Record,
    cache: LayerCache,
    progress: Progress,
    *,
    pip: Pip | None = None,
) -> CommitsFound:
    """Search a history; what is recorded is not run again.

    Args:
        history: open.
        name: of the repository.
        plan: how.
        record: of earlier rows; gets the new ones.
        cache: for environments.
        progress: told of each candidate.
        pip: how pip is called.

    Raises:
        BuildError: the repository cannot be read.
    """
    workers = plan.workers or usable_cores()
    shop = _Workshop(history, name, plan, cache, pip or Pip())
    verdicts: Counter[str] = Counter()
    rows: list[CommitRow] = []
    candidates = 0
    progress.begin(f"Commits of {name}", plan.tasks or plan.candidates or plan.commits)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="commits")
    try:
        for commit, future in _ahead(_submissions(history, plan, record, shop, pool), 2 * workers):
            row = future if isinstance(future, str) else future.result()
            if isinstance(row, str):
                verdicts[row] += 1
            else:
                candidates += 1
                verdicts[row.verdict] += 1
                if commit.id not in record.rows:
                    record.add(row)
                if row.verdict == TASK:
                    rows.append(row)
            if plan.tasks:
                step = int(not isinstance(row, str) and row.verdict == TASK)
            else:
                step = int(not isinstance(row, str) or not plan.candidates)
            progress.advance(step, note=f"{len(rows)} tasks of {candidates} candidates")
            if (plan.tasks and len(rows) >= plan.tasks) or (plan.candidates and candidates >= plan.candidates):
                break
    finally:
        shop.stopped.set()
        pool.shutdown(wait=True, cancel_futures=True)
        shop.close()
    return CommitsFound(tuple(rows), candidates, dict(sorted(verdicts.items())))


_Pending = tuple[Commit, "Future[CommitRow] | str"]


def _submissions(
    history: History, plan: CommitPlan, record: Record, shop: _Workshop, pool: ThreadPoolExecutor
) -> Iterator[_Pending]:
    tip = history.resolve(plan.tip)
    for commit in history.walk(tip, first_parent=plan.first_parent, limit=plan.commits):
        known = record.rows.get(commit.id)
        if known is not None:
            done: Future[CommitRow] = Future()
            done.set_result(known)
            yield commit, done
            continue
        candidate = select(commit, plan.limits, history.text)
        yield commit, candidate if isinstance(candidate, str) else pool.submit(shop.try_candidate, candidate)


def _ahead(items: Iterator[_Pending], width: int) -> Iterator[_Pending]:
    """The same items in order, with so many that are being worked on begun ahead."""
    waiting: deque[_Pending] = deque()
    working = 0
    for item in items:
        waiting.append(item)
        working += not isinstance(item[1], str)
        while waiting and (working >= width or isinstance(waiting[0][1], str) or waiting[0][1].done()):
            working -= not isinstance(waiting[0][1], str)
            yield waiting.popleft()
    yield from waiting


class _Workshop:
    """Where candidates are tried: a few work places, each for one thread at a time, and the environments."""

    def __init__(self, history: History, name: str, plan: CommitPlan, cache: LayerCache, pip: Pip) -> None:
        self.history, self.name, self.plan, self.cache, self.pip = history, name, plan, cache, pip
        self.stopped = threading.Event()
        self._places: queue.SimpleQueue[_Place] = queue.SimpleQueue()
        self._all: list[_Place] = []
        self._environments: dict[tuple[str, ...], tuple[Package, ...] | BuildError] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Remove the work places."""
        for place in self._all:
            place.close()

    def try_candidate(self, candidate: Candidate) -> CommitRow:
        """The verdict on a candidate."""
        ident = candidate.commit.id
        if self.stopped.is_set():
            return CommitRow(commit=ident, verdict="stopped")
        tree = self.history.tree(ident)
        files = files_to_run(candidate, list(self.history.files(tree)))
        if not files:
            return CommitRow(commit=ident, verdict="no test to run")
        try:
            setting = self._setting(candidate, tree)
        except BuildError as error:
            return CommitRow(commit=ident, verdict="no environment", detail=str(error)[-500:])
        place = self._take()
        try:
            return place.try_candidate(candidate, files, setting)
        except UnicodeDecodeError as error:
            return CommitRow(commit=ident, verdict="no UTF-8", detail=str(error))
        finally:
            self._places.put(place)

    def _take(self) -> _Place:
        try:
            return self._places.get_nowait()
        except queue.Empty:
            place = _Place(self.history, self.name, self.plan)
            with self._lock:
                self._all.append(place)
            return place

    def _setting(self, candidate: Candidate, tree: str) -> _Setting:
        files = self.history.files(tree)
        texts = {path: self.history.text(files[path][1]) or "" for path in METADATA_FILES if path in files}
        needs = read_needs(texts)
        packages = self._packages(needs, candidate.commit)
        asks = bool(needs.name) and self.history.mentions(tree, _ASKS_FOR_VERSION)
        version = needs.version or self._code_version(files) or "0"
        environment = Environment(packages, needs.name if asks else "", version if asks else "")
        source = any(path.startswith("src/") and path.endswith(".py") for path in files)
        benchmark = any(package.name.lower() == "pytest-benchmark" for package in packages)
        return _Setting(
            environment,
            build_environment(environment, self.cache, self.pip),
            ("src", ".") if source else (".",),
            (*ARGUMENTS, *(["--benchmark-disable"] if benchmark else [])),
            needs.version_file if needs.version_file not in files else "",
            version,
            needs.license,
        )

    def _code_version(self, files: Mapping[str, tuple[str, str]]) -> str:
        inits = [path for path in files if path.endswith("__init__.py") and path.count("/") <= 2][:4]
        return find_version([self.history.text(files[path][1]) or "" for path in inits])

    def _packages(self, needs: Needs, commit: Commit) -> tuple[Package, ...]:
        """What the project's tests need, chosen once for all commits with the same metadata.

        Raises:
            BuildError: there is no such set of packages, even without what only the tests ask for.
        """
        before = quarter_end(commit.time.date()) if self.plan.dated else None
        wanted = needs.requirements()
        key = (str(before), *wanted)
        with self._lock:
            if key not in self._environments:
                self._environments[key] = self._resolve(needs, before)
            found = self._environments[key]
        if isinstance(found, BuildError):
            raise found
        return found

    def _resolve(self, needs: Needs, before: date | None) -> tuple[Package, ...] | BuildError:
        tries = [(needs.requirements(), KNOWN_GOOD), (needs.requirements(), ()), (needs.requirements(tests=False), ())]
        failure = BuildError("nothing was tried")
        for wanted, constraints in tries:
            try:
                return resolve(wanted, self.cache, self.pip, constraints=constraints, before=before)
            except BuildError as error:
                failure = error
        return failure


def quarter_end(day: date) -> date:
    """The first day after the quarter that a day is in: commits of one quarter then share their packages."""
    month = (day.month - 1) // 3 * 3 + 4
    return date(day.year + (month > 12), month - 12 if month > 12 else month, 1)


@dataclass(frozen=True, slots=True)
class _Setting:
    """What a candidate is run with."""

    environment: Environment
    layer: Path
    pythonpath: tuple[str, ...]
    arguments: tuple[str, ...]
    version_file: str
    version: str
    license: str


def version_module(version: str) -> str:
    """What a build would write into a version file."""
    return f'version = __version__ = "{version}"\nversion_tuple = __version_tuple__ = ({version.split(".")[0]!r},)\n'


class _Place:
    """A tree that goes from candidate to candidate, for one thread at a time."""

    def __init__(self, history: History, name: str, plan: CommitPlan) -> None:
        self.history, self.name, self.plan = history, name, plan
        self._stack = ExitStack()
        self._empty = Path(tempfile.mkdtemp(prefix="deepswe-commits-"))
        self._stack.callback(shutil.rmtree, self._empty, ignore_errors=True)
        self._benches: dict[tuple[object, ...], Bench] = {}
        self._untracked: dict[Bench, set[str]] = {}

    def close(self) -> None:
        """Remove the trees."""
        self._stack.close()

    def try_candidate(self, candidate: Candidate, files: Sequence[str], setting: _Setting) -> CommitRow:
        """Run both sides, and write the issue where they differ as they should."""
        commit = candidate.commit
        bench = self._bench(setting)
        self._lay_old(bench, candidate, setting)
        self._lay(bench, candidate, new=True)
        started = time.monotonic()
        after = self._run(bench, files, self.plan.timeout_s)
        seconds = (time.monotonic() - started) / self.plan.repeats
        self._lay(bench, candidate, new=False)
        limit = min(self.plan.timeout_s, _SLACK_S + _SLOWER * seconds)
        before = self._run(bench, files, limit) if after.complete else TestRun(complete=False)
        judgement = judge(before, after)
        row = CommitRow(
            commit=commit.id,
            verdict=judgement.refusal or TASK,
            detail=judgement.detail,
            fail_to_pass=judgement.fail_to_pass,
            pass_to_pass=judgement.pass_to_pass,
            files=tuple(files),
            packages=setting.environment.packages,
            project=setting.environment.project,
            version=setting.environment.version or (setting.version if setting.version_file else ""),
            version_file=setting.version_file,
            pythonpath=setting.pythonpath,
            arguments=setting.arguments,
            license=setting.license,
            seconds=round(seconds, 2),
        )
        if judgement.refusal:
            return CommitRow(commit=commit.id, verdict=row.verdict, detail=row.detail, files=row.files)
        issue, style = self._issue(bench, candidate, before, judgement)
        if not issue:
            return CommitRow(commit=commit.id, verdict="no issue text", files=row.files)
        return row.model_copy(update={"issue": issue, "issue_style": style})

    def _run(self, bench: Bench, files: Sequence[str], timeout_s: float) -> TestRun:
        return agree([bench.run_tests(files, timeout_s=timeout_s) for _ in range(self.plan.repeats)])

    def _bench(self, setting: _Setting) -> Bench:
        key = (setting.layer, setting.pythonpath, setting.arguments)
        if key not in self._benches:
            recipe = RepositoryRecipe(
                name=self.name,
                version="0",
                sha256="",
                license="",
                split="",
                code=(),
                tests=(),
                requirements=(),
                pythonpath=setting.pythonpath,
                arguments=setting.arguments,
            )
            bench = self._stack.enter_context(Bench(RepositorySource(recipe, self._empty, {}), setting.layer))
            self._benches[key] = bench
            self._untracked[bench] = set()
        return self._benches[key]

    def _lay_old(self, bench: Bench, candidate: Candidate, setting: _Setting) -> None:
        """The parent's tree with the commit's tests."""
        for path in self._untracked[bench]:
            (bench.root / path).unlink(missing_ok=True)
        self._untracked[bench] = {change.path for change in (*candidate.code, *candidate.tests) if not change.before}
        self.history.check_out(self.history.tree(candidate.commit.parents[0]), bench.root)
        if setting.version_file:
            bench.write(setting.version_file, version_module(setting.version))
            self._untracked[bench].add(setting.version_file)
        for change in candidate.tests:
            self._put(bench, change.path, change.after)

    def _lay(self, bench: Bench, candidate: Candidate, *, new: bool) -> None:
        for change in candidate.code:
            self._put(bench, change.path, change.after if new else change.before)

    def _put(self, bench: Bench, path: str, ident: str) -> None:
        if ident:
            bench.write(path, self.history.blob(ident).decode())
        else:
            (bench.root / path).unlink(missing_ok=True)

    def _issue(self, bench: Bench, candidate: Candidate, before: TestRun, judgement: Judgement) -> tuple[str, str]:
        """An issue text and of which sort it is; ("", "") where none could be made. A case is shown only where another
        failing test stays unseen."""
        commit, failing = candidate.commit, judgement.fail_to_pass
        patch = self.history.diff(commit.parents[0], commit.id, [change.path for change in candidate.code])
        words = message_text(commit.message, candidate, failing, patch)
        rng = random.Random(f"{self.plan.seed}:{commit.id}")
        case = ""
        if len(failing) >= 2:
            sight = self._sight(bench, candidate, before, failing, rng)
            case = write_issue(sight, rng) if sight else ""
            case = "" if leaks(case, candidate, failing, patch) else case
        style = "+".join(name for name, text in (("message", words), ("case", case)) if text)
        return (compose(words, case), style) if style else ("", "")

    def _sight(
        self, bench: Bench, candidate: Candidate, before: TestRun, failing: Sequence[str], rng: random.Random
    ) -> Sight | None:
        """A failing case that stands alone, replayed on both codes. The old code lies there, before and after."""
        texts = {
            c.path: self.history.text(c.after) or "" for c in candidate.tests if c.after and c.path.endswith(".py")
        }
        order = list(failing)
        rng.shuffle(order)
        tried = 0
        for test in order:
            failure, module = before.failures.get(test), texts.get(test.split("::")[0])
            if failure is None or module is None or tried >= _CASES_TRIED:
                continue
            case = extract_case(module, test, failure.line, failure.parameters, hidden_names(texts))
            if case is not None:
                tried += 1
                sight = self._replay(bench, candidate, case)
                if sight is not None:
                    return sight
        return None

    def _replay(self, bench: Bench, candidate: Candidate, case: Case) -> Sight | None:
        actual = _outcome(bench, case)
        if actual is None:
            return None
        self._lay(bench, candidate, new=True)
        expected = _outcome(bench, case)
        self._lay(bench, candidate, new=False)
        if expected is None or (actual.value, actual.error) == (expected.value, expected.error):
            return None
        code = {c.path: self.history.text(c.after) or "" for c in candidate.code if c.after and c.path.endswith(".py")}
        return Sight(case, expected, actual, documentation_of(case, code), "", self.name)


def _outcome(bench: Bench, case: Case) -> Outcome | None:
    """What a case gives, if the seed of hashes has no part in it."""
    script = replay_script(case)
    first = read_replay(bench.run_script(script, timeout_s=_SCRIPT_TIMEOUT_S, hash_seed=0))
    if first is None or first.error:
        return first
    return first if first == read_replay(bench.run_script(script, timeout_s=_SCRIPT_TIMEOUT_S, hash_seed=1)) else None
