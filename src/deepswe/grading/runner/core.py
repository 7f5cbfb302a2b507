"""The part of a test run that code under test cannot reach, and the walls around it. Sent in front of each runner.

Two processes. The reporter reads the nonce, owns the channel and imports nothing of the repository. It forks the
worker, which runs the tests and tells of each over a pipe. The reporter numbers and signs what it is told, waits for
the worker's end, looks whether the test files are still what they were, and only then writes the last record. So the
nonce and the channel are in no process that runs code under test, and a worker that leaves early, is killed or leaves
others behind cannot complete a report.

The walls: the reporter is not dumpable (its memory and descriptors cannot be opened through /proc); the worker, and
all that it starts, cannot signal it or set its limits (a system call filter) nor trace it. Where the filter cannot be
set up, the first record says "unguarded", and the death of the reporter counts as the work of the code under test.
"""

import sys

sys.path = [entry for entry in sys.path if entry]

import builtins  # noqa: E402
import marshal  # noqa: E402
import os  # noqa: E402
import select  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Report = Callable[..., None]
    request = b""
    Mark = tuple[str, Any, str, Any]

CHANNEL, PIECE, PATIENCE_MS = 3, 1 << 16, 50
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 4, 38, 22, 2
KINDS = ("test", "part", "fixture", "changed", "value")
LONGEST = {"value": 1 << 16}
"""Kind -> characters of a detail; 300 for all others."""
SYSCALLS = {
    "x86_64": (0xC000003E, (62, 200, 234, 129, 297, 434, 302), 424, 72, 16),
    "aarch64": (0xC00000B7, (129, 130, 131, 138, 240, 434, 261), 424, 25, 29),
}
"""Machine -> its AUDIT_ARCH value, and the numbers of: the calls whose first argument names a process (kill, tkill,
tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_open, prlimit64), pidfd_send_signal, fcntl, ioctl."""

BUILTINS = (
    *(
        "AssertionError",
        "BaseException",
        "Exception",
        "__build_class__",
        "abs",
        "all",
        "any",
        "bool",
        "bytes",
        "compile",
    ),
    *("dict", "exec", "float", "frozenset", "getattr", "hasattr", "hash", "id", "int", "isinstance", "issubclass"),
    *("iter", "len", "list", "map", "max", "min", "next", "object", "range", "repr", "round", "set", "setattr"),
    *("sorted", "str", "sum", "super", "tuple", "type", "vars", "zip"),
)
"""What assertions lean on."""


