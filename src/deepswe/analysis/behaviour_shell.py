"""What a shell command is for: the simple commands in it, and of each whether it looks, searches, runs or changes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise


class Purpose(IntEnum):
    """What one simple command does. Of several in one line the greatest counts."""

    NEUTRAL = 0
    EXPLORE = 1
    READ = 2
    SEARCH = 3
    TIDY = 4
    WRITE = 5
    RUN = 6
    TEST = 7
    CHANGE = 8


@dataclass(frozen=True, slots=True)
class Command:
    """One simple command.

    Attributes:
        words: without variables, redirections and wrappers such as `timeout 60`.
        text: what it was read from, for evidence.
        body: the here-document that it is fed with, or the code of `python -c`, or "".
        writes: files that its output or its body goes to.
        purpose: see `Purpose`.
    """

    words: tuple[str, ...]
    text: str
    body: str
    writes: tuple[str, ...]
    purpose: Purpose


_HEREDOC = re.compile(r"<<(-?)\s*(['\"]?)([A-Za-z_]\w*)\2")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_OPERATORS = frozenset({"&&", "||", ";", "|", "|&", "&", "(", ")", "\n", ";;"})
_REDIRECTIONS = frozenset({">", ">>", "<", ">&", "&>", "2>", "<<<", ">|", "&>>"})
_WRAPPERS = {"timeout": 1, "nice": 0, "time": 0, "sudo": 0, "env": 0, "exec": 0, "xvfb-run": 0, "nohup": 0}
_PYTHON = re.compile(r"(?:.*/)?(?:python|pypy)[\d.]*$")
_INTERPRETER = re.compile(r"(?:.*/)?(?:node|ruby|perl|php|deno|bun|Rscript|lua|ipython)$")
_TEST_RUNNERS = frozenset(
    {"pytest", "py.test", "tox", "nox", "nosetests", "jest", "mocha", "vitest", "ctest", "phpunit"}
)
_TEST_MODULES = frozenset({"pytest", "unittest", "nose", "tox", "nox", "doctest", "trial"})
_TEST_WORDS: tuple[tuple[str, ...], ...] = (
    ("make", "test"), ("make", "check"), ("make", "tests"), ("go", "test"), ("go", "vet"), ("cargo", "test"),
    ("cargo", "nextest"), ("npm", "test"), ("npm", "t"), ("npm", "run", "test"), ("yarn", "test"), ("pnpm", "test"),
    ("mvn", "test"), ("gradle", "test"), ("dotnet", "test"), ("mix", "test"), ("rake", "test"), ("hatch", "test"),
)  # fmt: skip
_RUN_WORDS: tuple[tuple[str, ...], ...] = (("go", "run"), ("cargo", "run"), ("npm", "start"), ("make", "run"))
_READERS = frozenset({"cat", "head", "tail", "nl", "less", "more", "bat", "awk", "cut", "pydoc", "man", "od", "xxd"})
_EXPLORERS = frozenset({"ls", "tree", "pwd", "wc", "file", "du", "which", "stat", "dir", "env", "uname", "id"})
_SEARCHERS = frozenset({"grep", "egrep", "fgrep", "rg", "ag", "ack"})
_TIDIERS = frozenset(
    {"rm", "rmdir", "pip", "pip3", "conda", "apt-get", "npm", "yarn", "kill", "unlink", "black", "ruff"}
)
_NEUTRAL = frozenset(
    {"cd", "echo", "printf", "export", "set", "true", "mkdir", "source", ".", "chmod", "touch", "sleep"}
)
_GIT_LOOKS = frozenset({"status", "log", "branch", "ls-files", "remote", "tag", "config", "reflog"})
_GIT_CHANGES = frozenset({"apply", "am", "checkout", "restore", "reset", "revert", "stash", "cherry-pick"})
_PROJECT_FILE = re.compile(
    r"(?:^|/)(?:setup\.(?:py|cfg)|pyproject\.toml|tox\.ini|package\.json|go\.mod|Cargo\.toml|Makefile|noxfile\.py"
    r"|requirements[\w.-]*\.txt|README(?:\.\w+)?|CONTRIBUTING(?:\.\w+)?|pytest\.ini|pom\.xml|build\.gradle)$"
)
_SOURCE_OF = re.compile(r"\bgetsource\(|\bhelp\(|\.__doc__\b|\bgetsourcelines\(")
_WRITES_FILE = re.compile(r"open\([^)]*,\s*(?:mode=)?['\"][wa]\+?['\"]|\.write_text\(|\.write_bytes\(|writeFileSync\(")


def is_project_file(path: str) -> bool:
    """Whether a path is about the project as a whole: its settings, its read-me."""
    return _PROJECT_FILE.search(path) is not None


def read_commands(script: str) -> tuple[Command, ...]:
    """The simple commands of a bash script, the first of each pipeline only. Never fails: quotes may be unbalanced."""
    lines, bodies = _take_bodies(script)
    commands = []
    for text in _simple_commands(lines):
        command = _read(text, bodies)
        if command is not None:
            commands.append(command)
    return tuple(commands)


def main_command(commands: Sequence[Command]) -> Command | None:
    """The command that says what the script is for: the one of greatest purpose, the first among equals."""
    return max(commands, key=lambda command: command.purpose, default=None)


def _take_bodies(script: str) -> tuple[str, list[str]]:
    """The script without its here-documents, each replaced by a word that `_read` finds again."""
    kept: list[str] = []
    bodies: list[str] = []
    rows = iter(script.split("\n"))
    for row in rows:
        marks = list(_HEREDOC.finditer(row))
        for mark in reversed(marks):
            row = f"{row[: mark.start()]} \0{len(bodies)} {row[mark.end() :]}"
            body: list[str] = []
            for line in rows:
                if (line.strip() if mark[1] else line) == mark[3]:
                    break
                body.append(line)
            bodies.append("\n".join(body))
        kept.append(row)
    return "\n".join(kept), bodies


def _simple_commands(script: str) -> Iterator[list[str]]:
    """Words of each simple command that heads a pipeline, operators as the lexer of the standard library sees them."""
    lexer = shlex.shlex(script, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    piped = False
    try:
        tokens = list(lexer)
    except ValueError:  # unbalanced quotes: as good as it gets
        tokens = script.split()
    for token in tokens:
        if token in _OPERATORS or (token and set(token) <= set(";&|()\n")):
            if words and not (piped and not _neutral(words)):
                yield words
            piped = token.startswith("|") and token != "||" and not _neutral(words)
            words = []
        else:
            words.append(token)
    if words and not piped:
        yield words


def _neutral(words: Sequence[str]) -> bool:
    return not words or words[0] in _NEUTRAL


def _read(words: list[str], bodies: Sequence[str]) -> Command | None:
    body, writes, plain = "", [], []
    position = iter(words)
    for word in position:
        if word.startswith("\0"):
            body = bodies[int(word[1:])] if word[1:].isdigit() and int(word[1:]) < len(bodies) else ""
        elif word in _REDIRECTIONS:
            target = next(position, "")
            if word in (">", ">>", ">|") and not target.startswith(("/dev/", "&")):
                writes.append(target)
        else:
            plain.append(word)
    plain = _unwrapped(plain)
    if not plain and not body:
        return None
    body = body or _inline_code(plain)
    if plain and plain[0] == "tee":
        writes += [word for word in plain[1:] if not word.startswith("-")]
    shown = " ".join(word for word in words if not word.startswith("\0"))
    return Command(tuple(plain), shown, body, tuple(writes), _purpose(plain, body, writes))


def _unwrapped(words: list[str]) -> list[str]:
    """Without leading assignments and wrappers."""
    rest = list(words)
    while rest:
        if _ASSIGNMENT.fullmatch(rest[0]):
            rest = rest[1:]
        elif rest[0] in _WRAPPERS and len(rest) > 1:
            values = _WRAPPERS[rest[0]]
            rest = rest[1:]
            while rest and rest[0].startswith("-"):
                rest = rest[1:]
            rest = rest[values:]
        else:
            break
    return [word for word in rest if word != "2"]  # the descriptor before a redirection


def _inline_code(words: Sequence[str]) -> str:
    if words and (_PYTHON.match(words[0]) or _INTERPRETER.match(words[0])):
        for flag, code in pairwise(words):
            if flag in ("-c", "-e", "--eval", "-p", "-r"):
                return code
    return ""


def _purpose(words: Sequence[str], body: str, writes: Sequence[str]) -> Purpose:
    name = words[0].rpartition("/")[2] if words else ""
    if _is_test(words, name):
        return Purpose.TEST
    if name == "git" and len(words) > 1:
        return _git_purpose([word for word in words[1:] if not word.startswith("--") and word != "-C"])
    if _changes(words, name):
        return Purpose.CHANGE
    if name in ("cat", "tee", "echo", "printf") and writes:
        return Purpose.WRITE
    if _runs(words, name, body):
        if _WRITES_FILE.search(body):
            return Purpose.CHANGE
        return Purpose.READ if _SOURCE_OF.search(body) or "pydoc" in words else Purpose.RUN
    if name in _SEARCHERS:
        return Purpose.SEARCH
    if name == "find":
        return _find_purpose(words)
    if name in _READERS or name == "sed":
        files = [word for word in words[1:] if not word.startswith("-")]
        return Purpose.EXPLORE if files and is_project_file(files[-1]) else Purpose.READ
    if name in _EXPLORERS:
        return Purpose.EXPLORE
    return Purpose.TIDY if name in _TIDIERS else Purpose.NEUTRAL


def _is_test(words: Sequence[str], name: str) -> bool:
    rest = list(words)
    if name in ("npx", "uv", "poetry", "pipenv", "hatch", "bundle"):
        rest = [word for word in words[1:] if word not in ("run", "exec")]
        name = rest[0] if rest else ""
    if name in _TEST_RUNNERS or any(tuple([name, *rest[1:]][: len(known)]) == known for known in _TEST_WORDS):
        return True
    if _PYTHON.match(name):
        module = next((second for first, second in pairwise(rest) if first == "-m"), "")
        script = next((word for word in rest[1:] if not word.startswith("-")), "")
        return module.partition(".")[0] in _TEST_MODULES or script.rpartition("/")[2] in ("runtests.py", "run_tests.py")
    return name in ("runtests.py", "run_tests.sh", "runtests.sh", "run_tests.py")


def _git_purpose(words: Sequence[str]) -> Purpose:
    verb = words[0] if words else ""
    if verb in ("diff", "show", "blame"):
        return Purpose.READ
    if verb == "grep":
        return Purpose.SEARCH
    if verb == "stash" and words[1:2] in (["list"], ["show"]):
        return Purpose.EXPLORE
    if verb in _GIT_CHANGES:
        return Purpose.CHANGE
    return Purpose.EXPLORE if verb in _GIT_LOOKS else Purpose.NEUTRAL


def _changes(words: Sequence[str], name: str) -> bool:
    if name in ("sed", "perl", "ruby", "awk", "gawk"):
        return any(re.match(r"-(?:\w*i(?:\.\w+)?|-in-place.*)$|-\w*pi\w*$", word) for word in words[1:])
    return name == "patch" or (name in ("mv", "cp") and len(words) > 2)


def _runs(words: Sequence[str], name: str, body: str) -> bool:
    if _PYTHON.match(name) or _INTERPRETER.match(name):
        return bool(body) or len(words) > 1
    if any(tuple([name, *words[1:]][: len(known)]) == known for known in _RUN_WORDS):
        return True
    return bool(words) and (words[0].startswith("./") or (name in ("bash", "sh") and len(words) > 1))


def _find_purpose(words: Sequence[str]) -> Purpose:
    for before, word, value in zip(("", *words), words, (*words[1:], ""), strict=False):
        wide = re.fullmatch(r"\*?(?:\.\w+)?", value)  # all files, or all of one type
        if word in ("-name", "-iname", "-path", "-ipath", "-regex") and before not in ("-not", "!") and not wide:
            return Purpose.SEARCH
        if word == "-exec" and value in _SEARCHERS:
            return Purpose.SEARCH
    return Purpose.EXPLORE
