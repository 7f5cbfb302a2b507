"""Which fault a request meets: a function of what it says and of how often it was said, so that runs compare."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

FAULTS = ("busy", "failed", "slow", "malformed", "reset", "cut", "event")
"""Each ends the first try of a request; the second try of the same request goes well."""
LIES = ("none", "zero", "huge", "text")
"""Wrong usage of an answer that is otherwise good."""


class Faults:
    """Args: share: of requests whose first try fails; lies: of answers with wrong counts."""

    def __init__(self, share: float = 0.0, lies: float = 0.0, only: str = "") -> None:
        self.share, self.lies, self.only = share, lies, only
        self.met: Counter[str] = Counter()
        self._tries: Counter[str] = Counter()

    def of(self, body: Mapping[str, Any]) -> str:
        """The fault of this try, "" for none."""
        key = digest(body)
        self._tries[key] += 1
        if self._tries[key] > 1 or int(key[:8], 16) / 16**8 >= self.share:
            return ""
        fault = self.only or FAULTS[int(key[8:12], 16) % len(FAULTS)]
        self.met[fault] += 1
        return fault

    def lie(self, body: Mapping[str, Any]) -> str:
        """How the usage of the answer is wrong, "" if it is right."""
        key = digest(body)
        if int(key[12:20], 16) / 16**8 >= self.lies:
            return ""
        lie = LIES[int(key[20:24], 16) % len(LIES)]
        self.met[f"usage {lie}"] += 1
        return lie


def digest(body: Mapping[str, Any]) -> str:
    """Of what the request says: its messages and its seed."""
    said = json.dumps([body["messages"], body.get("seed", 0)], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()
