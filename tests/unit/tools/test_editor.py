from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepswe.sandbox.memory import MemorySandbox
from deepswe.tools.declare import ToolResult, Workspace
from deepswe.tools.editor import Text, file_editor
from deepswe.tools.output import shorten
from deepswe.tools.search import search

CART = b"def a():\n    return 1\n\n\ndef b():\n    return 2\n"


class Desk:
    """A workspace in memory, for short tests."""

    def __init__(self, **files: bytes) -> None:
        self.sandbox = MemorySandbox({f"/testbed/{name.replace('_', '.')}": data for name, data in files.items()})
        self.workspace = Workspace(self.sandbox)

    def edit(self, command: str, path: str = "cart.py", **arguments: str) -> ToolResult:
        return asyncio.run(file_editor.run(self.workspace, {"command": command, "path": path, **arguments}))

    def search(self, term: str, path: str = ".") -> ToolResult:
        return asyncio.run(search.run(self.workspace, {"search_term": term, "path": path}))

    def bytes(self, path: str = "cart.py") -> bytes:
        return self.sandbox.files[f"/testbed/{path}"]


def test_view_prints_the_numbered_lines_and_nothing_else() -> None:
    desk = Desk(cart_py=CART)
    assert desk.edit("view").text == "1\tdef a():\n2\t    return 1\n3\t\n4\t\n5\tdef b():\n6\t    return 2"
    assert desk.edit("view", "/testbed/./cart.py", view_range="[5, -1]").text == "5\tdef b():\n6\t    return 2"


def test_view_says_where_a_file_lacks_its_last_line_break() -> None:
    assert Desk(a_py=b"x").edit("view", "a.py").text == "1\tx\n[no line break at the end of the file]"


def test_view_of_a_long_file_says_which_lines_are_left_out() -> None:
    text = Desk(a_py=b"x" * 99 + b"\n" + (b"y" * 99 + b"\n") * 200).edit("view", "a.py").text
    assert len(text) < 10_100
    assert text.endswith("lines 98 to 201 left out: view them with view_range]")


@pytest.mark.parametrize(
    ("command", "path", "arguments", "kind", "says"),
    [
        ("view", "nothing.py", {}, "no_path", "View the directory . "),
        ("view", "cart.py/x", {}, "no_path", "does not exist"),
        ("view", "cart.py", {"view_range": "[7, 8]"}, "bad_range", "1 to 6"),
        ("view", "cart.py", {"view_range": "[3]"}, "bad_range", "two numbers"),
        ("view", ".", {"view_range": "[1, 2]"}, "bad_range", "directory"),
        ("view", "blob.bin", {}, "binary_file", "3 bytes"),
        ("create", "a.py", {}, "missing_parameter", "file_text"),
        ("create", ".", {"file_text": "x"}, "is_directory", "path of a file"),
        ("str_replace", "cart.py", {"new_str": "x"}, "missing_parameter", "old_str"),
        ("str_replace", "cart.py", {"old_str": "return 3"}, "no_match", "copy the text exactly"),
        ("str_replace", "cart.py", {"old_str": "return", "new_str": "x"}, "several_matches", "at lines 2, 6"),
        ("str_replace", "cart.py", {"old_str": "a()", "new_str": "a()"}, "no_change", "same"),
        ("insert", "cart.py", {"new_str": "x"}, "missing_parameter", "insert_line"),
        ("insert", "cart.py", {"insert_line": "7", "new_str": "x"}, "bad_range", "use 0 to 6"),
        ("undo_edit", "cart.py", {}, "nothing_to_undo", "no edit"),
    ],
)
def test_each_mistake_changes_nothing_and_says_what_to_do(
    command: str, path: str, arguments: dict[str, str], kind: str, says: str
) -> None:
    desk = Desk(cart_py=CART, blob_bin=b"a\0b")
    result = desk.edit(command, path, **arguments)
    assert result.error == kind
    assert says in result.text
    assert desk.bytes() == CART


def test_str_replace_shows_four_lines_on_each_side() -> None:
    desk = Desk(n_txt=b"".join(b"%d\n" % n for n in range(1, 21)))
    result = desk.edit("str_replace", "n.txt", old_str="10\n11\n", new_str="ten\n")
    shown = ["6\t6", "7\t7", "8\t8", "9\t9", "10\tten", "11\t12", "12\t13", "13\t14", "14\t15"]
    assert result.text == "\n".join(["Edited n.txt", *shown[:5], *shown[5:]])
    assert desk.edit("str_replace", "n.txt", old_str="ten\n", concise="true").text == "Edited n.txt"


def test_overlapping_matches_are_several() -> None:
    assert Desk(a_py=b"aaa").edit("str_replace", "a.py", old_str="aa", new_str="b").error == "several_matches"


