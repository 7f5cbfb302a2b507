"""What holds for every test of the project."""

from __future__ import annotations

import pytest


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Bytes never name a test: an archive holds the time at which it was packed, and each worker packs its own."""
    return argname if isinstance(val, bytes) else None
