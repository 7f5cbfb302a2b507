import errno
from pathlib import Path

import pytest

from deepswe.atomic import write_atomically


def test_text_and_bytes_replace_what_was_there_and_directories_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    write_atomically(path, "ä")
    assert path.read_bytes() == "ä".encode()
    write_atomically(path, b"\xff")
    assert path.read_bytes() == b"\xff"
    assert [item.name for item in path.parent.iterdir()] == ["b.txt"]


def test_a_target_that_cannot_be_replaced_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_atomically(tmp_path / "taken", "x")
    assert caught.value.filename == str(tmp_path / "taken")
    assert [item.name for item in tmp_path.iterdir()] == ["taken"]


def test_a_file_where_a_directory_should_be_is_an_error_that_names_the_target(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((FileExistsError, NotADirectoryError)) as caught:
        write_atomically(tmp_path / "file" / "out", "x")
    assert caught.value.filename == str(tmp_path / "file" / "out")


def test_a_text_that_cannot_be_encoded_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["a.txt"]
