"""Libraries that only some jobs need: imported when first used, and named with their extra when they are not there."""

from __future__ import annotations

import importlib
from typing import Any

from deepswe.errors import ConfigError


def optional_module(name: str, extra: str, purpose: str) -> Any:
    """The module of that name.

    Args:
        name: dotted, such as "pyarrow.parquet".
        extra: the extra of this package that installs it.
        purpose: what it is for, to end the sentence "... is needed to".

    Raises:
        ConfigError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f'{package} is needed to {purpose} and cannot be imported ({error}); pip install "deepswe[{extra}]"'
        ) from error
