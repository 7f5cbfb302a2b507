"""Issues by a language model, against a small server that speaks its protocol."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from deepswe.errors import TaskError
from deepswe.tasks.synth.language import Endpoint, LanguageWriter, code_blocks

DRAFT = "# `add` is wrong\n\n```python\nadd(1, 2)\n```\n\ngives\n\n```\n4\n```\n"
GOOD = "Adding is off for me.\n\n```python\nadd(1, 2)\n```\n\nprints this, I expected three:\n\n```\n4\n```\n"


class Model:
    """What the server answers, and what it was asked."""

    def __init__(self) -> None:
        self.answer: Any = GOOD
        self.status = 200
        self.asked: list[tuple[dict[str, Any], str]] = []
        self.url = ""


@pytest.fixture
def model() -> Iterator[Model]:
    state = Model()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.asked.append((body, self.headers.get("Authorization", "")))
            answer = state.answer
            if isinstance(answer, str):
                answer = {"choices": [{"message": {"role": "assistant", "content": answer}}]}
            data = json.dumps(answer).encode()
            self.send_response(state.status)
            if 300 <= state.status < 400:
                self.send_header("Location", "http://127.0.0.1:9/v1")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def writer(model: Model) -> LanguageWriter:
    return LanguageWriter(Endpoint(model.url, "some-model", key_variable="SYNTH_TEST_KEY", timeout_s=10.0))


def test_report_is_rewritten_from_the_draft_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNTH_TEST_KEY", "secret")
    assert writer(model).rewrite(DRAFT, "Return the sum.", 7) == GOOD
    [(body, key)] = model.asked
    assert key == "Bearer secret"
    assert (body["model"], body["seed"]) == ("some-model", 7)
    assert body["messages"][-1]["content"] == DRAFT + "\n\nDocumentation of what is called: Return the sum."


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (GOOD.replace("add(1, 2)", "add(2, 2)"), 200, "changed or dropped the code block 'add"),
        ("No.", 200, "3 characters, which is no report"),
        ({"error": "no"}, 200, "something else than a chat completion"),
        ({"choices": [{"message": {"content": None}}]}, 200, "without a text"),
        (GOOD, 503, "answered 503"),
        (GOOD, 307, "answered 307, a redirect to 'http://127.0.0.1:9/v1'; give that address"),
    ],
)
def test_answer_that_is_no_report_is_refused_and_counted(model: Model, answer: Any, status: int, words: str) -> None:
    model.answer, model.status = answer, status
    asked = writer(model)
    with pytest.raises(TaskError, match=words):
        asked.rewrite(DRAFT, "", 0)
    assert asked.failures == 1
    assert words in asked.last_failure


def test_endpoint_that_is_not_there_is_a_task_error() -> None:
    with pytest.raises(TaskError, match="cannot be asked"):
        LanguageWriter(Endpoint("http://127.0.0.1:9/v1", "m", timeout_s=5.0)).rewrite(DRAFT, "", 0)


def test_code_blocks_are_found() -> None:
    assert code_blocks(DRAFT) == ["add(1, 2)", "4"]