def prctl(*arguments: "int | bytes") -> bool:
    """prctl(2); whether it succeeded. (`ctypes` itself costs milliseconds to import.)"""
    import _ctypes  # noqa: PLC0415  (missing in some builds of Python)

    padded = (*arguments, 0, 0, 0, 0)[:5]
    return int(_ctypes.call_function(_ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl"), padded)) == 0  # type: ignore[arg-type]


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction of classic BPF."""
    value &= 0xFFFFFFFF
    return code.to_bytes(2, sys.byteorder) + bytes((if_true, if_false)) + value.to_bytes(4, sys.byteorder)


def signal_filter(machine: str, reporter: int) -> bytes:
    """A system call filter under which no process can signal `reporter`, be it by its group or with all others.

    Raises:
        KeyError: the machine is not known here.
    """
    load, equal, at_least, back, allow, refuse, kill = 0x20, 0x15, 0x35, 0x06, 0x7FFF0000, 0x00050001, 0x80000000
    audit, naming, pidfd_send_signal, fcntl, ioctl = SYSCALLS[machine]
    targets = {
        **dict.fromkeys(naming, (16, (reporter, -reporter, -1))),
        fcntl: (24, (8, 15)),  # F_SETOWN, F_SETOWN_EX: signals by way of input and output
        ioctl: (24, (0x8901, 0x8902)),  # FIOSETOWN, SIOCSPGRP
    }
    code = instruction(load, 4) + instruction(equal, audit, 1) + instruction(back, kill) + instruction(load, 0)
    code += instruction(at_least, 0x40000000, 0, 1) + instruction(back, refuse)
    code += instruction(equal, pidfd_send_signal, 0, 1) + instruction(back, refuse)
    for number, (argument, values) in targets.items():
        code += instruction(equal, number, 0, 2 * len(values) + 2) + instruction(load, argument)
        for value in values:
            code += instruction(equal, value, 0, 1) + instruction(back, refuse)
        code += instruction(load, 0)
    return code + instruction(back, allow)


def guard(reporter: int) -> bool:
    """Put the calling process, and all that it will start, behind the filter; whether that worked."""
    try:
        code = signal_filter(os.uname().machine, reporter)
        address = id(code) + bytes.__basicsize__ - 1
        program = (len(code) // 8).to_bytes(8, sys.byteorder) + address.to_bytes(8, sys.byteorder)
        return prctl(PR_SET_DUMPABLE, 1) and prctl(PR_SET_NO_NEW_PRIVS, 1) and prctl(PR_SET_SECCOMP, FILTER, program)
    except (ImportError, KeyError, OSError):
        return False


def hide() -> bool:
    """Make this process not dumpable; whether that worked."""
    try:
        return prctl(PR_SET_DUMPABLE, 0)
    except (ImportError, OSError):
        return False


def read_all(descriptor: int) -> bytes:
    """Everything up to the end of a descriptor."""
    parts = []
    while part := os.read(descriptor, PIECE):
        parts.append(part)
    return b"".join(parts)


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte."""
    while data:
        data = data[os.write(descriptor, data) :]


def encode(kind: str, status: str, test: str, detail: str) -> str:
    """A record without nonce and number."""
    texts = " ".join(
        text.encode("utf-8", "backslashreplace").hex() or "-" for text in (test, detail[: LONGEST.get(kind, 300)])
    )
    return f"{kind} {status} {texts}\n"


def make_report(pipe: int) -> "Report":
    """The worker's function that tells the reporter of one thing."""
    owner, write, getpid, form = os.getpid(), os.write, os.getpid, encode

    def report(kind: str, status: str, test: str = "", detail: str = "") -> None:
        if getpid() != owner:  # a fork of the worker
            return
        data = form(kind, status, test, detail).encode()
        while data:
            data = data[write(pipe, data) :]

    return report


class Reporter:
    """The process that owns the channel."""

    def __init__(self, nonce: str, worker: int, pipe: int) -> None:
        self.nonce, self.worker, self.pipe = nonce, worker, pipe
        self.number = 0
        self.inbox = b""
        self.ended = ""
        self.broken = False
        self.status: int | None = None

    def write(self, body: str) -> None:
        """Sign and send one record."""
        write_all(CHANNEL, f"{self.nonce} {self.number} {body}".encode())
        self.number += 1

    def relay(self) -> str:
        """Pass on what the worker tells until it has ended; what is wrong with that, or ""."""
        poll = select.poll()
        poll.register(self.pipe, select.POLLIN)
        os.set_blocking(self.pipe, False)
        while not self.ended:
            waited = not poll.poll(PATIENCE_MS)
            if waited and self.reaped():  # something else may hold the pipe open for ever
                self.take()
                break
            if not waited and not self.take():
                break
        return self.verdict()

    def take(self) -> bool:
        """Take what the pipe holds; False at its end."""
        try:
            data = os.read(self.pipe, PIECE)
        except BlockingIOError:
            return True
        self.inbox += data
        *lines, self.inbox = self.inbox.split(b"\n")
        for line in lines:
            if not self.ended:
                self.one(line.decode("ascii", "replace"))
        return bool(data)

    def one(self, line: str) -> None:
        """Act on one record of the worker."""
        kind, _, rest = line.partition(" ")
        whole = line.isascii() and line.isprintable() and line.count(" ") == 3
        if whole and (kind in KINDS if self.number else kind in ("begin", "broken")):
            self.write(line + "\n")
            self.broken = kind == "broken"
        elif whole and kind == "end" and self.number:
            self.ended = rest
        else:
            self.ended = encode("", "tampered", "", "something else wrote to the worker's pipe").strip()

    def reaped(self) -> bool:
        """Whether the worker has ended."""
        if self.status is None:
            process, status = os.waitpid(self.worker, os.WNOHANG)
            if process:
                self.status = status
        return self.status is not None

    def verdict(self) -> str:
        """The last record's status and texts, without the check of files."""
        if self.status is None:
            self.status = os.waitpid(self.worker, 0)[1]
        if self.status and os.WIFSIGNALED(self.status):
            return encode("", "incomplete", "", f"a signal ended it: {os.WTERMSIG(self.status)}").strip()
        if self.status or not self.ended:
            code = os.WEXITSTATUS(self.status)
            return encode("", "incomplete", "", f"it left before its last test, exit code {code}").strip()
        return self.ended


def read_files(root: str, tests: "Iterable[str]") -> "dict[str, bytes]":
    """The files that hold the tests, as they are now."""
    found = {}
    for name in dict.fromkeys(test.split("::")[0] for test in tests):
        try:
            descriptor = os.open(os.path.join(root, name), os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            found[name] = read_all(descriptor)
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return found


def functions_of(value: "Any") -> "list[Any]":
    """The functions in a function, a static or class method or a property."""
    parts = (value, getattr(value, "__func__", None), getattr(value, "fget", None))
    return [part for part in parts if type(part) is type(functions_of)]


def fingerprint(owners: "Iterable[Any]") -> "list[Mark]":
    """Every function and class that classes and modules hold, and the code that each runs."""
    marks: list[Mark] = []
    for owner in owners:
        held = vars(owner)
        for name, value in list(held.items()):
            if callable(value) or isinstance(value, (staticmethod, classmethod, property)):
                marks.append((f"{owner.__name__}.{name}", held, name, value))
                for function in functions_of(value):
                    marks.append((f"{owner.__name__}.{name}", function, "", function.__code__))
    return marks


def differences(marks: "list[Mark]") -> "list[str]":
    """Names whose function, or its code, is another than it was."""
    found = []
    for label, held, name, value in marks:
        if (held.get(name, marks) if name else held.__code__) is not value:
            found.append(label)
    return found


def of_builtins() -> "list[Mark]":
    """The fingerprint of the built-in names that assertions lean on."""
    return [(f"builtins.{name}", vars(builtins), name, getattr(builtins, name)) for name in BUILTINS]


class Watch:
    """Tells once when a part of the test framework, or what it leans on, is no longer what it was."""

    def __init__(self, marks: "list[Mark]", report: "Report") -> None:
        self.marks, self.report, self.differences = marks, report, differences
        self.found: list[str] = []

    def look(self, test: str) -> None:
        """After a test, or the import of a file."""
        if not self.found:
            self.found = self.differences(self.marks)
            if self.found:
                self.report("changed", "error", test, self.found[0])


def run_split(
    request: bytes, prepare: "Callable[[], Any]", work: "Callable[[Any, Any, Report, str], tuple[str, str]]"
) -> None:
    """Report a run of tests.

    Args:
        request: a marshalled (root, import directories, arguments, test ids). The nonce follows on standard input.
        prepare: imports the test framework, in the worker, before anything of the repository can be imported.
        work: runs the tests, in the worker: request, what `prepare` gave, the function that tells, and the filter's
            state -> status and detail of the end. It must tell "begin" first.
    """
    asked = marshal.loads(request)
    reporter, hidden = os.getpid(), hide()
    pipe, end = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(pipe)
        be_worker(asked, reporter if hidden else 0, end, prepare, work)
    os.close(end)
    before = read_files(asked[0], asked[3])
    signed = Reporter(read_all(0).decode("ascii"), worker, pipe)
    verdict = signed.relay()
    if read_files(asked[0], asked[3]) != before and not verdict.startswith("incomplete"):
        verdict = encode("", "tampered", "", "a test file was changed while its tests ran").strip()
    if not signed.broken:
        signed.write(f"end {verdict}\n")
    os._exit(0)


def be_worker(asked: "Any", reporter: int, pipe: int, prepare: "Any", work: "Any") -> None:
    """Run the tests and end. Standard input is empty and the channel closed before anything is imported."""
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    for descriptor in (null, CHANNEL):
        os.close(descriptor)
    os.setsid()
    report, leave = make_report(pipe), os._exit
    try:
        prepared = prepare()
    except ImportError as error:
        report("broken", "error", "", f"the test framework cannot be imported: {error}")
        leave(3)
    guarded = guard(reporter) if reporter else False
    status, detail = work(asked, prepared, report, "guarded" if guarded else "unguarded")
    report("end", status, "", detail)
    leave(0)
