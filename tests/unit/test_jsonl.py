from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from deepswe.errors import StoreError
from deepswe.jsonl import append_line, read_lines, sole_writer


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "none") == ([], b"")


def test_lines_come_back_and_the_directory_is_made(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.jsonl"
    append_line(path, b'{"a": 1}')
    append_line(path, b'{"b": 2}', durable=True)
    assert read_lines(path) == ([b'{"a": 1}', b'{"b": 2}'], b"")


@pytest.mark.parametrize("torn", [b"{", b'{"b": "' + b"x" * 200_000])
def test_a_torn_line_is_told_apart_and_goes_with_the_next(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + torn)
    assert read_lines(path) == ([b'{"a": 1}'], torn)
    append_line(path, b'{"b": 2}')
    assert path.read_bytes() == b'{"a": 1}\n{"b": 2}\n'


def test_a_last_line_that_only_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}')
    assert read_lines(path) == ([b'{"a": 1}'], b"")
    append_line(path, b'{"b": 2}')
    assert path.read_bytes() == b'{"a": 1}\n{"b": 2}\n'


def test_a_line_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    append_line(path, b'{"a": 1}')
    real, left = os.write, [4]

    def small_disk(file: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(file, data[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", small_disk)
    with pytest.raises(OSError, match="No space left") as caught:
        append_line(path, b'{"b": 2}')
    monkeypatch.undo()
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b'{"a": 1}\n'


def test_a_file_has_one_writer_at_a_time_and_is_free_again_after_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.jsonl"
    refused = pytest.raises(StoreError, match=rf"a\.jsonl is in use by process {os.getpid()}")
    with sole_writer(path), sole_writer(tmp_path / "other.jsonl"), refused, sole_writer(path):
        pass
    with sole_writer(path):
        pass
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_the_mark_of_a_killed_writer_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / ".a.jsonl.lock").write_text("1\n")
    with sole_writer(tmp_path / "a.jsonl"):
        pass
    assert not list(tmp_path.iterdir())
