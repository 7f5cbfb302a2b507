"""Micro tasks that were made once: a set of thousands costs seconds, and is read back in half of one.

A set lies in the layer cache under a key of its settings, of the code that made it and of the version of Python, so
one that would come out another way is made anew. The file carries its own hash; one that was changed is made anew too.
"""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path

from deepswe.config import MicroTasks
from deepswe.errors import BuildError, StoreError
from deepswe.progress import Progress
from deepswe.tasks.layers import LayerCache, layer_key
from deepswe.tasks.synth.micro.making import micro_task_set
from deepswe.tasks.task import TaskSet
from deepswe.tasks.taskset import load_task_set, save_task_set

FILE = "tasks.jsonl"
WORTH_KEEPING = 100
"""Smaller sets are made each time, which takes no second."""


def kept_micro_task_set(config: MicroTasks, layers: LayerCache, progress: Progress) -> TaskSet:
    """What `micro_task_set` makes, out of the cache where it was made before; a cache that cannot be used is passed by.

    Args:
        config: the settings.
        layers: the cache.
        progress: told of what is made.
    """
    if config.train + config.heldout + config.unseen < WORTH_KEEPING:
        return micro_task_set(config, progress)
    made: list[TaskSet] = []

    def build(directory: Path) -> None:
        made.append(micro_task_set(config, progress))
        save_task_set(made[0], directory / FILE)

    key = micro_key(config)
    while True:
        try:
            place = layers.build(key, build)
        except BuildError:
            return made[0] if made else micro_task_set(config, progress)
        if made:
            return made[0]
        try:
            return load_task_set(place / FILE)
        except StoreError:
            layers.remove(key)


def micro_key(config: MicroTasks) -> str:
    """The name under which the set of these settings is kept."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return layer_key("micro", {"settings": config.model_dump(mode="json"), "code": _code(), "python": python})


@cache
def _code() -> str:
    """A hash of the modules that make micro tasks."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
