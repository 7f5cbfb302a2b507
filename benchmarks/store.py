"""The store of trajectories: 100,000 of 30 steps are written and read back, against lines of JSON, plain and gzipped.

The texts are those of our own tools at work on modules of the standard library (views, searches, edits, and test output
whose tracebacks quote them), the thoughts are sentences of their documentation, the token ids come from a tokenizer
trained on them, and the log-probs are computed in float32 from logits, as an engine does. There are 48 such attempts;
each trajectory is one of them with log-probs, times and seeds of its own. Records are compressed one by one, so that
the others make none of them smaller.

Bytes are those of the trajectory as a line of JSON (`dump_trajectory`), on both sides. Ours gives whole `Trajectory`
objects, the peer what `json.loads` gives. Speeds are by CPU time, since other work may share the machine; `wall` has
the same by the clock. Prints one JSON object as its last line:

- `ours`, `peer`: MB/s read, the median over segments of 100, from our store and from plain lines (of the first five
  segments, read in turn with ours); `ratio`; `repeats`: segments
- `gzip_peer`, `write_ours`, `write_peer`: MB/s read from gzipped lines; written by us, and as lines
- `compression`, `gzip_compression`: bytes as JSON over bytes on the disk
- `random_ms`, `random_warm_ms`: CPU milliseconds for one trajectory by its id, the median, with and without reading the
  index; `random_wall_ms`: the first by the clock
- `lost`: trajectories that did not come back equal; `trajectories`, `steps`, `json_mb`, `disk_mb`

Exits 0 only where ours is at least 200 MB/s, `compression` at least 5, `random_ms` below 5 and `lost` 0.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import signal
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from deepswe.config import AgentConfig
from deepswe.envs.swe import take_turn
from deepswe.grading.tree import ROOT
from deepswe.rollout.record import dump_trajectory
from deepswe.rollout.store import TrajectoryStore
from deepswe.sandbox.base import ExecResult
from deepswe.sandbox.memory import MemorySandbox
from deepswe.tools.calls import parse_call, render_call
from deepswe.tools.catalog import TOOLS
from deepswe.tools.declare import Workspace
from deepswe.types import Ending, Graded, Step, TokenSpan, ToolCall, Trajectory

STEPS, SEGMENT, PLOTS = 30, 100, 48
LEAST_MB_S, LEAST_COMPRESSION, MOST_RANDOM_MS = 200.0, 5.0, 5.0
AGENT = AgentConfig()


class Tests(MemorySandbox):
    """Answers a command with the output of tests of its modules, one of which fails."""

    def __init__(self, files: Mapping[str, bytes], chance: random.Random) -> None:
        super().__init__(files)
        self._chance = chance

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        channel: bool = False,
        files: Mapping[str, bytes] | None = None,
    ) -> ExecResult:
        name = self._chance.choice(sorted(self.files))
        lines = self.files[name].decode("utf-8", "replace").splitlines()
        place = self._chance.randrange(len(lines) - 8)
        module, failed = Path(name).stem, self._chance.randrange(12)
        words = ["FAILED" if n == failed else "PASSED" for n in range(12)]
        rows = [f"tests/test_{module}.py::test_{n:02d} {word} [{8 * n:3d}%]" for n, word in enumerate(words)]
        trace = [f">   {line}" if n == 4 else f"    {line}" for n, line in enumerate(lines[place : place + 6])]
        end = [f"E   AssertionError: assert {place} == {failed}", "", f"{name}:{place + 4}: AssertionError"]
        total = f"=== 1 failed, 11 passed in {self._chance.random():.2f}s ==="
        return ExecResult(1, "\n".join([*rows, "", *trace, *end, total]).encode(), b"")


def modules() -> dict[str, bytes]:
    """Modules of the standard library: name -> source."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return {path.name: path.read_bytes() for path in paths if 8_000 < path.stat().st_size < 60_000}


