"""The viewer's page is one harmless file that holds every attempt."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_records import write_trajectories
from test_report import HOSTILE

from deepswe.analysis.harmless import harmless
from deepswe.analysis.record import read_run
from deepswe.analysis.viewer.data import ACTIONS
from deepswe.analysis.viewer.page import open_book, write_viewer
from deepswe.analysis.viewer.serve import ViewerServer
from deepswe.analysis.viewer.training import trained_parts
from deepswe.config import AlgorithmConfig
from deepswe.errors import RunError
from deepswe.rollout.store import TrajectoryStore
from deepswe.types import Ending, Graded, Step, TokenSpan, ToolCall, Trajectory

NewAttempt = Callable[..., Trajectory]
DATA = re.compile(r'<script type="text/plain" id="([\w-]+)">([A-Za-z0-9+/=]*)</script>')


def unpack(data: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(data)))


def read(path: Path) -> tuple[str, dict[str, Any]]:
    """The page without its data, and the data."""
    page = path.read_text(encoding="utf-8")
    return DATA.sub("", page), {name: unpack(data) for name, data in DATA.findall(page)}


def test_every_attempt_is_in_the_file_with_all_its_texts(learned_run: Path) -> None:
    _, data = read(write_viewer(learned_run))
    columns = data["index"]["columns"]
    trajectories = {t.key: t for t in TrajectoryStore(learned_run).read()}
    assert len(columns["phase"]) == len(trajectories) == 144
    for place, (chunk, at) in enumerate(columns["chunk"]):
        task = data["index"]["tasks"][columns["task"][place]]
        key = (columns["phase"][place], columns["step"][place], task[0], columns["attempt"][place])
        t, detail = trajectories[key], data[f"chunk-{chunk}"][at]
        assert [turn["answer"] for turn in detail["turns"]] == [step.observation for step in t.steps]
        assert detail["diff"] == t.artifact
        assert [span[3] for span in detail["spans"]] == [list(span.tokens) for span in t.spans]
        assert len(columns["classes"][place]) == len(t.steps)
        issue_chunk, issue_at = task[3]
        assert data[f"chunk-{issue_chunk}"][issue_at][0] == t.tags["issue"]


def test_only_the_one_script_may_run_and_nothing_may_be_asked_for(learned_run: Path) -> None:
    page, _ = read(write_viewer(learned_run))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert len(scripts) == page.count("<script") == 1
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert f"script-src &#39;sha256-{digest}&#39;" in policy[1]
    assert "default-src &#39;none&#39;" in policy[1]
    assert "connect-src &#39;none&#39;" in policy[1]
    assert not re.search(
        r"""(?:src|href)=["'](?!#)|url\(|@import|innerHTML|insertAdjacent|document\.write|eval\(""", page
    )


def test_hostile_records_never_become_markup(tmp_path: Path) -> None:
    step = Step(HOSTILE, ToolCall(HOSTILE, {HOSTILE: HOSTILE}), HOSTILE + "A" * 1_000_000, HOSTILE)
    hostile = Trajectory(
        task_id=HOSTILE, attempt=0, phase="train", step=0, spans=(TokenSpan((1,), False),), steps=(step,),
        ending=Ending.SUBMITTED, grade=Graded(0.0, {HOSTILE: HOSTILE}, HOSTILE), artifact=HOSTILE, error=HOSTILE,
        tags={"issue": HOSTILE, "repo": HOSTILE, "kind": HOSTILE, "canary": HOSTILE, HOSTILE: HOSTILE},
    )  # fmt: skip
    write_trajectories(tmp_path / "run", [hostile])
    page, data = read(write_viewer(tmp_path / "run"))
    assert "alert(1)" not in page
    detail = data["chunk-0"][0]
    assert detail["turns"][0]["answer"] == harmless(HOSTILE) + "A" * 1_000_000
    assert detail["turns"][0]["arguments"] == [[harmless(HOSTILE), harmless(HOSTILE)]]
    assert data["index"]["tasks"][0][0] == harmless(HOSTILE)
    json.dumps(data, ensure_ascii=False).encode("utf-8")


def test_advantages_are_those_of_the_groups_and_the_rest_says_why_not(new_attempt: NewAttempt) -> None:
    batch = [
        *(new_attempt("cart-1", number, "train", 3, solved) for number, solved in enumerate((True, False, None))),
        *(new_attempt("cart-2", number, "train", 3, False) for number in range(2)),
    ]
    parts = trained_parts(batch, AlgorithmConfig())
    assert [parts[t.key].advantages for t in batch[:2]] == [(1.0,), (-1.0,)]
    assert parts[batch[2].key].role == "no verdict, so no reward"
    assert parts[batch[3].key].role == "all rewards of its group are equal"
    assert trained_parts([new_attempt("cart-1", 0, "before_heldout", 0, True)], AlgorithmConfig()) == {}


def test_tokens_can_be_left_out(learned_run: Path) -> None:
    _, data = read(write_viewer(learned_run, tokens=False))
    assert "spans" not in data["chunk-0"][0]
    assert data["index"]["actions"] == list(ACTIONS)


def test_a_run_without_attempts_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no recorded attempts yet"):
        write_viewer(tmp_path)


def test_a_wrong_tokenizer_is_refused_by_the_name_of_its_file(learned_run: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text("no tokenizer")
    for wrong, named in (("wrong.json", "wrong.json"), ("none.json", "none.json"), (".", "tokenizer.json")):
        with pytest.raises(RunError, match=named) as refused:
            open_book(read_run(learned_run), tokenizer=tmp_path / wrong)
        assert "give a tokenizer.json, or a directory that holds one" in str(refused.value)


def test_the_server_answers_only_those_who_know_its_address(learned_run: Path) -> None:
    run = read_run(learned_run)
    book = open_book(run)
    with ViewerServer(run, book) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def get(path: str, host: str | None = None) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
            connection.request("GET", path, headers={"Host": host} if host else {})
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            return answer.status, body

        root = f"/{server.secret}/"
        status, page = get(root)
        assert status == 200
        assert b"data-served" in page
        assert b'id="chunk-0"' not in page
        assert get(f"{root}chunk/0") == (200, book.chunks[0])
        assert get("/")[0] == get(f"{root}chunk/999")[0] == get(f"{root}../x")[0] == get("/wrong-secret/")[0] == 404
        assert get(root, host="evil.example:80")[0] == 403
        server.shutdown()
        thread.join()
