"""Names and constants of micro repositories, and which of them training may use.

Two rules divide what training sees from what is held out; each is a fixed function of the value, not of the seed:

- a function's name joins two of `WORDS`; held-out splits use only pairs that training never joins in that order
  (`is_heldout_pair`), so that each sub-word is known and each whole name is new;
- a constant of the right code, 2 or more, is held out when it leaves 3 modulo 4 (`is_heldout_constant`). Zero, one
  and minus one belong to the structure of a function and occur everywhere; the wrong constant of an off-by-one bug is
  a neighbour of the right one.

The single words that name parameters and modules are the same in all splits.
"""

from __future__ import annotations

from random import Random

WORDS = (
    *("amber", "apple", "arrow", "badge", "berry", "block", "board", "brick", "brush", "cabin", "cable", "candle"),
    *("chain", "cloud", "coral", "crate", "crown", "daisy", "delta", "eagle", "ember", "ferry", "field", "flame"),
    *("frost", "fruit", "glass", "globe", "grain", "honey", "house", "ivory", "lemon", "light", "maple", "medal"),
    *("melon", "ocean", "olive", "onion", "orbit", "panel", "paper", "pearl", "pilot", "plant", "river", "storm"),
)
"""Sub-words of every name; none is a keyword, a builtin or a word of an issue text or a docstring."""

_PLACES = {word: place for place, word in enumerate(WORDS)}

LARGEST_CONSTANT = 50


def is_heldout_pair(first: str, second: str) -> bool:
    """Whether the compound name `first_second` is kept from training; a fifth of all pairs is."""
    return (2 * _PLACES[first] + _PLACES[second]) % 5 == 0


def is_heldout_constant(value: int) -> bool:
    """Whether the constant is kept from training."""
    return value > 1 and value % 4 == 3


_CONSTANTS = {
    heldout: tuple(value for value in range(2, LARGEST_CONSTANT) if is_heldout_constant(value) is heldout)
    for heldout in (False, True)
}


class Namer:
    """Draws names and constants for one repository, each name at most once."""

    def __init__(self, random: Random, *, heldout: bool) -> None:
        self._random = random
        self._heldout = heldout
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
        """A new module name, such as "amber"; no part of a name drawn before."""
        parts = {part for name in self._used for part in name.split("_")}
        name = self._random.choice([word for word in WORDS if word not in parts])
        self._used.add(name)
        return name

    def parameters(self, count: int) -> list[str]:
        """That many different parameter names."""
        return self._random.sample(WORDS, count)

    def constants(self, count: int) -> list[int]:
        """That many different constants of at least 2."""
        return self._random.sample(_CONSTANTS[self._heldout], count)