def sentences(sources: Mapping[str, bytes]) -> list[str]:
    """Prose: the lines of docstrings and comments."""
    found = []
    for source in sources.values():
        for line in source.decode("utf-8", "replace").splitlines():
            words = line.strip().lstrip("# ")
            if words[:1].isupper() and words.endswith(".") and len(words.split()) > 6:
                found.append(words)
    return found


def calls(chance: random.Random, sources: Mapping[str, bytes]) -> Iterator[ToolCall]:
    """What an agent does at a repository: it looks around, reads, searches, edits, runs tests, reads again."""
    names = sorted(sources)
    yield ToolCall("file_editor", {"command": "view", "path": "."})
    for _ in range(STEPS - 2):
        name = chance.choice(names[:2] if chance.random() < 0.7 else names)
        lines = sources[name].decode("utf-8", "replace").splitlines()
        place = chance.randrange(len(lines) - 40)
        kind = chance.choices(("view", "search", "edit", "run"), (4, 2, 2, 3))[0]
        line = next((text for text in lines[place:] if len(text.strip()) > 12), lines[0])
        if kind == "view":
            between = f"[{place + 1}, {place + chance.choice((15, 25, 40))}]"
            yield ToolCall("file_editor", {"command": "view", "path": f"lib/{name}", "view_range": between})
        elif kind == "search":
            word = max(line.replace("(", " ").replace(".", " ").split(), key=len)
            yield ToolCall("search", {"search_term": word, "path": "lib"})
        elif kind == "edit":
            edit = {"command": "str_replace", "path": f"lib/{name}", "old_str": line, "new_str": f"{line}  # checked"}
            yield ToolCall("file_editor", edit)
        else:
            yield ToolCall("execute_bash", {"cmd": f"python -m pytest -q tests/test_{Path(name).stem}.py"})
    yield ToolCall("finish", {})


async def act(chance: random.Random, sources: Mapping[str, bytes], prose: Sequence[str]) -> list[tuple[str, str]]:
    """One attempt: (completion, observation) of every turn."""
    chosen = {name: sources[name] for name in chance.sample(sorted(sources), 4)}
    files = {f"{ROOT}/lib/{name}": source for name, source in chosen.items()}
    workspace, turns = Workspace(Tests(files, chance), ROOT), []
    for call in calls(chance, chosen):
        thought = " ".join(chance.choices(prose, k=chance.randrange(1, 4)))
        completion = f"{thought}\n{render_call(call, AGENT.format, TOOLS)}"
        outcome = await take_turn(workspace, completion, AGENT)
        turns.append((completion, outcome.observation))
    return turns


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=16_384, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def draw_logprobs(count: int, seed: int) -> list[float]:
    """Of tokens that were sampled from logits, computed in float32; most of them were all but certain."""
    rng = np.random.default_rng(seed)
    found: list[float] = []
    while len(found) < count:
        logits = rng.normal(0.0, 2.0, (4096, 512)).astype(np.float32)
        logits[:, 0] += rng.normal(18.0, 6.0, 4096).astype(np.float32)
        chosen = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
        top = logits.max(axis=1)
        total = top + np.log(np.exp(logits - top[:, None]).sum(axis=1, dtype=np.float32))
        found += map(float, logits[np.arange(4096), chosen] - total)
    return found[:count]


@dataclass(frozen=True, slots=True)
class Plot:
    """An attempt of which many are made."""

    steps: tuple[Step, ...]
    turns: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    opening: tuple[int, ...]


def make_plots(count: int, chance: random.Random) -> tuple[Plot, ...]:
    sources = modules()
    prose = sentences(sources)
    texts = [asyncio.run(act(chance, sources, prose)) for _ in range(count)]
    sample = chance.sample(sorted(sources), 30)
    tokenizer = train_tokenizer([sources[name].decode("utf-8", "replace") for name in sample])

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text).ids)

    plots = []
    for turns in texts:
        steps = tuple(Step(text, parse_call(text, AGENT.format).call, seen) for text, seen in turns)
        opening = ids("\n".join(chance.choices(prose, k=40)))
        plots.append(Plot(steps, tuple((ids(text), ids(seen)) for text, seen in turns), opening))
    return tuple(plots)


