"""The viewer in a headless browser: how soon it opens, how it scrolls, whether it is accessible and harmless.

Records a run of 2,000 attempts (12 to 28 turns, some 4,000 tokens each) through the real store, two of them hostile;
writes the viewer as one file; opens it from disk in headless Chromium. The last line printed is one JSON object:

    trajectories      how many
    size_mib          of the file; write_s: seconds of writing it
    open_s            seconds from the address to a page that answers, the slowest of three fresh browser profiles
    attempt_s         seconds from one attempt to another that lies in a chunk not yet read, the slowest of five
    fps               frames a second while the list of all attempts scrolls; fps_attempt: a long conversation
    axe_violations    of axe-core, over every view, light and dark
    escaped           the hostile attempts are text: no script ran, nothing was asked for, all of it is shown

Exit code 0 if open_s < 2, fps > 30, axe_violations is 0 and escaped is true. Needs the package `playwright`, Chromium
(CHROMIUM names it; otherwise that on the path, or Playwright's own) and axe-core (AXE_CORE names axe.min.js; otherwise
it is installed with npm into a temporary directory). `--quick` takes 200 attempts. `--directory` keeps the run and its
page there, and takes up what an earlier call left.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepswe.analysis.harmless import harmless
from deepswe.analysis.viewer.page import write_viewer
from deepswe.rollout.store import TrajectoryStore
from deepswe.types import Ending, Graded, Step, TokenSpan, ToolCall, Trajectory

AXE = "axe-core@4.11"
HOSTILE = (
    "</script></pre><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>\" onmouseover='window.pwned=1' "
    "{{ 7*7 }} ${window.pwned=1} \x1b[31mred\x1b[0m\x1b]0;title\x07 \x00 \u202egnp.exe\u202c \u2066x\u2069 "
    "\u200b\ufeff \ud800 \udfff \u2028 https://example.invalid/x.js"
)
LONG_LINE = "A" * 1_000_000
WORDS = ("return", "value", "list", "the", "for", "empty", "index", "key", "None", "self", "tests", "path", "module")
DIFF = """diff --git a/cart.py b/cart.py
--- a/cart.py
+++ b/cart.py
@@ -1,2 +1,2 @@
 def total(prices):
