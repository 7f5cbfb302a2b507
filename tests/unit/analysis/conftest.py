"""Fixtures of a recorded run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from run_records import attempt, write_run

from deepswe.types import Trajectory


@pytest.fixture
def learned_run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "quickstart")


@pytest.fixture
def new_attempt() -> Callable[..., Trajectory]:
    return attempt
