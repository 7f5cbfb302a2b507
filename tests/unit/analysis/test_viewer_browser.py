"""The viewer in headless Chromium: addresses, keys, themes, and hostile records as text. `pytest -m browser`."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_records import attempt, write_run, write_trajectories
from test_report import HOSTILE

from deepswe.analysis.harmless import harmless
from deepswe.analysis.viewer.page import write_viewer
from deepswe.types import Step, ToolCall

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with playwright.sync_playwright() as driver:
        try:
            opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"Chromium does not start: {error}")
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = write_run(tmp_path_factory.mktemp("viewer") / "quickstart")
    step = Step(HOSTILE, ToolCall(HOSTILE, {"cmd": HOSTILE}), HOSTILE + "\n" + "A" * 1_000_000)
    write_trajectories(run, [attempt("cart-1", 0, "hostile", 0, False, steps=(step,), artifact=HOSTILE, error=HOSTILE)])
    return write_viewer(run).as_uri()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.troubles = []
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("console", lambda message: message.type == "error" and page.troubles.append(message.text))
    page.on("request", lambda request: request.url.partition("#")[0] != address and page.troubles.append(request.url))
    page.goto(address)
    page.wait_for_selector("body[data-started]", state="attached")  # no function: the page's policy forbids eval
    yield page
    assert page.troubles == []
    context.close()


def go(page: Any, place: str) -> None:
    page.evaluate("(place) => { location.hash = place; }", place)
    page.wait_for_selector(f"body[data-ready={json.dumps(place)}]", state="attached")


def arrives(page: Any, pattern: str) -> None:
    """The page shows, now or soon, the view at an address that matches."""
    page.wait_for_url(lambda url: re.search(pattern, "#" + url.partition("#")[2]) is not None)
    page.wait_for_selector(f"body[data-ready={json.dumps('#' + page.url.partition('#')[2])}]", state="attached")


def test_keys_lead_from_the_overview_into_an_attempt_and_back(page: Any) -> None:
    page.keyboard.press("g")
    page.keyboard.press("a")
    arrives(page, "^#/attempts$")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    arrives(page, "^#/attempt/before_heldout/0/")
    page.keyboard.press("j")
    assert page.evaluate("document.querySelector('.turn.here').id") == "turn-1"
    page.keyboard.press("t")
    arrives(page, "tab=tokens$")
    assert page.locator(".tokens b").count() == 43
    page.keyboard.press("n")
    arrives(page, "/2[?]tab=tokens$")
    page.keyboard.press("u")
    arrives(page, "^#/task/cart-")


def test_an_address_shows_the_same_again(page: Any) -> None:
    go(page, "#/attempt/train/60/cart-2/1?turn=2")
    assert page.evaluate("document.activeElement.id") == "turn-2"
    go(page, "#/attempts?verdict=solved&phase=train")
    assert page.locator("#by-verdict").input_value() == "solved"
    shown = page.locator("#view-attempts .count").inner_text()
    assert shown.endswith("of 145 attempts")
    go(page, "#/nowhere")
    assert page.locator("#view-overview").is_visible()


def test_text_search_finds_what_only_an_answer_says(page: Any) -> None:
    go(page, "#/attempts")
    page.locator("#query").fill("gnp.exe")
    page.get_by_role("button", name="Search inside the texts").click()
    page.locator("#view-attempts .count", has_text="whose texts").wait_for()
    assert page.locator("#view-attempts .count").inner_text().startswith("1 of 145")


def test_hostile_text_is_shown_and_does_nothing(page: Any) -> None:
    for tab in ("", "?tab=diff", "?tab=tests", "?tab=tokens"):
        go(page, f"#/attempt/hostile/0/cart-1/0{tab}")
        assert page.locator("#view-attempt script, #view-attempt img").count() == 0
    go(page, "#/attempt/hostile/0/cart-1/0")
    assert harmless(HOSTILE) in page.evaluate("document.querySelector('#view-attempt').textContent")
    assert page.locator("button.more").all_text_contents() == ["Show 40,000 more of 1,000,311 characters"]


def test_the_theme_is_kept_and_changes_the_page(page: Any) -> None:
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light


def test_axe_finds_nothing(page: Any) -> None:
    named = os.environ.get("AXE_CORE")
    if not named:
        pytest.skip("AXE_CORE names no axe.min.js")
    for place in (
        "#/",
        "#/attempts",
        "#/tasks",
        "#/task/cart-1",
        "#/attempt/train/60/cart-1/0",
        "#/attempt/train/60/cart-1/0?tab=tokens",
    ):
        go(page, place)
        page.evaluate(Path(named).read_text(encoding="utf-8"))
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        assert [(one["id"], one["nodes"][0]["html"]) for one in found] == [], place
