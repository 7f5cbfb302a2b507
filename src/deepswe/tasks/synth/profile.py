"""What a repository's tests do on the original code: which pass every time, what each runs, how long they take."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deepswe.tasks.bundled import RepositorySource, is_test_module
from deepswe.tasks.distributions import Pip
from deepswe.tasks.layers import LayerCache, layer_key
from deepswe.tasks.synth.mutation import Mutation, Site
from deepswe.tasks.synth.refusal import ProjectRefused, failure_reason, refusal_of
from deepswe.tasks.synth.warm import HASH_SEEDS, TestRun, WarmBench

TOOLS = ("coverage==7.17.5",)
MIN_PASSING = 5
_PROFILE = "profile.json"
_FORMAT = 3
_WHOLE_S = 900.0


@dataclass(frozen=True, slots=True)
class Profile:
    """What the original does.

    Attributes:
        passing: tests that pass in every run, in order.
        covering: code file -> line -> passing tests that run it.
        test_seconds: test -> seconds of its call.
        modules: what its tests import besides the repository, in order.
        unstable: tests that passed in some runs and not in others.
        left_out: why tests that fail on the original fail -> how many ("network", "display", "other").
        whole_s: processor seconds of all tests together.
    """

    passing: tuple[str, ...]
    covering: Mapping[str, Mapping[int, frozenset[str]]]
    test_seconds: Mapping[str, float]
    modules: tuple[str, ...] = ()
    unstable: tuple[str, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    whole_s: float = 0.0

    def tests_at(self, site: Site) -> frozenset[str]:
        """Passing tests that run a line of a mutated node."""
        lines = self.covering.get(site.file, {})
        found: set[str] = set()
        for line in range(site.line, site.last_line + 1):
            found |= lines.get(line, frozenset())
        return frozenset(found)

    def tests_of(self, mutation: Mutation) -> frozenset[str]:
        """Passing tests that run any of its sites."""
        return frozenset().union(*(self.tests_at(site) for site in mutation.sites))

    def seconds_of(self, tests: Sequence[str] | frozenset[str]) -> float:
        """How long these tests take, without their set-up."""
        return sum(self.test_seconds.get(test, 0.0) for test in tests)

    def by_file(self) -> dict[str, tuple[str, ...]]:
        """Test file -> the rest of the ids of its passing tests."""
        grouped: dict[str, list[str]] = defaultdict(list)
        for test in self.passing:
            file, _, rest = test.partition("::")
            grouped[file].append(rest)
        return {file: tuple(rests) for file, rests in grouped.items()}


def profile_of(source: RepositorySource, bench: WarmBench, cache: LayerCache) -> Profile:
    """The profile, measured once and kept in the cache. The bench then has the repository's needs preloaded.

    Raises:
        ProjectRefused: see `measure`.
        TaskError: a run of the original's tests did not end.
    """
    place = cache.build(_key(source), lambda place: write_profile(measure(bench), place / _PROFILE))
    profile = read_profile(place / _PROFILE)
    bench.preload(profile.modules)
    return profile


def install_tools(cache: LayerCache, pip: Pip) -> Path:
    """The directory with coverage, installed once.

    Raises:
        BuildError: pip failed.
    """
    options = ["install", "--quiet", "--no-deps", "--target"]
    return cache.build(
        layer_key("synth-tools", {"requirements": TOOLS}),
        lambda place: pip.run("installation of coverage", [*options, str(place), *TOOLS]),
    )


def measure(bench: WarmBench) -> Profile:
    """Run the original's tests: once to learn what they import, then warm, with coverage and another hash seed. A test
    counts if it passes in both.

    Raises:
        ProjectRefused: there are no tests, or so few pass that no task can be made; the reason says why.
        TaskError: a run did not come to its end.
    """
    source = bench.source
    files = [path for path in source.tests if is_test_module(path)]
    if not files:
        raise ProjectRefused("no-tests", f"{source.recipe.name} has no file named test_*.py or *_test.py")
    first = _whole(bench, files, modules=True, write_bytecode=True)
    bench.preload(first.modules)
    measured = sorted({str(Path(place).parent) if place.endswith(".py") else place for place in source.recipe.code})
    covered = _whole(bench, files, measure=measured, hash_seed=HASH_SEEDS[1], write_bytecode=True)
    runs = (first, covered)
    stable = frozenset.intersection(*(run.passed for run in runs))
    ever = frozenset.union(*(run.passed for run in runs))
    passing = tuple(test for test in first.statuses if test in stable)
    if len(passing) < MIN_PASSING:
        raise refusal_of(source.recipe.name, first, len(passing), MIN_PASSING)
    code = set(code_files(source))
    return Profile(
        passing,
        {
            file: {line: tests & stable for line, tests in lines.items()}
            for file, lines in covered.coverage.items()
            if file in code
        },
        {test: first.seconds.get(test, 0.0) for test in passing},
        first.modules,
        tuple(sorted(ever - stable)),
        dict(Counter(failure_reason(f"{item.error} {item.message}") for item in first.failures.values())),
        sum(first.seconds.values()),
    )


def _whole(bench: WarmBench, files: Sequence[str], **options: object) -> TestRun:
    run = bench.run_tests(files, timeout_s=_WHOLE_S, **options)  # type: ignore[arg-type]
    if run.usage_error:
        raise ProjectRefused("broken-tests", f"pytest refuses the configuration of {bench.source.recipe.name}")
    if not run.complete:
        reason = f"did not end within {_WHOLE_S:.0f} s" if run.timed_out else "crashed"
        raise ProjectRefused(
            "hangs" if run.timed_out else "broken-tests", f"{bench.source.recipe.name}: tests {reason}"
        )
    return run


def code_files(source: RepositorySource) -> list[str]:
    """The files that bugs are put in."""
    files: list[str] = []
    for place in source.recipe.code:
        root = source.base / place
        found = [root] if root.is_file() else sorted(root.rglob("*.py"))
        files += [path.relative_to(source.base).as_posix() for path in found]
    return files


def write_profile(profile: Profile, path: Path) -> None:
    """Keep a profile."""
    number = {test: at for at, test in enumerate(profile.passing)}
    record = {
        "passing": profile.passing,
        "covering": {
            file: {line: sorted(number[test] for test in tests) for line, tests in lines.items()}
            for file, lines in profile.covering.items()
        },
        "test_seconds": [profile.test_seconds.get(test, 0.0) for test in profile.passing],
        "modules": profile.modules,
        "unstable": profile.unstable,
        "left_out": profile.left_out,
        "whole_s": profile.whole_s,
    }
    path.write_text(json.dumps(record), encoding="utf-8")


def read_profile(path: Path) -> Profile:
    """What `write_profile` wrote."""
    record = json.loads(path.read_text(encoding="utf-8"))
    passing = tuple(record["passing"])
    covering = {
        file: {int(line): frozenset(passing[at] for at in tests) for line, tests in lines.items()}
        for file, lines in record["covering"].items()
    }
    seconds = dict(zip(passing, record["test_seconds"], strict=True))
    rest = (tuple(record["modules"]), tuple(record["unstable"]), record["left_out"], record["whole_s"])
    return Profile(passing, covering, seconds, *rest)


def _key(source: RepositorySource) -> str:
    distribution = source.recipe.distribution
    return layer_key(
        f"profile-{source.recipe.name}",
        {
            "format": _FORMAT,
            "layers": [distribution.base_key, distribution.tests_key, distribution.environment_key],
            "run": [source.recipe.pythonpath, source.recipe.arguments, source.recipe.code, TOOLS],
        },
    )
