"""Names and constants of micro repositories, and which of them training may use.

Three rules divide what training sees from what is held out; each is a fixed function of the value, not of the seed:

- a function's name joins two of `WORDS`; held-out splits use only pairs that training never joins in that order
  (`is_heldout_pair`), so that each sub-word is known and each whole name is new;
- a parameter's name, and a module's, is one word; held-out splits use only words that training uses for neither
  (`HELDOUT_WORDS`; training meets them only inside the names of functions);
- a constant of the right code, 2 or more, is held out when it leaves 3 modulo 4 (`is_heldout_constant`). Zero, one
  and minus one belong to the structure of a function and occur everywhere; the wrong constant of an off-by-one bug is
  a neighbour of the right one.
"""

from __future__ import annotations

from random import Random

WORDS = (
    *("amber", "apple", "arrow", "badge", "basin", "berry", "block", "board", "brick", "brush", "cabin", "cable"),
    *("candle", "cargo", "chain", "chalk", "cloud", "coral", "crate", "crown", "daisy", "delta", "drift", "eagle"),
    *("ember", "fable", "ferry", "field", "flame", "flint", "frost", "fruit", "glass", "globe", "grain", "grape"),
    *("hazel", "honey", "house", "ivory", "jelly", "juice", "knot", "lemon", "light", "linen", "maple", "marsh"),
    *("medal", "melon", "metal", "motor", "ocean", "olive", "onion", "orbit", "panel", "paper", "pearl", "pilot"),
    *("plant", "plum", "pond", "quill", "radio", "river", "robin", "salad", "shell", "spice", "storm", "tiger"),
)
"""Sub-words of every name; none is a keyword, a builtin or a word of an issue text or a docstring."""

TRAINING_WORDS = tuple(word for index, word in enumerate(WORDS) if index % 3)
HELDOUT_WORDS = tuple(word for index, word in enumerate(WORDS) if index % 3 == 0)
LARGEST_CONSTANT = 50


def is_heldout_pair(first: str, second: str) -> bool:
    """Whether the compound name `first_second` is kept from training; a fifth of all pairs is."""
    return (2 * WORDS.index(first) + WORDS.index(second)) % 5 == 0


def is_heldout_constant(value: int) -> bool:
    """Whether the constant is kept from training."""
    return value > 1 and value % 4 == 3


class Namer:
    """Draws names and constants for one repository, each name at most once."""

    def __init__(self, random: Random, *, heldout: bool) -> None:
        self._random = random
        self._heldout = heldout
        self._words = HELDOUT_WORDS if heldout else TRAINING_WORDS
        self._used: set[str] = set()

    def function(self) -> str:
        """A new function name, such as "amber_river"."""
        while True:
            first, second = self._random.sample(WORDS, 2)
            name = f"{first}_{second}"
            if is_heldout_pair(first, second) is self._heldout and name not in self._used:
                self._used.add(name)
                return name

    def module(self) -> str:
        """A new module name, such as "amber"."""
        name = self._random.choice([word for word in self._words if word not in self._used])
        self._used.add(name)
        return name

    def parameters(self, count: int) -> list[str]:
        """That many different parameter names."""
        return self._random.sample(self._words, count)

    def constants(self, count: int) -> list[int]:
        """That many different constants of at least 2."""
        values = [v for v in range(2, LARGEST_CONSTANT) if is_heldout_constant(v) is self._heldout]
        small = [v for v in values if v < 10]
        drawn: list[int] = []
        while len(drawn) < count:
            value = self._random.choice(small if self._random.random() < 0.5 else values)
            if value not in drawn:
                drawn.append(value)
        return drawn