def vary(plots: Sequence[Plot], number: int, logprobs: Sequence[float]) -> Trajectory:
    """The trajectory of this number: a plot with log-probs, times and a seed of its own."""
    chance = random.Random(number)
    plot = chance.choice(plots)
    spans = [TokenSpan(plot.opening, False)]
    for sampled, seen in plot.turns:
        at = chance.randrange(len(logprobs) - len(sampled))
        spans.append(TokenSpan(sampled, True, tuple(logprobs[at : at + len(sampled)]), number // SEGMENT))
        if seen:
            spans.append(TokenSpan(seen, False))
    task, attempt = name(number)
    return Trajectory(
        task_id=task,
        attempt=attempt,
        phase="train",
        step=number // SEGMENT,
        spans=tuple(spans),
        steps=tuple(replace(s, generation_s=chance.random(), environment_s=chance.random()) for s in plot.steps),
        ending=Ending.SUBMITTED,
        grade=Graded(float(chance.random() < 0.5), {f"tests/test_lib.py::test_{n:02d}": "passed" for n in range(12)}),
        artifact="\n".join(step.observation for step in plot.steps[5:7]),
        seed=chance.getrandbits(62),
        wall_s=chance.random() * 900,
        tags={"repo": "lib", "kind": "edit"},
    )


def name(number: int) -> tuple[str, int]:
    return f"lib__{number // 8:06d}", number % 8


class Figures:
    """CPU seconds, seconds by the clock and megabytes of JSON of everything that was done, by what and segment."""

    def __init__(self) -> None:
        self._spent: dict[tuple[str, int], list[float]] = {}

    @contextmanager
    def spend(self, what: str, segment: int) -> Iterator[None]:
        begun, cpu = time.perf_counter(), time.process_time()
        yield
        row = self._spent.setdefault((what, segment), [0.0, 0.0, 0.0])
        row[0] += time.process_time() - cpu
        row[1] += time.perf_counter() - begun

    def count(self, what: str, segment: int, size: int) -> None:
        self._spent[what, segment][2] += size / 1e6

    def speeds(self, what: str, clock: int) -> list[float]:
        return [row[2] / max(row[clock], 1e-9) for (name, _), row in self._spent.items() if name == what]

    def names(self) -> set[str]:
        return {name for name, _ in self._spent}


@dataclass(slots=True)
class Job:
    """What is written and read: so many trajectories, of which the first are written by the peers, too."""

    directory: Path
    count: int
    with_peer: int
    plots: Sequence[Plot]
    logprobs: Sequence[float]
    figures: Figures
    sizes: dict[int, int]

    def write(self, segment: int) -> None:
        first, last = segment * SEGMENT, min((segment + 1) * SEGMENT, self.count)
        peer = (self.directory / f"{segment}.jsonl").open("wb") if segment < self.with_peer else None
        with TrajectoryStore(self.directory).begin("train", segment, keep=False)[0] as file:
            for number in range(first, last):
                item = vary(self.plots, number, self.logprobs)
                with self.figures.spend("write_ours", segment):
                    file.append(item)
                if peer:
                    with self.figures.spend("write_peer", segment):
                        peer.write(line := dump_trajectory(item))
                elif number % 20 == 0:
                    line = dump_trajectory(item)
                self.sizes[number] = len(line)  # of those in between: the one before
                self.figures.count("write_ours", segment, len(line))
                if peer:
                    self.figures.count("write_peer", segment, len(line))
            with self.figures.spend("write_ours", segment):
                file.commit()
        if peer:
            peer.close()

    def read(self) -> int:
        """How many trajectories do not come back as they were."""
        lost, stream = 0, TrajectoryStore(self.directory).read("train")
        for number in range(self.count):
            segment = number // SEGMENT
            with self.figures.spend("ours", segment):
                found = next(stream, None)
            self.figures.count("ours", segment, self.sizes[number])
            lost += found != vary(self.plots, number, self.logprobs)
            if segment < self.with_peer and number % SEGMENT == SEGMENT - 1:
                self.read_peers(segment)
        return lost

    def read_peers(self, segment: int) -> None:
        plain, few = self.directory / f"{segment}.jsonl", self.directory / f"{segment}.jsonl.gz"
        with plain.open("rb") as lines:
            few.write_bytes(gzip.compress(b"".join(islice(lines, 100)), 6))
        for what, path in (("peer", plain), ("gzip_peer", few)):
            size = 0
            with gzip.open(path, "rb") if path is few else path.open("rb") as file:
                with self.figures.spend(what, segment):
                    for line in file:
                        size += len(line)
                        json.loads(line)
                self.figures.count(what, segment, size)
        self.sizes[-1 - segment] = size  # of the gzipped ones
        plain.unlink()

    def look_up(self, chance: random.Random) -> dict[str, float]:
        """Median milliseconds for one trajectory by its id, in a store just opened and in one that knows the index."""
        times: dict[str, list[float]] = {"random_ms": [], "random_warm_ms": [], "random_wall_ms": []}
        known = TrajectoryStore(self.directory)
        for _ in range(100):
            number = chance.randrange(self.count)
            key = ("train", number // SEGMENT, *name(number))
            known.get(*key)
            for store, what in ((TrajectoryStore(self.directory), "random_ms"), (known, "random_warm_ms")):
                begun, cpu = time.perf_counter(), time.process_time()
                found = store.get(*key)
                times[what].append(1000 * (time.process_time() - cpu))
                if store is not known:
                    times["random_wall_ms"].append(1000 * (time.perf_counter() - begun))
                if found is None or (found.task_id, found.attempt) != name(number):
                    raise RuntimeError(f"{key} was not found")
        return {what: round(statistics.median(rows), 2) for what, rows in times.items()}


def measure(directory: Path, count: int, with_peer: int) -> dict[str, Any]:
    """Write all, read all, compare, and look some up."""
    chance = random.Random(0)
    job = Job(directory, count, with_peer, make_plots(PLOTS, chance), draw_logprobs(60_000, 0), Figures(), {})
    for segment in range(-(-count // SEGMENT)):
        job.write(segment)
    lost = job.read()
    looked_up = job.look_up(chance)
    disk = sum(path.stat().st_size for path in (directory / "trajectories").iterdir())
    gzipped = sum(path.stat().st_size for path in directory.glob("*.gz"))
    speeds = {what: job.figures.speeds(what, 0) for what in sorted(job.figures.names())}
    medians = {what: round(statistics.median(found), 1) for what, found in speeds.items()}
    return {
        "ours": medians.pop("ours"),
        "peer": medians.pop("peer"),
        "ratio": round(statistics.median(speeds["ours"]) / statistics.median(speeds["peer"]), 2),
        "repeats": len(speeds["ours"]),
        **medians,
        "wall": {what: round(statistics.median(job.figures.speeds(what, 1)), 1) for what in speeds},
        "compression": round(sum(job.sizes[number] for number in range(count)) / disk, 2),
        "gzip_compression": round(sum(size for number, size in job.sizes.items() if number < 0) / gzipped, 2),
        **looked_up,
        "lost": lost,
        "trajectories": count,
        "steps": STEPS,
        "json_mb": round(sum(job.sizes[number] for number in range(count)) / 1e6),
        "disk_mb": round(disk / 1e6),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="300 trajectories in segments of 100")
    parser.add_argument("--count", type=int, default=100_000, help="how many trajectories")
    arguments = parser.parse_args()
    count, with_peer = (300, 3) if arguments.quick else (arguments.count, 5)
    with tempfile.TemporaryDirectory(prefix="deepswe-store-") as scratch:
        row = measure(Path(scratch), count, with_peer)
    print(json.dumps(row))
    good = row["ours"] >= LEAST_MB_S and row["compression"] >= LEAST_COMPRESSION
    return 0 if good and row["random_ms"] < MOST_RANDOM_MS and not row["lost"] else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    sys.exit(main())
