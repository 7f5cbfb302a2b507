"""What an agent does, turn by turn: each turn in one class, by rules that show what they saw.

    explore          looks around: directories, history, files about the project
    search           looks for a given text or name
    read             reads particular code or text
    reproduce        before the first edit: writes or runs code that shows the issue
    edit             changes the source, or takes a change back
    run_tests        tests before the first edit; after it, the check that the issue is gone
    edge_test        after an edit: writes or runs code with inputs beyond the issue's
    regression_test  after an edit: runs tests that the repository had already
    debug            asks why: a debugger, prints, traces, longer tracebacks, the tests without the change
    repeat           the same call as before, with nothing changed in between
    finish           submits
    other            no call that can be read, cleaning up, installing

The rules read the call, what came back, the thought before the call, and the turns before. They know no model.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from deepswe.analysis.behaviour_shell import Command, Purpose, is_project_file, main_command, read_commands
from deepswe.rollout.canaries import is_test
from deepswe.types import Step, ToolCall


class Action(StrEnum):
    """The class of a turn; see the module."""

    EXPLORE = "explore"
    SEARCH = "search"
    READ = "read"
    REPRODUCE = "reproduce"
    EDIT = "edit"
    RUN_TESTS = "run_tests"
    EDGE_TEST = "edge_test"
    REGRESSION_TEST = "regression_test"
    DEBUG = "debug"
    REPEAT = "repeat"
    FINISH = "finish"
    OTHER = "other"


TESTING = frozenset({Action.RUN_TESTS, Action.EDGE_TEST, Action.REGRESSION_TEST})
LOOKING = frozenset({Action.EXPLORE, Action.SEARCH, Action.READ})


@dataclass(frozen=True, slots=True)
class Seen:
    """The class of a turn and why.

    Attributes:
        action: the class.
        rule: the name of the rule that decided.
        evidence: what it matched, at most 200 characters.
        source: whether the turn changed a source file; undo: whether it took a change back.
        failed: the call had no effect, or its command failed.
    """

    action: Action
    rule: str
    evidence: str = ""
    source: bool = False
    undo: bool = False
    failed: bool = False


_CALL = re.compile(r"<function=|<tool_call>|<parameter=")
_THINK = re.compile(r"</?think>")
_NUMBERED = re.compile(r"\s*\d+\t")
_SPACE = re.compile(r"\s+")
_EXIT = re.compile(r"exit code (-?\d+)|stopped after \d+ s")
_UNREADABLE = frozenset(
    {"no_call", "unknown_tool", "malformed_call", "unclosed_tag", "repeated_parameter", "bad_parameter",
     "missing_parameter", "unknown_parameter"}
)  # fmt: skip
_BEYOND = re.compile(
    r"\b(?:edge|corner|bound\w+)[ -]?cases?\b|\bboundar\w+|\b(?:several|other|more|further|special) cases\b"
    r"|\bwhat about\b"
    r"|\b(?:empty|negative|zero|none|null|unicode|non-\w+|falsy|nested|deeper|missing|duplicate\w*|overflow|infinit\w+"
    r"|nan|huge|large|very long|whitespace|quoted|single element|invalid|without a|no newline)\b",
    re.IGNORECASE,
)
_ODD_INPUT = re.compile(
    r"(?<![\w'\"])(?:None|\[\]|\{\}|\(\)|''|\"\"|-1|float\('(?:nan|inf)'\)|10\s*\*\*\s*\d+|b'')(?![\w'\"])"
)
_EDGE_TEXT = re.compile(r"parametrize|edge|corner|\bempty\b|unicode|for \w+(?:, ?\w+)* in [\[(]", re.IGNORECASE)
_ASKING = re.compile(
    r"\bwhy\b|\bdebug|\btrace\b|\btraceback\b|\bstep through\b|\bintermediate\b|\bwhere (?:does|do|is|are) .*"
    r"(?:lost|wrong|come|fail|happen)|\bwhich (?:line|of|branch|call)\b|\binspect\b|\blook at the (?:token|tree"
    r"|code that|generated|ast|state)|\bwhat .* (?:looks like|contains) internally",
    re.IGNORECASE,
)
_TRACING = re.compile(
    r"\bpdb\b|breakpoint\(|set_trace|-m trace\b|--tb=(?:long|short)|--showlocals|--pdb|settrace|\bdis\.dis\("
    r"|faulthandler|_pprint|print_tree|traceback\.print|logging\.basicConfig|\bstrace\b|\bgdb\b|cProfile|print\(['\"](?:DEBUG|>>>)"
)
_PRINTING = re.compile(
    r"\bprint\(.*|console\.(?:log|error)\(|breakpoint\(\)|set_trace\(|eprintln!|fmt\.Print|logging\.debug\("
)
_SCRATCH = re.compile(
    r"(?:^|[_\-/])(?:repro\w*|issue\w*|debug\w*|check\w*|scratch\w*|demo\w*|example\w*|try\w*|verify\w*|bug\w*)"
)
_TEST_FILE = re.compile(
    r"_test\.go$|\.(?:test|spec)\.[jt]sx?$|_spec\.rb$|(?:^|/)test\w*\.py$|_tests?\.(?:py|rs|c|cc|cpp)$"
)
_DEFINED = re.compile(r"\b(?:def|func|fn)\s+(test\w*|Test\w*)")


@dataclass(slots=True)
class _Attempt:
    """What the turns so far leave behind.

    Attributes:
        edited: a source file was changed.
        changes: files written so far, so that a call can be known to be the same in the same state.
        calls: call -> (changes, observation) when it was last made.
        own: file that the agent wrote to try things -> what for.
        names: tests defined in these files.
        shown: code that showed the issue before the first edit.
        watched: source files that print for debugging now.
    """

    edited: bool = False
    changes: int = 0
    calls: dict[str, tuple[int, str]] = field(default_factory=dict)
    own: dict[str, Action] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    shown: set[str] = field(default_factory=set)
    watched: set[str] = field(default_factory=set)


def thought_of(completion: str) -> str:
    """What the model wrote before its call, without the marks of a thinking section."""
    found = _CALL.search(completion)
    return _THINK.sub("", completion[: found.start()] if found else completion).strip()


def classify(steps: Iterable[Step]) -> tuple[Seen, ...]:
    """The class of each turn of one attempt, with the evidence for it.

    Args:
        steps: the turns in order.
    """
    attempt = _Attempt()
    found = []
    for step in steps:
        seen = _classify(step, attempt)
        found.append(seen)
        if step.call is not None:
            attempt.calls[_same(step.call)] = (attempt.changes, step.observation)
    return tuple(found)


def _classify(step: Step, attempt: _Attempt) -> Seen:
    call = step.call
    if call is None or step.error in _UNREADABLE:
        return Seen(Action.OTHER, "no call that can be carried out", step.error, failed=True)
    if call.name == "finish":
        return Seen(Action.FINISH, "calls finish")
    before = attempt.calls.get(_same(call))
    thought = thought_of(step.completion)
    exit_code = _EXIT.match(step.observation)
    failed = bool(step.error) or (exit_code is not None and exit_code[1] != "0")
    if call.name == "search":
        seen = Seen(Action.SEARCH, "search tool", _cut(call.arguments.get("search_term", "")), failed=failed)
    elif call.name == "file_editor":
        seen = _editor(call, step, thought, attempt, failed)
    elif call.name == "execute_bash":
        seen = _shell(call.arguments.get("cmd", ""), thought, attempt, failed)
    else:
        return Seen(Action.OTHER, "a tool without rules", _cut(call.name), failed=failed)
    return _repeated(seen, before, step, attempt) or seen


def _repeated(seen: Seen, before: tuple[int, str] | None, step: Step, attempt: _Attempt) -> Seen | None:
    """A look at what was seen already, or any other call twice in the same state."""
    if before is None or seen.source or seen.undo:
        return None
    changes, observation = before
    if changes == attempt.changes or (seen.action in LOOKING and observation == step.observation):
        return Seen(Action.REPEAT, f"the same call as before, as {seen.action}", seen.evidence, failed=seen.failed)
    return None


def _editor(call: ToolCall, step: Step, thought: str, attempt: _Attempt, failed: bool) -> Seen:
    command, path = call.arguments.get("command", ""), call.arguments.get("path", "")
    if command == "view":
        if not _NUMBERED.match(step.observation) and "." not in posixpath.basename(path.rstrip("/")).lstrip("."):
            return Seen(Action.EXPLORE, "views a directory", _cut(path), failed=failed)
        action = Action.EXPLORE if is_project_file(path) else Action.READ
        return Seen(action, "views a file", _cut(path), failed=failed)
    if command == "undo_edit":
        attempt.changes += not failed
        attempt.watched.discard(path)
        return Seen(Action.EDIT, "undo_edit", _cut(path), undo=not failed, failed=failed)
    text = call.arguments.get("file_text", "") or call.arguments.get("new_str", "")
    attempt.changes += not failed
    if _is_own(path, attempt, created=command == "create"):
        return _writes_own(path, text, thought, attempt, failed)
    if not attempt.own.get(path) and _adds_only_prints(call, text):
        if not failed:
            attempt.watched.add(path)
        return Seen(Action.DEBUG, "adds a print to a source file", _cut(text), failed=failed)
    attempt.edited |= not failed
    return Seen(Action.EDIT, f"{command} of a source file", _cut(path), source=not failed, failed=failed)


def _shell(script: str, thought: str, attempt: _Attempt, failed: bool) -> Seen:
    commands = read_commands(script)
    main = main_command(commands)
    if main is None:
        return Seen(Action.OTHER, "an empty command", failed=failed)
    stash = any(command.words[:2] == ("git", "stash") for command in commands)
    tests = next((command for command in commands if command.purpose is Purpose.TEST), None)
    runs = next((command for command in commands if command.purpose is Purpose.RUN), None)
    for command in commands:
        _note_written(command, attempt)
    if stash and (tests or runs):
        return Seen(Action.DEBUG, "runs without the change", _cut(script), failed=failed)
    if main.purpose is Purpose.CHANGE:
        return _changed(main, attempt, failed)
    if tests is not None:
        return _tests(tests, script, attempt, failed)
    if runs is not None:
        return _run(runs, script, thought, attempt, failed)
    if main.purpose is Purpose.WRITE:
        return _written(main, thought, attempt, failed)
    actions = {Purpose.EXPLORE: Action.EXPLORE, Purpose.READ: Action.READ, Purpose.SEARCH: Action.SEARCH}
    return Seen(
        actions.get(main.purpose, Action.OTHER), f"shell: {main.purpose.name.lower()}", _cut(main.text), failed=failed
    )


def _changed(command: Command, attempt: _Attempt, failed: bool) -> Seen:
    attempt.changes += 1
    undo = command.words[:1] == ("git",) and "apply" not in command.words
    attempt.edited |= not undo and not failed
    rule = "takes changes back with git" if undo else "changes files from the shell"
    return Seen(Action.EDIT, rule, _cut(command.text), source=not undo and not failed, undo=undo, failed=failed)


def _tests(command: Command, script: str, attempt: _Attempt, failed: bool) -> Seen:
    if trace := _TRACING.search(script):
        return Seen(Action.DEBUG, "tests with more to see", trace[0], failed=failed)
    own = [path for path in attempt.own if posixpath.basename(path) in script]
    own += [path for name, path in attempt.names.items() if re.search(rf"\b{name}\b", script)]
    if own:
        edge = any(attempt.own[path] is Action.EDGE_TEST for path in own)
        action = (Action.EDGE_TEST if edge else Action.RUN_TESTS) if attempt.edited else Action.REPRODUCE
        return Seen(action, "runs tests of its own", _cut(command.text), failed=failed)
    action = Action.REGRESSION_TEST if attempt.edited else Action.RUN_TESTS
    return Seen(action, "runs tests of the repository", _cut(command.text), failed=failed)


def _run(command: Command, script: str, thought: str, attempt: _Attempt, failed: bool) -> Seen:
    own = [path for path in attempt.own if posixpath.basename(path) in script]
    code = command.body or "\n".join(attempt.texts.get(path, "") for path in own) or command.text
    key = _SPACE.sub(" ", code)
    if found := _TRACING.search(script) or _TRACING.search(code) or _ASKING.search(thought):
        return Seen(Action.DEBUG, "asks why", _cut(found[0]), failed=failed)
    if attempt.watched:
        return Seen(Action.DEBUG, "runs with prints in the source", _cut(", ".join(attempt.watched)), failed=failed)
    if not attempt.edited:
        attempt.shown.add(key)
        return Seen(Action.REPRODUCE, "runs code before the first edit", _cut(command.text), failed=failed)
    if key in attempt.shown:
        return Seen(Action.RUN_TESTS, "runs what showed the issue", _cut(command.text), failed=failed)
    if any(attempt.own[path] is Action.EDGE_TEST for path in own):
        return Seen(Action.EDGE_TEST, "runs its file of further cases", _cut(command.text), failed=failed)
    if further := _beyond(thought, code):
        return Seen(Action.EDGE_TEST, "inputs beyond the issue's", _cut(further), failed=failed)
    return Seen(Action.RUN_TESTS, "runs code after an edit", _cut(command.text), failed=failed)


def _written(command: Command, thought: str, attempt: _Attempt, failed: bool) -> Seen:
    attempt.changes += 1
    for path in command.writes:
        if path in attempt.own:
            return _writes_own(path, command.body, thought, attempt, failed)
    attempt.edited |= not failed
    return Seen(
        Action.EDIT, "writes a source file from the shell", _cut(command.text), source=not failed, failed=failed
    )


def _writes_own(path: str, text: str, thought: str, attempt: _Attempt, failed: bool) -> Seen:
    found = _beyond(f"{thought} {posixpath.basename(path)}", text)
    action = (Action.EDGE_TEST if found else Action.RUN_TESTS) if attempt.edited else Action.REPRODUCE
    if not failed:
        _keep(path, text, action, attempt)
    return Seen(action, "writes a file to try things", _cut(found or path), failed=failed)


def _note_written(command: Command, attempt: _Attempt) -> None:
    """Files that a shell command writes to try things, before it is known what the command is for."""
    for path in command.writes:
        if _is_own(path, attempt, created=True):
            found = _beyond("", command.body)
            action = (Action.EDGE_TEST if found else Action.RUN_TESTS) if attempt.edited else Action.REPRODUCE
            _keep(path, command.body, action, attempt)


def _keep(path: str, text: str, action: Action, attempt: _Attempt) -> None:
    attempt.own[path] = action
    attempt.texts[path] = text
    attempt.names.update(dict.fromkeys(_DEFINED.findall(text), path))


def _is_own(path: str, attempt: _Attempt, *, created: bool) -> bool:
    """Whether a file is there to try things, and is no part of the fix."""
    if path in attempt.own or path.startswith("/tmp/"):
        return True
    name = path.removeprefix("/testbed/")
    if is_test(name) or _TEST_FILE.search(name):
        return True
    return created and _SCRATCH.search(name.lower()) is not None


def _adds_only_prints(call: ToolCall, text: str) -> bool:
    """Whether an edit adds lines that print, and no others."""
    old = call.arguments.get("old_str", "").split("\n")
    added = [line.strip() for line in text.split("\n") if line.strip() and line not in old]
    return bool(added) and all(_PRINTING.match(line) for line in added)


def _beyond(thought: str, code: str) -> str:
    """What says that inputs beyond the issue's are tried; "" where nothing does."""
    if found := _BEYOND.search(thought):
        return found[0]
    if found := _EDGE_TEXT.search(code):
        return found[0]
    odd = set(_ODD_INPUT.findall(code))
    return ", ".join(sorted(odd)) if len(odd) > 1 else ""


def _same(call: ToolCall) -> str:
    parts = (f"{name}={_SPACE.sub(' ', value).strip()}" for name, value in sorted(call.arguments.items()))
    return f"{call.name}({', '.join(parts)})"


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:199]}…"
