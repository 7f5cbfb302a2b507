import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from deepswe.errors import PolicyError
from deepswe.scaling.verifier_api import ApiJudge, Endpoint, read_answer
from deepswe.scaling.verifier_prompt import Reading


def row(token: str, **alternatives: float) -> dict[str, Any]:
    top = [{"token": name.replace("_", " "), "logprob": math.log(p)} for name, p in alternatives.items()]
    return {"token": token, "logprob": -0.1, "top_logprobs": top}


def choice(*rows: Mapping[str, Any]) -> dict[str, Any]:
    return {"message": {"content": "".join(r["token"] for r in rows)}, "logprobs": {"content": list(rows)}}


@asynccontextmanager
async def server(answer: Callable[[Mapping[str, Any], int], tuple[int, Any]]):
    """A small endpoint: `answer` gets the body and the number of the request."""
    seen: list[Mapping[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append({**await request.json(), "authorization": request.headers.get("Authorization", "")})
        status, body = answer(seen[-1], len(seen))
        headers = {"Location": "http://127.0.0.1:9/v1"} if 300 <= status < 400 else {}
        return web.json_response(body, status=status, headers=headers)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}/v1", seen
    finally:
        await runner.cleanup()


def judge(answer: Any, readings: Sequence[Reading], **options: Any) -> tuple[list[float | None], list[Any]]:
    async def run() -> tuple[list[float | None], list[Any]]:
        async with server(answer) as (url, seen):
            endpoint = Endpoint(url, "judge", pause_s=0.01, **options)
            return await ApiJudge(endpoint).judge(readings), seen

    work: Awaitable[Any] = run()
    return asyncio.run(work)  # type: ignore[arg-type]


def test_the_probability_is_that_of_the_two_answers_at_their_place() -> None:
    rows = (row("The"), row(" answer"), row(" is"), row(" YES", _YES=0.6, _NO=0.2, Maybe=0.2), row("."))
    assert read_answer(choice(*rows)) == pytest.approx(0.75)


def test_an_answer_inside_the_thinking_is_not_the_answer() -> None:
    rows = (row("<think>"), row("YES", YES=0.9, NO=0.1), row("</think>"), row("NO", YES=0.3, NO=0.6))
    assert read_answer(choice(*rows)) == pytest.approx(1 / 3)


def test_pieces_and_spellings_of_an_answer_count_and_other_words_do_not() -> None:
    rows = (row("Y", Y=0.5, N=0.1, Yesterday=0.2, NOT=0.1), row("ES"))
    assert read_answer(choice(*rows)) == pytest.approx(0.5 / 0.6)
    assert read_answer(choice(row("yes", yes=0.4, _Yes=0.2, no=0.2))) == pytest.approx(0.75)


def test_the_other_answer_beyond_the_alternatives_has_no_mass() -> None:
    assert read_answer(choice(row("NO", NO=0.9, Nope=0.05))) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        choice(row("Perhaps", Perhaps=1.0)),
        choice(row("NOT", NOT=1.0)),
        {"message": {"content": "YES"}, "logprobs": None},
        {"message": {"content": "YES"}},
        {"message": {"content": "YES"}, "logprobs": {"content": [{"token": "YES", "logprob": None}]}},
        choice(),
    ],
)
def test_no_answer_is_none_and_never_a_number(answer: Mapping[str, Any]) -> None:
    assert read_answer(answer) is None


def test_an_endpoint_is_asked_for_log_probs_and_its_answers_come_back_in_order() -> None:
    def answer(body: Mapping[str, Any], number: int) -> tuple[int, Any]:
        good = "good" in body["messages"][-1]["content"]
        found = choice(row("YES", YES=0.9, NO=0.1)) if good else choice(row("NO", YES=0.2, NO=0.8))
        return 200, {"choices": [found]}

    readings = [Reading("i", (), word) for word in ("good", "bad", "good", "bad")]
    found, seen = judge(answer, readings)
    assert found == pytest.approx([0.9, 0.2, 0.9, 0.2])
    assert all(body["logprobs"] is True and body["top_logprobs"] == 20 for body in seen)
    assert all(body["temperature"] == 0.0 and body["model"] == "judge" for body in seen)


def test_a_key_is_sent_and_a_long_prompt_is_condensed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERIFIER_KEY", "secret")
    done = {"choices": [choice(row("YES", YES=1.0))]}
    _, seen = judge(
        lambda body, number: (200, done), [Reading("i", (), "long " * 5000)], key_variable="VERIFIER_KEY", budget=200
    )
    assert seen[0]["authorization"] == "Bearer secret"
    assert len(seen[0]["messages"][1]["content"]) < 2000


def test_a_failure_for_the_moment_is_tried_again() -> None:
    done = {"choices": [choice(row("YES", YES=1.0))]}
    found, seen = judge(lambda body, number: (503, {}) if number < 3 else (200, done), [Reading("i", (), "p")])
    assert found == [1.0]
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("status", "body", "words", "requests"),
    [
        (401, {"error": "no key"}, "answered 401", 1),
        (503, {}, "answered 503", 2),
        (307, {}, "answered 307: a redirect to 'http://127.0.0.1:9/v1', which is not followed", 1),
        (200, {"choices": [{"logprobs": "many"}]}, "log-probs cannot be read", 1),
        (200, {"choices": []}, "no chat completion", 1),
        (200, {"choices": ["YES"]}, "no object", 1),
    ],
)
def test_other_failures_are_one_error(status: int, body: Any, words: str, requests: int) -> None:
    async def run() -> int:
        async with server(lambda asked, number: (status, body)) as (url, seen):
            with pytest.raises(PolicyError, match=words):
                await ApiJudge(Endpoint(url, "m", retries=1, pause_s=0.01)).judge([Reading("i", (), "p")])
            return len(seen)

    assert asyncio.run(run()) == requests


def test_nobody_there_is_one_error() -> None:
    with pytest.raises(PolicyError, match="cannot be asked"):
        asyncio.run(ApiJudge(Endpoint("http://127.0.0.1:9", "m", retries=0)).judge([Reading("i", (), "p")]))
