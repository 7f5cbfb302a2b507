"""What goes wrong, how often: each number is the share of requests, pods or sessions that it befalls."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields


@dataclass
class Faults:
    """Of requests: http_429, http_500, http_503, reset (half of them after the request was carried out).
    Of watches, per second: watch_410, watch_reset. Of pods: the rest up to `config_error`. Of sessions: exec_drop
    (cut at some moment), exec_lost (a piece of output lost without a word), exec_refused (500)."""

    http_429: float = 0.0
    http_500: float = 0.0
    http_503: float = 0.0
    reset: float = 0.0
    watch_410: float = 0.0
    watch_reset: float = 0.0
    evict: float = 0.0
    out_of_memory: float = 0.0
    image_pull: float = 0.0
    unschedulable: float = 0.0
    node_lost: float = 0.0
    config_error: float = 0.0
    deleted: float = 0.0
    slow_start: float = 0.0
    exec_drop: float = 0.0
    exec_lost: float = 0.0
    exec_refused: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.counts: dict[str, int] = {}

    def strikes(self, kind: str) -> bool:
        """Whether this fault happens now; counted if it does."""
        rate = getattr(self, kind)
        if rate > 0 and self.random.random() < rate:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            return True
        return False

    def first_of(self, *kinds: str) -> str:
        """The first fault that happens, or nothing."""
        return next((kind for kind in kinds if self.strikes(kind)), "")


KINDS = tuple(item.name for item in fields(Faults) if item.name != "seed")