def test_create_says_when_it_overwrote() -> None:
    desk = Desk()
    assert desk.edit("create", "p/a.py", file_text="x\n").text == "Created p/a.py"
    assert desk.edit("create", "p/a.py", file_text="y").text == "Overwrote p/a.py, which had 1 line"
    assert desk.bytes("p/a.py") == b"y"


@pytest.mark.parametrize(
    ("before", "line", "after"),
    [
        (b"", "0", b"x\n"),
        (b"a\nb\n", "0", b"x\na\nb\n"),
        (b"a\nb\n", "2", b"a\nb\nx\n"),
        (b"a\nb", "2", b"a\nb\nx\n"),
        (b"a\nb", "1", b"a\nx\nb"),
    ],
)
def test_insert_adds_whole_lines(before: bytes, line: str, after: bytes) -> None:
    for text in ("x", "x\n"):
        desk = Desk(a_py=before)
        assert desk.edit("insert", "a.py", insert_line=line, new_str=text).error == ""
        assert desk.bytes("a.py") == after


def test_undo_takes_back_one_edit_after_another() -> None:
    desk = Desk(cart_py=CART)
    desk.edit("str_replace", old_str="1", new_str="3")
    desk.edit("insert", insert_line="0", new_str="# top")
    assert desk.edit("undo_edit").text == "Undid the last edit of cart.py"
    assert desk.edit("undo_edit", "./cart.py").error == ""
    assert desk.bytes() == CART
    assert desk.edit("undo_edit").error == "nothing_to_undo"


def test_undo_refuses_a_file_that_something_else_changed() -> None:
    desk = Desk(cart_py=CART)
    desk.edit("str_replace", old_str="1", new_str="3")
    desk.sandbox.files["/testbed/cart.py"] = b"other"
    assert desk.edit("undo_edit").error == "changed_since"
    assert desk.bytes() == b"other"


def test_line_ends_of_windows_are_kept() -> None:
    desk = Desk(a_py=b"a\r\nb\r\nc\r\n")
    assert desk.edit("view", "a.py").text == "1\ta\n2\tb\n3\tc"
    desk.edit("str_replace", "a.py", old_str="a\nb\n", new_str="x\ny\n")
    desk.edit("insert", "a.py", insert_line="3", new_str="z")
    assert desk.bytes("a.py") == b"x\r\ny\r\nc\r\nz\r\n"


def test_bytes_that_are_no_utf8_are_shown_escaped_and_kept() -> None:
    desk = Desk(a_py=b"# \xff\nx = 1\n")
    assert desk.edit("view", "a.py").text == "1\t# \\xff\n2\tx = 1"
    desk.edit("str_replace", "a.py", old_str="x = 1", new_str="x = 2")
    assert desk.bytes("a.py") == b"# \xff\nx = 2\n"


@given(st.binary(max_size=30), st.lists(st.sampled_from([b"\r\n", b"\n", b"\r", b"a", b"\xff", "é".encode()])))
def test_text_goes_back_to_the_same_bytes(data: bytes, parts: list[bytes]) -> None:
    for each in (data, b"".join(parts)):
        text = Text(each)
        assert text.encode(text.content) == each


def test_search_of_a_directory_counts_and_shows_the_lines_of_each_file() -> None:
    desk = Desk(cart_py=CART, util_py=b"x = 'return'\n", blob_bin=b"return\0")
    assert desk.search("return").text == (
        "cart.py (2 matches)\n2\t    return 1\n6\t    return 2\nutil.py (1 match)\n1\tx = 'return'"
    )
    assert desk.search("return", "cart.py").text == "2\t    return 1\n6\t    return 2"


def test_search_takes_its_term_literally() -> None:
    desk = Desk(cart_py=CART)
    assert desk.search("a()").text == "cart.py (1 match)\n1\tdef a():"
    assert desk.search("r.turn").text == "No match for r.turn in ."
    assert desk.search("r.turn").error == ""
    assert desk.search("a\nb").error == "bad_parameter"
    assert desk.search("a", "nowhere").error == "no_path"


def test_a_directory_is_listed_to_depth_two() -> None:
    desk = Desk()
    for path in ("a.py", "p/b.py", "p/q/c.py", "p/q/r/d.py", ".git/x", "p/__pycache__/b.pyc"):
        desk.sandbox.files[f"/testbed/{path}"] = b""
    assert desk.edit("view", ".").text == "a.py\np/\np/b.py\np/q/"


def test_long_output_keeps_both_ends_and_says_what_is_missing() -> None:
    lines = "\n".join(str(number) for number in range(100))
    assert shorten(lines).split("\n")[39:42] == ["39", "[20 lines left out]", "60"]
    assert shorten("\n".join(["x"] * 80)).count("x") == 80
    assert shorten("x" * 10_001) == "x" * 5000 + "\n[1 characters left out]\n" + "x" * 5000
