"""Tasks out of the history of a repository that this test makes: each commit is of a kind that it knows."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deepswe.errors import BuildError, TaskError
from deepswe.progress import Silent
from deepswe.tasks.distributions import Pip
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.synth.commits import TASK, CommitPlan, CommitsFound, Record, search
from deepswe.tasks.synth.commits_history import History, open_source
from deepswe.tasks.synth.commits_tasks import assemble

PROJECT = (
    '[project]\nname = "calc"\nversion = "1.0"\nlicense = "MIT"\n[project.optional-dependencies]\ntest = [EXTRA]\n'
)
NUMBERS = '''"""Numbers."""


def add(a, b):
    """Give the sum of two numbers."""
    return a + b


def clamp(value, low, high):
    """Move a value into the range from low to high."""
    return max(low, min(high, value))
'''
TEXT = '''"""Texts."""


def title(text):
    """Write the first letter large."""
    return text[:1] + text[1:]


def table():
    return {"a": 1}
'''
TEST_NUMBERS = """from calc.numbers import add, clamp


def test_add():
    assert add(1, 2) == 3


def test_clamp():
    assert clamp(7, 1, 5) == 5
"""
TEST_TABLE = """from pathlib import Path

from calc.text import table


def test_table():
    assert sorted(table()) == Path(__file__).with_name("data").joinpath("table.txt").read_text().split()


def test_values():
    assert all(table().values())