-    return 0
+    return sum(prices)
"""


def prose(rng: random.Random, words: int) -> str:
    """Some words, with line ends."""
    return " ".join(rng.choice(WORDS) + ("\n" if rng.random() < 0.1 else "") for _ in range(words))


def make_turns(rng: random.Random, count: int) -> list[Step]:
    """A search, views, a reproduction, edits and tests, and the end."""
    turns = [
        Step("Look first.\n", ToolCall("search", {"search_term": "def total"}), "cart.py (1 match)\n3\tdef total(")
    ]
    for number in range(count - 2):
        call = (
            ToolCall("file_editor", {"command": "view", "path": f"pkg/module_{number}.py"}),
            ToolCall("execute_bash", {"cmd": f'python -c "import pkg; print(pkg.total({number}))"'}),
            ToolCall(
                "file_editor", {"command": "str_replace", "path": "cart.py", "old_str": "a", "new_str": f"b{number}"}
            ),
            ToolCall("execute_bash", {"cmd": f"python -m pytest -q tests/test_{number}.py"}),
        )[rng.randrange(4)]
        turns.append(Step(prose(rng, 40), call, prose(rng, rng.randrange(20, 260)), "", 1.5, 0.2))
    return [*turns, Step("Done.", ToolCall("finish", {"command": "submit"}), "")]


def make_trajectory(number: int, rng: random.Random) -> Trajectory:
    turns = make_turns(rng, rng.randrange(12, 29))
    spans = [TokenSpan(tuple(rng.randrange(150_000) for _ in range(700)), False)]
    for _ in turns:
        sampled = rng.randrange(30, 90)
        spans.append(
            TokenSpan(
                tuple(rng.choices(range(150_000), k=sampled)), True, tuple(-rng.random() for _ in range(sampled)), 3
            )
        )
        spans.append(TokenSpan(tuple(rng.choices(range(150_000), k=120)), False))
    return Trajectory(
        task_id=f"task-{number // 8:04d}", attempt=number % 8, phase="train", step=number // 512, spans=tuple(spans),
        steps=tuple(turns), ending=Ending.SUBMITTED,
        grade=Graded(float(rng.random() < 0.4), {"tests/test_a.py::test_a": "passed"}),
        artifact=DIFF, wall_s=60.0, tags={"repo": "demo/cart", "kind": "operator", "issue": prose(rng, 80)},
    )  # fmt: skip


def make_hostile(number: int, text: str) -> Trajectory:
    """Everything that an agent or a repository can write is `text`."""
    step = Step(text, ToolCall("execute_bash", {"cmd": text, text[:200]: text[:200]}), text, "")
    return Trajectory(
        task_id=f"hostile-{number} {text[:90]}", attempt=0, phase="train", step=0, spans=(TokenSpan((1, 2), False),),
        steps=(step, Step(text, None, text, "no_call")), ending=Ending.SUBMITTED,
        grade=Graded(0.0, {text[:200]: text[:80]}, text),
        artifact=f"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-{text}\n+{text}\n", error=text[:500],
        tags={"issue": text, "repo": text[:80], "kind": text[:80]},
    )  # fmt: skip


def record_run(run: Path, count: int) -> None:
    """The run, through the real store."""
    rng = random.Random(0)
    store = TrajectoryStore(run)
    made = [make_hostile(0, HOSTILE), make_hostile(1, HOSTILE + LONG_LINE)]
    for first in range(0, count, 512):
        if store.committed("train", first // 512) is not None:
            continue
        segment, _ = store.begin("train", first // 512, keep=False)
        with segment:
            for number in range(first, min(first + 512, count) - (len(made) if first == 0 else 0)):
                segment.append(make_trajectory(number, rng))
            for trajectory in made if first == 0 else ():
                segment.append(trajectory)
            segment.commit()


def find_axe(directory: Path) -> str:
    """The source of axe-core."""
    if named := os.environ.get("AXE_CORE"):
        return Path(named).read_text(encoding="utf-8")
    if shutil.which("npm") is None:
        sys.exit("axe-core is needed: name axe.min.js with AXE_CORE, or install npm")
    subprocess.run(
        ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(directory), AXE], check=True
    )
    return (directory / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")


def open_page(browser: Any, address: str, *, dark: bool = False) -> tuple[Any, float, list[str]]:
    """A fresh profile at an address, the seconds until it answers, and what it asked for besides."""
    context = browser.new_context(viewport={"width": 1280, "height": 820}, color_scheme="dark" if dark else "light")
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    begun = time.monotonic()
    page.goto(address, wait_until="commit")
    page.wait_for_selector("body[data-started]", state="attached")  # no function: the page's policy forbids eval
    return page, time.monotonic() - begun, asked


FRAMES = """async (selector) => {
  const box = selector ? document.querySelector(selector) : document.scrollingElement;
  document.documentElement.style.scrollBehavior = "auto";
  let frames = 0, at = 0;
  const begun = performance.now();
  while (performance.now() - begun < 3000) {
    await new Promise(requestAnimationFrame);
    frames++;
    at += 120;
    if (at > box.scrollHeight - box.clientHeight) at = 0;
    box.scrollTop = at;
  }
  return (1000 * frames) / (performance.now() - begun);
}"""


def go(page: Any, place: str) -> float:
    """To another place in the page; the seconds until it is shown."""
    begun = time.monotonic()
    page.evaluate("(place) => { location.hash = place; }", place)
    page.wait_for_selector(f"body[data-ready={json.dumps(place)}]", state="attached")
    return time.monotonic() - begun


def count_violations(browser: Any, address: str, axe: str, places: list[str]) -> Iterator[str]:
    """What axe-core finds in each view, in both themes."""
    for dark in (False, True):
        page, _, _ = open_page(browser, address, dark=dark)
        page.context.set_default_timeout(60_000)
        for place in places:
            go(page, place)
            page.evaluate(axe)
            found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            for one in found["violations"]:
                where = f"{place} {'dark' if dark else 'light'}"
                yield f"{where}: {one['id']} ({len(one['nodes'])}): {one['nodes'][0]['html'][:160]}"
        page.context.close()


def is_escaped(browser: Any, address: str) -> bool:
    """Whether the hostile attempts do nothing and are shown."""
    page, _, asked = open_page(browser, address)
    wanted = harmless(HOSTILE)
    found = []
    for number in (0, 1):
        link = page.evaluate(
            "(name) => store.attempts.find((one) => one.task.id.startsWith(name)).link", f"hostile-{number}"
        )
        for tab in ("", "?tab=diff", "?tab=tests", "?tab=tokens"):
            go(page, f"#/attempt/{link}{tab}")
            shown = page.evaluate("document.querySelector('#view-attempt').textContent")
            found.append(tab in ("?tab=tests", "?tab=tokens") or wanted in shown or wanted[:300] in shown)
        go(page, f"#/task/{page.evaluate('(link) => encodeURIComponent(store.byKey.get(link).task.id)', link)}")
        found.append(wanted in page.evaluate("document.querySelector('#view-task').textContent"))
    go(page, "#/attempts?q=hostile")
    quiet = (
        page.evaluate("window.pwned === undefined")
        and page.evaluate("document.querySelectorAll('main script, main img').length") == 0
    )
    page.context.close()
    return all(found) and quiet and asked == [address]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--directory", type=Path, help="keep the run and its page there, and use them again")
    options = parser.parse_args()
    count = 200 if options.quick else 2000
    try:
        playwright = importlib.import_module("playwright.sync_api")
    except ImportError:
        sys.exit("the package playwright is needed: pip install playwright, and Chromium")
    with tempfile.TemporaryDirectory() as directory, playwright.sync_playwright() as driver:
        root, path = Path(directory), (options.directory or Path(directory)) / f"viewer-{count}.html"
        row: dict[str, Any] = {"trajectories": count, "write_s": None}
        if not path.exists():
            record_run(path.with_name(f"run-{count}"), count)
            begun = time.monotonic()
            write_viewer(path.with_name(f"run-{count}"), path)
            row["write_s"] = round(time.monotonic() - begun, 1)
        row["size_mib"] = round(path.stat().st_size / 2**20, 1)
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        measure(browser, path.resolve().as_uri(), find_axe(root), row)
        browser.close()
    print(json.dumps(row))
    good = row["open_s"] < 2 and row["fps"] > 30 and row["axe_violations"] == 0 and row["escaped"]
    sys.exit(0 if good else 1)


def measure(browser: Any, address: str, axe: str, row: dict[str, Any]) -> None:
    """Fills the row."""
    opened = []
    for _ in range(3):
        page, took, _ = open_page(browser, address)
        opened.append(took)
        page.context.close()
    page, _, _ = open_page(browser, address)
    links = page.evaluate("store.attempts.map((one) => one.link)")
    row["open_s"] = round(max(opened), 2)
    row["attempt_s"] = round(max(go(page, f"#/attempt/{links[at * len(links) // 6]}") for at in range(1, 6)), 2)
    row["fps_attempt"] = round(page.evaluate(FRAMES, ""), 1)
    go(page, "#/attempts")
    row["fps"] = round(page.evaluate(FRAMES, "#view-attempts .list"), 1)
    page.context.close()
    one = links[1]
    places = [
        "",
        "#/attempts",
        "#/tasks",
        "#/task/task-0000",
        *(f"#/attempt/{one}{tab}" for tab in ("", "?tab=diff", "?tab=tests", "?tab=tokens")),
    ]
    violations = list(count_violations(browser, address, axe, places))
    for line in violations:
        print(line, file=sys.stderr)
    row["axe_violations"] = len(violations)
    row["escaped"] = is_escaped(browser, address)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    main()
