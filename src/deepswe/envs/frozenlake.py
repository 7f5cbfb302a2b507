"""FrozenLake: cross a frozen lake to the goal without falling into a hole. Small, offline, learnable from nothing.

A map has frozen cells, holes, one start and one goal. Each turn the model names one of Left, Down, Right, Up; a step
into the edge stays in place, a step into a hole ends the attempt with reward 0, the goal ends it with reward 1.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, overload

from deepswe.config import FrozenLakeTasks
from deepswe.envs.base import Outcome, Verdict
from deepswe.errors import EnvironmentFault, TaskError
from deepswe.types import Graded, Message, ToolCall

Cell = tuple[int, int]
"""(row, column), from the top left."""

MOVES: Mapping[str, Cell] = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
"""Action -> change of (row, column), in the order of the original puzzle."""

HELDOUT_BYTE = 32
"""A layout is held out when the first byte of its hash is below this (one in eight), else it is for training."""

_ACTION = re.compile(r"\b(left|down|right|up)\b", re.IGNORECASE)
_LETTERS: Mapping[str, str] = {move[0]: move for move in MOVES}
_TRIES = 100_000

SIGHTS = 4096
"""The attempts of a group come to the same cells: of so many (map, cell), those seen last, what is seen is kept."""

RULES = """You are P on a frozen lake. Reach the goal G without stepping on a hole O; cells marked _ are safe.
Each turn answer with one move: Left, Down, Right or Up. A move into the edge leaves you where you are.
"""
HINT = "Answer with one move: Left, Down, Right or Up.\n"
SLIPPERY_RULE = "The ice is slippery: one move in three goes where you want, the others to either side of it.\n"


@dataclass(frozen=True, slots=True)
class LakeTask:
    """One map.

    Attributes:
        id: unique in its suite.
        split: "train" or "heldout".
        rows: one text a row: S start, F frozen, H hole, G goal. Square.
        distance: moves on a shortest path from S to G.
    """

    id: str
    split: str
    rows: tuple[str, ...]
    distance: int

    @property
    def start(self) -> Cell:
        """The cell of S."""
        return _find(self.rows, "S")

    @property
    def goal(self) -> Cell:
        """The cell of G."""
        return _find(self.rows, "G")


def shortest_path(rows: Sequence[str], start: Cell) -> list[str] | None:
    """The moves of a shortest path from `start` to G that steps on no hole, or None if there is none."""
    came: dict[Cell, tuple[Cell, str]] = {}
    queue, seen = deque([start]), {start}
    while queue:
        cell = queue.popleft()
        if rows[cell[0]][cell[1]] == "G":
            return _walk_back(came, start, cell)
        for move in MOVES:
            reached = _step(rows, cell, move)
            if reached not in seen and rows[reached[0]][reached[1]] != "H":
                seen.add(reached)
                came[reached] = (cell, move)
                queue.append(reached)
    return None


def draw_map(rng: random.Random, config: FrozenLakeTasks) -> tuple[tuple[str, ...], int]:
    """Draw one map that can be solved in `solvable_within` moves.

    Returns:
        The rows and the length of a shortest path.

    Raises:
        TaskError: no such map came up; the settings leave hardly any.
    """
    for _ in range(_TRIES):
        size = rng.randint(config.min_size, config.max_size)
        frozen = rng.uniform(config.min_frozen, config.max_frozen)
        cells = ["F" if rng.random() < frozen else "H" for _ in range(size * size)]
        start, goal = rng.sample(range(size * size), 2)
        cells[start], cells[goal] = "S", "G"
        rows = tuple("".join(cells[size * row : size * (row + 1)]) for row in range(size))
        path = shortest_path(rows, divmod(start, size))
        if path is not None and len(path) <= config.solvable_within:
            return rows, len(path)
    raise TaskError(
        f"{_TRIES} maps drawn and none solvable in {config.solvable_within} moves (sizes {config.min_size} to "
        f"{config.max_size}, frozen {config.min_frozen} to {config.max_frozen}); raise tasks.solvable_within or "
        "tasks.min_frozen"
    )


def read_move(completion: str) -> str | None:
    """The last move that a completion names, in any case, or the move whose first letter is all of it, or None."""
    named = _ACTION.findall(completion)
    if named:
        return str(named[-1]).capitalize()
    return _LETTERS.get(completion.strip().upper())


class FrozenLakeEnv:
    """One attempt at one map. Needs no sandbox: there is no code to run."""

    def __init__(self, task: LakeTask, config: FrozenLakeTasks, *, seed: int) -> None:
        """Args:
        task: the map.
        config: says how it is seen and whether it is slippery.
        seed: seeds the slips.
        """
        self._task = task
        self._config = config
        self._slips = _draw_slips(seed)
        self._position = task.start
        self._path: list[str] = []
        self._gave_up = False

    async def start(self) -> Sequence[Message]:
        """One message from the user."""
        return [Message("user", self.opening())]

    def opening(self) -> str:
        """The rules and the map; the observation alone if it is relational, for a model that learns the rules."""
        if self._config.observation == "relational":
            return self.observe()
        return RULES + (SLIPPERY_RULE if self._config.slippery else "") + self.observe()

    def observe(self, *, hint: bool = False) -> str:
        """What the model is shown; `hint` says first how to answer, except in a relational observation."""
        if self._config.observation == "relational":
            return relational(self._task, self._position)
        return (HINT if hint else "") + grid(self._task, self._position)

    async def act(self, completion: str, *, timeout_s: float) -> Outcome:
        """Carry out the last move that the completion names; with none, say what to answer or end, as configured.

        A completion that is nothing but the first letter of a move names it too.
        """
        if self._cell() in "GH" or self._gave_up:
            raise EnvironmentFault(f"{self._task.id} is over; open a new environment for a new attempt")
        move = read_move(completion)
        if move is None:
            self._gave_up = self._config.no_move == "end"
            return Outcome(self.observe(hint=True), done=self._gave_up, error="no_move")
        self._path.append(move)
        self._position = _step(self._task.rows, self._position, self._slip(move))
        call = ToolCall("move", {"direction": move})
        if self._cell() in "GH":
            return Outcome("", done=True, call=call)
        return Outcome(self.observe(), call=call)

    async def finish(self) -> Verdict:
        """Reward 1 on the goal, else 0; the artifact lists the moves."""
        cell = self._cell()
        stopped = "named no move" if self._gave_up else "did not reach the goal"
        reason = {"G": "", "H": "fell into a hole"}.get(cell, stopped)
        return Verdict(Graded(float(cell == "G"), reason=reason), " ".join(self._path))

    async def close(self) -> None:
        """Nothing is held."""

    def _cell(self) -> str:
        return self._task.rows[self._position[0]][self._position[1]]

    def _slip(self, move: str) -> str:
        if not self._config.slippery:
            return move
        names = list(MOVES)
        return names[(names.index(move) + next(self._slips)) % len(names)]


def _draw_slips(seed: int) -> Iterator[int]:
    """To which side a move goes, again and again; nothing is seeded before the first."""
    rng = random.Random(seed)
    while True:
        yield rng.choice((-1, 0, 1))


@functools.lru_cache(maxsize=SIGHTS)
def grid(task: LakeTask, position: Cell) -> str:
    """The map as text: P player, _ frozen (the start too), O hole, G goal; cells apart by a space."""
    glyphs = {"S": "_", "F": "_", "H": "O", "G": "G"}
    lines = [[glyphs[cell] for cell in row] for row in task.rows]
    lines[position[0]][position[1]] = "P"
    return "\n".join(" ".join(line) for line in lines)


@functools.lru_cache(maxsize=SIGHTS)
def relational(task: LakeTask, position: Cell) -> str:
    """What P sees from where it stands, in few tokens: `hole 2 goal wall Down 0 Right 3`.

    First, looking Left, Down, Right and Up: "goal" if only ice lies before it, else the number of cells that P could
    walk, or what stands in the way at once ("wall" or "hole"). Then how far away the goal is.
    """
    sights = " ".join(_look(task.rows, position, move) for move in MOVES)
    down, right = task.goal[0] - position[0], task.goal[1] - position[1]
    return f"{sights} {'Up' if down < 0 else 'Down'} {abs(down)} {'Left' if right < 0 else 'Right'} {abs(right)}"


def _look(rows: Sequence[str], cell: Cell, move: str) -> str:
    walked = 0
    while (reached := _step(rows, cell, move)) != cell:
        glyph = rows[reached[0]][reached[1]]
        if glyph == "G":
            return "goal"
        if glyph == "H":
            return str(walked) if walked else "hole"
        walked, cell = walked + 1, reached
    return str(walked) if walked else "wall"


class FrozenLakeSuite:
    """Seeded maps; a layout's hash says whether it is held out, so no held-out map is ever trained on."""

    def __init__(self, config: FrozenLakeTasks) -> None:
        self._config = config
        self._splits: Mapping[str, Sequence[LakeTask]] = {
            "train": _TrainingMaps(config),
            "heldout": _draw_heldout(config),
        }

    def split(self, name: str) -> Sequence[LakeTask]:
        """The maps of "train" or "heldout", drawn as they are asked for; empty for any other name."""
        return self._splits.get(name, ())

    def open(self, task: LakeTask, *, seed: int) -> FrozenLakeEnv:
        """A new attempt."""
        return FrozenLakeEnv(task, self._config, seed=seed)

    def rehearse(self, task: LakeTask, *, seed: int) -> FrozenLakeEnv:
        """The same as `open`, which costs nothing here."""
        return self.open(task, seed=seed)

    def corpus(self) -> Iterator[str]:
        """What is said on 200 training maps: the opening, the answer to no move, and the moves as they may be written.

        A tokenizer trained on it has one token for each spelling of a move, so that a policy with random weights now
        and then names one.
        """
        for task in self.split("train")[:200]:
            env = self.open(task, seed=0)
            yield env.opening()
            yield env.observe(hint=True)
            for move in MOVES:
                yield from (f"{space}{word}" for space in ("", " ") for word in (move, move.lower(), move.upper()))

    def reference(self, task: LakeTask, *, seed: int) -> Iterator[str] | None:
        """The moves of a shortest path; None on slippery ice, where no fixed path is a solution."""
        return None if self._config.slippery else iter(shortest_path(task.rows, task.start) or ())

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """None: a move is a word."""
        return ()

    def describe(self, task: LakeTask) -> Mapping[str, str]:
        """Grouped by size of the map and by distance of the goal."""
        return {"repo": f"size {len(task.rows)}", "kind": f"distance {task.distance}"}


