import pytest

from deepswe.cli import progress as module
from deepswe.cli.progress import TerminalProgress


def test_without_a_terminal_a_long_stage_says_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with TerminalProgress() as progress:
        progress.begin("imitation", 1200)
        for _ in range(100):
            now += 1.0
            progress.advance(2, note="loss 0.5")
        progress.begin("short", 10)
        progress.advance(10)
    assert capsys.readouterr().err.splitlines() == [
        "imitation: 60 of 1200, loss 0.5",
        "imitation: 120 of 1200, loss 0.5",
        "imitation: 180 of 1200, loss 0.5",
    ]
