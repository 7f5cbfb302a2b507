"""What all pictures share: their colours, plain axes, and how they are written."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deepswe.atomic import write_atomically
from deepswe.errors import RunError

INK, QUIET, PALE = "#1f2933", "#52606d", "#d9dee3"
COLOURS = ("#1f6f8b", "#c8553d", "#588157", "#8e6c8a", "#b08900", "#6b7280")


def plain_axes(axes: Axes, title: str, grid: Literal["x", "y"]) -> None:
    """A title at the left, pale lines of one direction behind what is drawn, and no frame above and at the right."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.grid(axis=grid, color=PALE, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def write_figure(figure: Figure, path: Path, *, dpi: int = 130) -> Path:
    """Write a picture as PNG, atomically; its path.

    Raises:
        RunError: it cannot be written.
    """
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    try:
        write_atomically(path, picture.getvalue())
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error
    return path