class _TrainingMaps(Sequence[LakeTask]):
    """Each map is drawn from (seed, index) when it is first asked for. Small layouts come up more than once."""

    def __init__(self, config: FrozenLakeTasks) -> None:
        self._config = config
        self._drawn: dict[int, LakeTask] = {}

    def __len__(self) -> int:
        return self._config.train

    @overload
    def __getitem__(self, index: int) -> LakeTask: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[LakeTask]: ...

    def __getitem__(self, index: int | slice) -> LakeTask | Sequence[LakeTask]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        if number not in self._drawn:
            rng = random.Random(f"{self._config.seed}/train/{number}")
            self._drawn[number] = _draw_task(rng, self._config, "train", number, seen=frozenset())
        return self._drawn[number]


def _draw_heldout(config: FrozenLakeTasks) -> tuple[LakeTask, ...]:
    """All held-out maps, no layout twice."""
    rng = random.Random(f"{config.seed}/heldout")
    seen: set[tuple[str, ...]] = set()
    tasks: list[LakeTask] = []
    for number in range(config.heldout):
        tasks.append(_draw_task(rng, config, "heldout", number, seen=seen))
        seen.add(tasks[-1].rows)
    return tuple(tasks)


def _draw_task(
    rng: random.Random, config: FrozenLakeTasks, split: str, number: int, *, seen: Set[tuple[str, ...]]
) -> LakeTask:
    for _ in range(_TRIES):
        rows, distance = draw_map(rng, config)
        if rows not in seen and is_heldout(rows) == (split == "heldout"):
            return LakeTask(f"frozenlake-{split}-{number}", split, rows, distance)
    raise TaskError(
        f"only {len(seen)} different {split} maps of sizes {config.min_size} to {config.max_size} came up in {_TRIES} "
        f"draws; raise tasks.max_size or lower tasks.{split}"
    )


def is_heldout(rows: Sequence[str]) -> bool:
    """Whether a layout is for evaluation only: decided by its hash alone, so no setting can move it into training."""
    return hashlib.sha256("/".join(rows).encode()).digest()[0] < HELDOUT_BYTE


def _find(rows: Sequence[str], glyph: str) -> Cell:
    return next((row, text.index(glyph)) for row, text in enumerate(rows) if glyph in text)


def _step(rows: Sequence[str], cell: Cell, move: str) -> Cell:
    down, right = MOVES[move]
    row, column = cell[0] + down, cell[1] + right
    return (row, column) if 0 <= row < len(rows) and 0 <= column < len(rows) else cell


def _walk_back(came: Mapping[Cell, tuple[Cell, str]], start: Cell, cell: Cell) -> list[str]:
    moves: list[str] = []
    while cell != start:
        cell, move = came[cell]
        moves.append(move)
    return moves[::-1]
