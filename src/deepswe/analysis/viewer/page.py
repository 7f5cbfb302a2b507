"""The page: one HTML file with its style, its script, an index of all attempts, and the attempts in compressed chunks.

Nothing that a record holds is ever markup here. The index and the chunks are base64 of compressed JSON in elements
that are not executed; the script puts text into the page as text. The content security policy admits the one script by
its hash, and no address at all (a served page: only the server that it came from).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from deepswe.analysis.behaviour_run import gold_patches, tasks_of_run
from deepswe.analysis.charts import draw_before_after, draw_panel
from deepswe.analysis.harmless import harmless
from deepswe.analysis.panels import Panel, run_panels, run_warnings
from deepswe.analysis.record import RunRecord, read_run
from deepswe.analysis.viewer.data import Book, Ratios, pack_index, read_book
from deepswe.analysis.viewer.tokenizer import decoder_of
from deepswe.analysis.viewer.training import algorithm_of
from deepswe.atomic import write_atomically
from deepswe.errors import RunError
from deepswe.rollout.store import TrajectoryStore
from deepswe.types import Ending

SCRIPTS = ("store.js", "text.js", "lists.js", "attempt.js", "tokens.js", "app.js")
"""Parts of the script, in order."""


def write_viewer(
    directory: Path,
    out: Path | None = None,
    *,
    gold: str = "auto",
    tokenizer: Path | None = None,
    tokens: bool = True,
    ratios: Ratios | None = None,
) -> Path:
    """Write the viewer of a run, which may still be going on, as one file.

    Args:
        directory: the run.
        out: the file; None is viewer.html in the run.
        gold: where gold patches and issues come from; see `tasks_of_run`.
        tokenizer: a tokenizer.json, or a directory that holds one; None takes the run's newest checkpoint's.
        tokens: keep the token streams; without them the file is a good deal smaller.
        ratios: gives the ratio of each sampled token; see `deepswe.analysis.viewer.ratios`.

    Returns:
        The path of the file.

    Raises:
        RunError: there is no such run, nothing is recorded yet, or the file cannot be written.
        StoreError: a trajectory cannot be read.
    """
    run = read_run(directory)
    book = open_book(run, gold=gold, tokenizer=tokenizer, tokens=tokens, ratios=ratios)
    path = out or directory / "viewer.html"
    try:
        write_atomically(path, b"".join(render_page(run, book, served=False)))
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error
    return path


def open_book(
    run: RunRecord,
    *,
    gold: str = "auto",
    tokenizer: Path | None = None,
    tokens: bool = True,
    ratios: Ratios | None = None,
) -> Book:
    """All attempts of a run, read and compressed; arguments as of `write_viewer`.

    Raises:
        RunError: nothing is recorded yet.
    """
    tasks = tasks_of_run(run, gold)
    book = read_book(
        TrajectoryStore(run.directory),
        algorithm=algorithm_of(run),
        decode=decoder_of(run, tokenizer),
        gold=gold_patches(tasks),
        issues={task.id: task.problem_statement for task in tasks.tasks} if tasks else {},
        tokens=tokens,
        ratios=ratios,
    )
    if not book.tasks:
        raise RunError(f"{run.directory} has no recorded attempts yet; wait for the first batch")
    return book


def render_page(run: RunRecord, book: Book, *, served: bool) -> Iterator[bytes]:
    """The page in pieces: what is seen first comes first, the chunks come last.

    Args:
        served: the chunks are fetched from the server, and are not in the page.
    """
    script = "\n".join(_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_finalize)
    page = environment.from_string(_asset("viewer.html.j2")).render(
        run=run,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'; "
        f"connect-src '{'self' if served else 'none'}'; base-uri 'none'; form-action 'none'",
        style=Markup(_asset("viewer.css")),  # ours
        script=Markup(script),  # ours
        overview=_overview(run, book),
        index=base64.b64encode(pack_index(book)).decode("ascii"),
        chunks=len(book.chunks),
        served=served,
    )
    head, mark, tail = page.partition("<!--chunks-->")
    yield head.encode("utf-8")
    if not served:
        for number, data in enumerate(book.chunks):
            yield b'<script type="text/plain" id="chunk-%d">%s</script>\n' % (number, base64.b64encode(data))
    yield (mark + tail).encode("utf-8")


def _asset(name: str) -> str:
    return resources.files("deepswe.analysis.viewer").joinpath(name).read_text(encoding="utf-8")


def _finalize(value: Any) -> Any:
    return harmless(value) if type(value) is str else value


def _overview(run: RunRecord, book: Book) -> dict[str, Any]:
    columns = book.columns
    phases: dict[str, dict[str, Any]] = {}
    for phase, ending, reward in zip(columns["phase"], columns["ending"], columns["reward"], strict=True):
        line = phases.setdefault(phase, {"attempts": 0, "solved": 0, "graded": 0, "endings": dict.fromkeys(Ending, 0)})
        line["attempts"] += 1
        line["graded"] += reward is not None
        line["solved"] += reward is not None and reward >= 1.0
        line["endings"][Ending(ending)] += 1
    shown = [ending for ending in Ending if any(line["endings"][ending] for line in phases.values())]
    return {
        "panels": [_drawn(panel) for panel in run_panels(run)],
        "warnings": run_warnings(run),
        "lift": _lift(run),
        "phases": phases,
        "endings": shown,
        "attempts": len(columns["phase"]),
        "tasks": len(book.tasks),
        "tokens": sum(columns["tokens"]),
        "solved": sum(line["solved"] for line in phases.values()),
    }


def _drawn(panel: Panel) -> dict[str, Any]:
    return {"panel": panel, "svg": draw_panel(panel), "legend": len(panel.series) > 1}


def _lift(run: RunRecord) -> Markup | None:
    """pass@1 before and after as the run's own rows have it."""
    rows: dict[str, dict[str, tuple[float, float, float]]] = {}
    for row in run.of_kind("evaluation"):
        values = tuple(row.get(key) for key in ("pass_at_1", "low", "high"))
        if all(isinstance(value, int | float) for value in values):
            rows.setdefault(str(row.get("split", "")), {})[str(row.get("name", ""))] = values  # type: ignore[assignment]
    both = [
        (split, found["before"], found["after"]) for split, found in rows.items() if {"before", "after"} <= found.keys()
    ]
    return draw_before_after(both) if both else None