"""

Step = Callable[["Maker"], None]


class Maker:
    """Writes a repository, commit by commit."""

    def __init__(self, root: Path) -> None:
        self.root, self.time = root, 1_600_000_000
        root.mkdir()
        self.git("init", "-q", "-b", "main")
        self.write("pyproject.toml", PROJECT.replace("EXTRA", '"pytest", "mypy"'))
        self.write("calc/__init__.py", "")
        self.write("calc/numbers.py", NUMBERS)
        self.write("calc/text.py", TEXT)
        self.write("calc/wait.py", "def wait():\n    while True:\n        pass\n")
        self.write("tests/test_numbers.py", TEST_NUMBERS)
        self.write("tests/test_table.py", TEST_TABLE)
        self.write("tests/data/table.txt", "a")
        self.write("README.md", "calc\n")
        self.commit("A small library")

    def git(self, *arguments: str) -> str:
        stamp = f"{self.time} +0000"
        who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b.c", "GIT_COMMITTER_NAME": "a"}
        env = {
            **os.environ,
            **who,
            "GIT_COMMITTER_EMAIL": "a@b.c",
            "GIT_AUTHOR_DATE": stamp,
            "GIT_COMMITTER_DATE": stamp,
        }
        command = ["git", "-C", str(self.root), *arguments]
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip()

    def write(self, path: str, text: str | bytes) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode() if isinstance(text, str) else text)

    def read(self, path: str) -> str:
        return (self.root / path).read_text()

    def change(self, path: str, old: str, new: str) -> None:
        assert old in self.read(path)
        self.write(path, self.read(path).replace(old, new))

    def extend(self, path: str, text: str) -> None:
        self.write(path, self.read(path) + text)

    def commit(self, message: str) -> str:
        self.time += 3600
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)
        return self.git("rev-parse", "HEAD")


def a_fix_with_two_failing_tests(make: Maker) -> None:
    make.change("calc/text.py", "text[:1] + text[1:]", "text[:1].upper() + text[1:]")
    make.write(
        "tests/test_text.py",
        "import pytest\nfrom calc.text import title\n\n\n"
        '@pytest.mark.parametrize(("text", "wanted"), [("ab", "Ab"), ("xy z", "Xy z"), ("", "")])\n'
        "def test_title(text, wanted):\n    assert title(text) == wanted\n",
    )


def a_fix_with_one_failing_test(make: Maker) -> None:
    make.change("calc/numbers.py", "return max(low", "if low > high:\n        return None\n    return max(low")
    make.extend("tests/test_numbers.py", "\n\ndef test_clamp_empty():\n    assert clamp(3, 5, 1) is None\n")


def a_new_function(make: Maker) -> None:
    make.extend("calc/numbers.py", "\n\ndef double(a):\n    return 2 * a\n")
    make.write(
        "tests/test_double.py", "from calc.numbers import double\n\n\ndef test_double():\n    assert double(4) == 8\n"
    )


def a_new_module(make: Maker) -> None:
    make.write("calc/words.py", "def count(text):\n    return len(text.split())\n")
    make.write(
        "tests/test_words.py", "from calc.words import count\n\n\ndef test_count():\n    assert count('a b') == 2\n"
    )


def a_fix_with_new_data_of_a_test(make: Maker) -> None:
    make.change("calc/text.py", '{"a": 1}', '{"a": 1, "b": 2}')
    make.write("tests/data/table.txt", "a b")


def a_fix_in_two_files(make: Maker) -> None:
    make.change("calc/numbers.py", "return a + b", "return float(a + b)")
    make.extend("calc/text.py", "\n\ndef show(a):\n    return str(a)\n")
    make.write(
        "tests/test_both.py",
        "from calc.numbers import add\n\n\ndef test_float():\n    assert isinstance(add(1, 1), float)\n\n\n"
        "def test_sum():\n    assert add(1, 1) == 2\n",
    )


def a_deletion_that_a_test_wants(make: Maker) -> None:
    make.write(
        "tests/test_gone.py",
        "import importlib.util\n\n\ndef test_gone():\n    assert not importlib.util.find_spec('calc.old')\n",
    )
    (make.root / "calc/old.py").unlink()


def a_fix_with_changed_data_of_the_code(make: Maker) -> None:
    make.write("calc/units.txt", "m\nkg\n")
    make.extend(
        "calc/text.py",
        "\n\ndef units():\n    import pathlib\n\n"
        "    return pathlib.Path(__file__).with_name('units.txt').read_text().split()\n",
    )
    make.write(
        "tests/test_units.py", "from calc import text\n\n\ndef test_units():\n    assert text.units() == ['m', 'kg']\n"
    )


def documentation(make: Maker) -> None:
    make.extend("README.md", "It adds.\n")


def only_tests(make: Maker) -> None:
    make.extend("tests/test_numbers.py", "\n\ndef test_add_zero():\n    assert add(0, 0) == 0\n")


def code_alone(make: Maker) -> None:
    make.write("calc/old.py", "OLD = 1\n")


def comments_with_a_test(make: Maker) -> None:
    make.change("calc/numbers.py", '"""Numbers."""', '"""Numbers, small ones."""  # and a comment')
    make.extend("tests/test_numbers.py", "\n\ndef test_add_one():\n    assert add(0, 1) == 1\n")


def too_many_files(make: Maker) -> None:
    for number in range(5):
        make.write(f"calc/part{number}.py", f"PART = {number}\n")
    make.write("tests/test_parts.py", "def test_parts():\n    import calc.part4\n")


def too_many_lines(make: Maker) -> None:
    make.write("calc/long.py", "".join(f"X{number} = {number}\n" for number in range(200)))
    make.write("tests/test_long.py", "def test_long():\n    import calc.long\n")


def nothing_failed_before(make: Maker) -> None:
    make.change("calc/numbers.py", "max(low, min(high, value))", "min(high, max(low, value))")
    make.extend("tests/test_numbers.py", "\n\ndef test_clamp_low():\n    assert clamp(0, 1, 5) == 1\n")


def a_regression(make: Maker) -> None:
    make.extend("calc/text.py", "\n\ndef lower(text):\n    return text.lower()\n")
    make.change("calc/text.py", "def table", "def tables")
    make.write(
        "tests/test_lower.py",
        "from calc import text\n\n\ndef test_lower():\n    assert text.lower('A') == 'a'\n\n\n"
        "def test_table():\n    assert text.table()\n",
    )


def its_tests_fail(make: Maker) -> None:
    make.extend("calc/numbers.py", "\n\ndef half(a):\n    return a // 2\n")
    make.write("tests/test_half.py", "from calc.numbers import half\n\n\ndef test_half():\n    assert half(3) == 1.5\n")


def its_tests_hang(make: Maker) -> None:
    make.extend("calc/numbers.py", "\n\ndef third(a):\n    return a / 3\n")
    make.write("tests/test_third.py", "def test_third():\n    while True:\n        pass\n")


def the_old_code_hangs(make: Maker) -> None:
    make.change("calc/wait.py", "while True:", "while False:")
    make.write("tests/test_wait.py", "from calc.wait import wait\n\n\ndef test_wait():\n    wait()\n")


def code_of_the_documentation(make: Maker) -> None:
    make.write("docs/conf.py", "project = 'calc'\n")
    make.write("tests/test_documentation.py", "def test_documentation():\n    assert open('docs/conf.py')\n")


def its_tests_need_a_network(make: Maker) -> None:
    make.extend(
        "calc/numbers.py",
        "\n\ndef fetch(address):\n    import urllib.request\n\n    return urllib.request.urlopen(address).read()\n",
    )
    make.write(
        "tests/test_fetch.py",
        "from calc.numbers import fetch\n\n\ndef test_fetch():\n    assert fetch('http://192.0.2.1/')\n",
    )


def no_python(make: Maker) -> None:
    make.write("calc/broken.py", "print 'old'\n")
    make.write("tests/test_broken.py", "def test_broken():\n    assert True\n")


def binary_data(make: Maker) -> None:
    make.change("calc/numbers.py", "return a // 2", "return a / 2")
    make.write("tests/data/picture.bin", bytes(range(256)))


def a_link(make: Maker) -> None:
    make.extend("calc/text.py", "\n\ndef same(text):\n    return text\n")
    make.write("tests/test_same.py", "from calc.text import same\n\n\ndef test_same():\n    assert same(1) == 1\n")
    (make.root / "tests/link.py").symlink_to("/etc/hostname")


def unknown_requirement(make: Maker) -> None:
    make.write(
        "pyproject.toml",
        PROJECT.replace("license", 'dependencies = ["nowhere-to-be-had==9"]\nlicense').replace("EXTRA", ""),
    )
    make.extend("calc/text.py", "\n\ndef first(text):\n    return text[0]\n")
    make.write(
        "tests/test_first.py", "from calc.text import first\n\n\ndef test_first():\n    assert first('ab') == 'a'\n"
    )


def a_fix_with_another_requirement(make: Maker) -> None:
    make.write("pyproject.toml", PROJECT.replace("EXTRA", '"pytest>=8", "tiny<2"'))
    make.extend("calc/text.py", "\n\ndef last(text):\n    return text[-1]\n")
    make.write(
        "tests/test_last.py",
        "import tiny\nfrom calc.text import last\n\n\n"
        "def test_last():\n    assert last('ab') == 'b' and tiny.VERSION == '1.0'\n",
    )


def a_test_without_words(make: Maker) -> None:
    make.extend("calc/text.py", "\n\ndef middle(text):\n    return text[1]\n")
    make.write(
        "tests/test_middle.py",
        "from calc.text import middle\n\n\ndef test_middle():\n    assert middle('abc') == 'b'\n",
    )


def merge(make: Maker) -> None:
    make.git("checkout", "-q", "-b", "side", "HEAD~1")
    make.write("notes.txt", "side\n")
    make.commit("A note")
    make.git("checkout", "-q", "main")
    make.time += 3600
    make.git("merge", "-q", "--no-ff", "-m", "Merge the notes", "side")


KINDS: Sequence[tuple[Step, str, str]] = (
    (documentation, "Say what it does", "no code change"),
    (a_fix_with_two_failing_tests, "Title writes the first letter large", TASK),
    (code_alone, "Keep the old name", "no test change"),
    (a_fix_with_one_failing_test, "Clamp gives None for an empty range (#12)", TASK),
    (only_tests, "Add zeros", "no code change"),
    (a_new_function, "Numbers can be doubled", TASK),
    (a_fix_with_new_data_of_a_test, "The table has two rows", TASK),
    (comments_with_a_test, "Explain the numbers", "only comments or documentation"),
    (a_new_module, "Words of a text can be counted", TASK),
    (too_many_files, "Five parts", "too many files"),
    (too_many_lines, "Many constants", "too many lines"),
    (nothing_failed_before, "Clamp the other way round", "no failing test"),
    (a_fix_in_two_files, "A sum is always a float", TASK),
    (a_deletion_that_a_test_wants, "The old name is no longer there", TASK),
    (a_regression, "Lower case, and another name", "regression"),
    (its_tests_fail, "Half of a number", "no passing test"),
    (its_tests_hang, "A third of a number", "tests do not end"),
    (the_old_code_hangs, "Waiting ends", "old code does not end"),
    (code_of_the_documentation, "Settings of the documentation", "no code change"),
    (its_tests_need_a_network, "Numbers from elsewhere", "no passing test"),
    (binary_data, "Half is exact now", "binary file or link"),
    (a_link, "The same text again", "binary file or link"),
    (no_python, "An old script", "no Python 3"),
    (a_fix_with_changed_data_of_the_code, "Units of measurement are listed", TASK),
    (unknown_requirement, "The first letter of a text", "no environment"),
    (a_fix_with_another_requirement, "The last letter of a text", TASK),
    (a_test_without_words, "test_middle", "no issue text"),
    (merge, "", "merge"),
)


def build(make: Maker, kinds: Sequence[tuple[Step, str, str]]) -> dict[str, str]:
    """Make the commits; commit -> the verdict that it must get."""
    wanted = {make.git("rev-parse", "HEAD"): "first commit"}
    for step, message, verdict in kinds:
        step(make)
        wanted[make.commit(message) if message else make.git("rev-parse", "HEAD")] = verdict
    return wanted


def find(root: Path, place: Path, pip: Pip, plan: CommitPlan, record: str = "record.jsonl") -> CommitsFound:
    with History(root) as history:
        rows = Record(place / record, {"repository": "calc"})
        return search(history, "calc", plan, rows, LayerCache(place / "cache"), Silent(), pip=pip)


@pytest.mark.slow
def test_of_thirty_commits_exactly_the_right_ones_are_kept(tmp_path: Path, offline_pip: Pip) -> None:
    make = Maker(tmp_path / "calc")
    wanted = build(make, KINDS)
    assert len(make.git("rev-list", "HEAD").split()) == 30
    found = find(make.root, tmp_path, offline_pip, CommitPlan(timeout_s=20.0))
    assert {row.commit for row in found.rows} == {commit for commit, verdict in wanted.items() if verdict == TASK}
    again = find(make.root, tmp_path, Pip(("--no-index",)), CommitPlan(timeout_s=0.001))
    assert again == found
    counts: dict[str, int] = {"no code change": 1}  # the commit that the merge brings
    for verdict in wanted.values():
        counts[verdict] = counts.get(verdict, 0) + 1
    assert found.verdicts == dict(sorted(counts.items()))


FEW = tuple(
    row
    for row in KINDS
    if row[0] in (a_fix_with_two_failing_tests, a_regression, a_fix_with_one_failing_test, documentation)
)


def test_kept_commit_becomes_a_task_whose_tree_is_the_parent_and_whose_patch_is_the_commit(
    tmp_path: Path, offline_pip: Pip
) -> None:
    make = Maker(tmp_path / "calc")
    wanted = build(make, FEW)
    found = find(make.root, tmp_path, offline_pip, CommitPlan())
    assert [row.commit for row in reversed(found.rows)] == [name for name, verdict in wanted.items() if verdict == TASK]
    assert found.verdicts == {"first commit": 1, "no code change": 1, "regression": 1, TASK: 2}
    cache = LayerCache(tmp_path / "cache")
    with History(make.root) as history:
        tasks = assemble(found.rows, history, "calc", cache, Silent(), split="heldout", pip=offline_pip)
    newest, oldest = tasks.tasks
    assert oldest.id == f"calc-{found.rows[1].commit[:12]}"
    assert oldest.base_commit == make.git("rev-parse", f"{found.rows[1].commit}^")
    assert (oldest.split, oldest.license, oldest.repo, oldest.tags["failing_tests"]) == ("heldout", "MIT", "calc", "2")
    assert oldest.repository.base == newest.repository.base
    assert oldest.repository.environment == newest.repository.environment
    assert not oldest.repository.files
    assert newest.repository.files["calc/text.py"] == make.git("show", f"{found.rows[0].commit}^:calc/text.py") + "\n"
    hidden = tasks.hidden[oldest.id]
    assert hidden.fail_to_pass == ("tests/test_text.py::test_title[ab-Ab]", "tests/test_text.py::test_title[xy z-Xy z]")
    assert hidden.pass_to_pass == ("tests/test_text.py::test_title[-]",)
    assert "+    return text[:1].upper() + text[1:]" in hidden.gold_patch
    assert "tests/" not in hidden.gold_patch
    assert set(hidden.files) == {"tests/test_text.py"}
    assert "Title writes the first letter large" in oldest.problem_statement
    assert "title(" in oldest.problem_statement
    assert "test_title" not in oldest.problem_statement
    assert "test" not in newest.problem_statement
    assert "#12" not in newest.problem_statement
    site = next(cache.path(str(oldest.repository.environment)).glob("lib/python*/site-packages"))
    assert (site / "pytest").is_dir()
    assert not (site / "calc").exists()


def test_record_of_other_settings_is_refused(tmp_path: Path) -> None:
    Record(tmp_path / "record", {"limit": 1})
    with pytest.raises(TaskError, match="settings are other"):
        Record(tmp_path / "record", {"limit": 2})


def test_torn_last_line_of_a_record_is_dropped(tmp_path: Path) -> None:
    Record(tmp_path / "record", {"limit": 1})
    with (tmp_path / "record").open("a") as stream:
        stream.write('{"commit": "12')
    record = Record(tmp_path / "record", {"limit": 1})
    assert not record.rows


def test_the_repository_is_never_written_and_a_url_is_cloned_once(tmp_path: Path) -> None:
    make = Maker(tmp_path / "calc")
    before = sorted((path, path.lstat().st_mtime_ns) for path in make.root.rglob("*"))
    cache = LayerCache(tmp_path / "cache")
    clone = open_source(make.root.as_uri(), cache)
    for place in (make.root, clone):
        with History(place) as history:
            [commit] = history.walk(history.resolve("main"))
            history.check_out(history.tree(commit.id), tmp_path / "out")
    assert (tmp_path / "out" / "calc" / "numbers.py").read_text() == NUMBERS
    assert sorted((path, path.lstat().st_mtime_ns) for path in make.root.rglob("*")) == before
    assert open_source(make.root.as_uri(), cache) == clone


def test_place_without_a_repository_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="is no directory and no URL"):
        open_source(str(tmp_path / "nothing"), LayerCache(tmp_path))
    with pytest.raises(BuildError, match="not a git repository"), History(tmp_path):
        pass
