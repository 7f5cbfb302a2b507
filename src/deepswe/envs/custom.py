"""A suite of the user's own: found by `module:attribute`, or by the name of an entry point."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from deepswe.config import CustomTasks
from deepswe.envs.base import Suite
from deepswe.errors import ConfigError, EnvironmentFault, boundary

ENTRY_POINTS = "deepswe.suites"
"""The group in which a package may register suites."""
METHODS = ("split", "open", "rehearse", "corpus", "reference", "tools", "describe")


def load_suite(config: CustomTasks) -> Suite:
    """Import what the recipe names, and call it with the recipe's options.

    Raises:
        ConfigError: it cannot be imported, is not there, or what it gives is no suite; names the missing methods.
        EnvironmentFault: the call failed.
    """
    made = _find(config.suite)
    with boundary(f"tasks.suite {config.suite}", EnvironmentFault):
        suite = made(**config.options)
    missing = [name for name in METHODS if not callable(getattr(suite, name, None))]
    if missing:
        raise ConfigError(
            f"tasks.suite {config.suite!r} gives no suite: it has no {', '.join(missing)}; inherit from Suite"
        )
    found: Suite = suite
    return found


def _find(name: str) -> Any:
    module, separator, attribute = name.partition(":")
    if not separator:
        registered = {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}
        if name not in registered:
            known = ", ".join(sorted(registered)) or "none"
            raise ConfigError(
                f"tasks.suite {name!r} is no entry point of {ENTRY_POINTS} (there: {known}); give module:attribute"
            )
        module, _, attribute = registered[name].value.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"tasks.suite {name!r}: {module} cannot be imported ({error}); put its folder on PYTHONPATH"
        ) from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise ConfigError(f"tasks.suite {name!r}: {module} has no {attribute}")
    return found
