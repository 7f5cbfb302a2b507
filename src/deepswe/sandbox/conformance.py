"""The conformance suite: what every backend does alike, checked on a live one. `deepswe sandbox check` runs it.

A check passes, fails with a reason, or is refused: the backend itself states that it does not honour the point.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import os
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from deepswe.config import SandboxConfig
from deepswe.errors import ConfigError, SandboxDied, SandboxError, SandboxUnsupported
from deepswe.progress import Progress
from deepswe.sandbox.base import Layer, Sandbox
from deepswe.sandbox.checks import (
    WAIT_S,
    Check,
    CheckFailed,
    Ground,
    Refused,
    checks,
    expect,
    is_usable,
    need,
    sh,
    told,
)
from deepswe.sandbox.hostile import HOSTILE
from deepswe.sandbox.pool import SandboxPool
from deepswe.sandbox.served import BATCH_BYTES

CHECK_S = 300.0
"""Longest that one check may take."""
_SECRET = "DEEPSWE_CHECK_SECRET"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one check; `reason` is empty if it passed."""

    check: str
    outcome: Literal["passed", "failed", "refused"]
    reason: str = ""
    seconds: float = 0.0


async def exit_code_and_streams_come_back_apart(ground: Ground, sandbox: Sandbox) -> None:
    """Exit code, stdout and stderr."""
    result = await sh(sandbox, "echo out; echo err >&2; exit 7")
    expect((result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n"), told(result))
    expect(not result.timed_out and 0 <= result.wall_s < WAIT_S, f"wall_s is {result.wall_s}")


async def a_signal_is_128_and_its_number(ground: Ground, sandbox: Sandbox) -> None:
    """139 for a segmentation fault."""
    result = await sh(sandbox, "kill -SEGV $$")
    expect(result.exit_code == 139, told(result))


async def what_cannot_be_started_is_126_or_127(ground: Ground, sandbox: Sandbox) -> None:
    """A missing program, a file without permission, a missing directory."""
    await sandbox.write_files({"/testbed/plain": b"no program"})
    cases: list[tuple[list[str], str | None, int]] = [
        (["no-such-program"], None, 127),
        (["/no/such"], None, 127),
        (["/testbed/plain"], None, 126),
        (["true"], "/missing", 126),
        (["true"], "/testbed/plain", 126),
    ]
    for argv, cwd, code in cases:
        result = await sandbox.exec(argv, timeout_s=WAIT_S, cwd=cwd)
        expect(result.exit_code == code and result.stderr != b"", f"{argv} in {cwd}: {told(result)}")


async def stdin_and_binary_output_are_exact(ground: Ground, sandbox: Sandbox) -> None:
    """Every byte value, beyond the size of a pipe."""
    blob = random.Random(1).randbytes(700_000) + bytes(range(256))
    result = await sandbox.exec(["cat"], timeout_s=WAIT_S, stdin=blob)
    expect(result.stdout == blob, f"cat gives {len(result.stdout)} of {len(blob)} bytes, or others")
    result = await sandbox.exec(["cat"], timeout_s=WAIT_S)
    expect((result.exit_code, result.stdout) == (0, b""), f"without stdin: {told(result)}")


async def arguments_and_environment_are_exact(ground: Ground, sandbox: Sandbox) -> None:
    """Empty, blank, quoted and undecodable words; the call's variables over the spec's."""
    result = await sandbox.exec(["printf", "%s|", "", " ", "\udcff", "$x", "a\nb"], timeout_s=WAIT_S)
    expect(result.stdout == b"| |\xff|$x|a\nb|", told(result))
    spec = replace(ground.spec, env={"CHECK_A": "spec", "CHECK_B": "spec"})
    async with ground.pool.open(spec) as other:
        show = ["sh", "-c", 'printf "%s|%s" "$CHECK_A" "$CHECK_B"']
        result = await other.exec(show, timeout_s=WAIT_S, env={"CHECK_B": "x 'y\n\u00e9"})
        expect(result.stdout.decode() == "spec|x 'y\n\u00e9", told(result))


async def numeric_libraries_start_a_thread_for_each_core_of_the_sandbox(ground: Ground, sandbox: Sandbox) -> None:
    """Of the host's they would start more than `pids` allows; the spec's number goes over it."""
    show = ["sh", "-c", 'printf "%s" "$OMP_NUM_THREADS"']
    result = await sandbox.exec(show, timeout_s=WAIT_S)
    expect(result.stdout == str(math.ceil(ground.spec.limits.cpus)).encode(), told(result))
    async with ground.pool.open(replace(ground.spec, env={"OMP_NUM_THREADS": "3"})) as other:
        result = await other.exec(show, timeout_s=WAIT_S)
        expect(result.stdout == b"3", told(result))


async def a_command_starts_in_its_directory(ground: Ground, sandbox: Sandbox) -> None:
    """The spec's by default."""
    expect((result := await sh(sandbox, "pwd -P")).stdout == b"/testbed\n", told(result))
    expect((result := await sh(sandbox, "pwd -P", cwd="/tmp")).stdout == b"/tmp\n", told(result))


async def the_channel_is_apart_from_the_output(ground: Ground, sandbox: Sandbox) -> None:
    """Descriptor 3, only where it was asked for."""
    result = await sh(sandbox, "head -c 300000 /dev/zero >&3; echo out", channel=True)
    expect((len(result.channel), result.stdout) == (300_000, b"out\n"), f"{len(result.channel)}, {told(result)}")
    result = await sh(sandbox, "(echo x >&3) 2>/dev/null || echo closed")
    expect(result.stdout == b"closed\n", told(result))


async def output_over_its_limit_is_dropped_and_counted(ground: Ground, sandbox: Sandbox) -> None:
    """Both ends are kept."""
    size, limit = 5_000_011, ground.spec.limits.output_bytes
    result = await sh(sandbox, "echo first; head -c 5000000 /dev/zero; echo last")
    expect(len(result.stdout) == limit, f"{len(result.stdout)} bytes are kept of at most {limit}")
    expect(result.stdout_dropped == size - limit, f"{result.stdout_dropped} are said to be dropped")
    ends = result.stdout.startswith(b"first\n") and result.stdout.endswith(b"last\n")
    expect(ends, f"it begins {result.stdout[:10]!r} and ends {result.stdout[-10:]!r}")


async def a_timeout_ends_all_that_the_command_started(ground: Ground, sandbox: Sandbox) -> None:
    """Daemons and processes that ignore TERM, within seconds; the sandbox goes on."""
    script = """trap '' TERM INT HUP
    (setsid sh -c 'trap "" TERM; sleep 4101' &)
    setsid setsid sh -c 'sleep 4102 & sleep 4103' &
    env -i sleep 4104 &
    sleep 4105"""
    started = time.monotonic()
    result = await sh(sandbox, script, timeout_s=1)
    expect(time.monotonic() - started < 30, f"it took {time.monotonic() - started:.0f} s")
    expect((result.exit_code, result.timed_out) == (137, True), told(result))
    expect((left := await _sleepers(sandbox)) == b"", f"left: {left!r}")
    await is_usable(sandbox, "a timeout")


async def a_timeout_spares_another_command(ground: Ground, sandbox: Sandbox) -> None:
    """And what that one started."""
    other = asyncio.ensure_future(sh(sandbox, "(setsid sleep 3; echo child) & wait; echo other"))
    await asyncio.sleep(0.5)
    late = await sh(sandbox, "(setsid sleep 4100 &); sleep 4101", timeout_s=1)
    expect(late.timed_out, told(late))
    expect((left := await _sleepers(sandbox)) == b"", f"left: {left!r}")
    result = await other
    expect((result.exit_code, result.stdout) == (0, b"child\nother\n"), told(result))


async def background_children_live_on_and_do_not_hold_the_command(ground: Ground, sandbox: Sandbox) -> None:
    """Even though they hold its stdout."""
    started = time.monotonic()
    result = await sh(sandbox, "(while sleep 0.1; do echo tick; echo tick >> ticks; done) & echo started")
    expect(time.monotonic() - started < WAIT_S / 2, "the command waited for its background child")
    expect(result.stdout.startswith(b"started"), told(result))
    result = await sh(sandbox, "until test -s ticks && test $(wc -l < ticks) -gt 3; do sleep 0.1; done; echo on")
    expect(result.stdout == b"on\n", told(result))


async def a_cancelled_command_is_ended(ground: Ground, sandbox: Sandbox) -> None:
    """Nobody waits for it any more."""
    task = asyncio.ensure_future(sh(sandbox, "sleep 4106"))
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.wait((task,), timeout=WAIT_S)
    expect(task.cancelled(), "the call went on after it was cancelled")
    left = b"?"
    for _ in range(100):
        left = await _sleepers(sandbox)
        if not left:
            break
        await asyncio.sleep(0.2)
    expect(left == b"", f"left: {left!r}")


async def _sleepers(sandbox: Sandbox) -> bytes:
    """The command lines of processes that a check told to sleep for 41.. s and more."""
    script = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done 2>/dev/null | grep '^sleep 41[0-9][0-9]'"
    return (await sh(sandbox, script)).stdout


async def files_of_any_size_and_name_come_back_exactly(ground: Ground, sandbox: Sandbox) -> None:
    """Big, empty, binary; blanks, quotes, newlines, no UTF-8."""
    files = {
        "/testbed/big.bin": random.Random(2).randbytes(5_000_000),
        "/testbed/a b/\u00e9\U0001f600/'\"$x\\": b"odd",
        "/testbed/new\nline": b"",
        "/testbed/\udcff": b"not utf-8",
        "/testbed/-rf": b"dash",
        "/tmp/check": b"tmp",
    }
    await sandbox.write_files(files)
    for path, data in files.items():
        expect(await sandbox.read_file(path) == data, f"{path!r} came back changed")
    digest = hashlib.sha256(files["/testbed/big.bin"]).hexdigest()
    expect((result := await sh(sandbox, "sha256sum < big.bin")).stdout.decode().startswith(digest), told(result))
    await sandbox.write_files({"/testbed/big.bin": b"short"})
    expect(await sandbox.read_file("/testbed/big.bin") == b"short", "a shorter file keeps its old end")


async def many_files_are_written_in_one_call(ground: Ground, sandbox: Sandbox) -> None:
    """2,000 of them."""
    await sandbox.write_files({f"/testbed/many/{n % 50}/{n}": b"%d" % n for n in range(2000)})
    result = await sh(sandbox, "find many -type f | wc -l")
    expect(result.stdout.strip() == b"2000", told(result))
    expect(await sandbox.read_file("/testbed/many/49/1999") == b"1999", "the last one is wrong")


async def files_of_a_command_are_there_when_it_starts(ground: Ground, sandbox: Sandbox) -> None:
    """Of a few bytes or of many; where one cannot be written, the command is not started."""
    for size in (0, 3, BATCH_BYTES + 1):
        files = {"/testbed/with/it": b"x" * size, "/testbed/beside": b"y"}
        result = await sandbox.exec(["wc", "-c", "with/it", "beside"], timeout_s=WAIT_S, files=files)
        expect(result.stdout.split()[::2][:2] == [b"%d" % size, b"1"], told(result))
    started = sandbox.exec(["touch", "started"], timeout_s=WAIT_S, files={"/testbed/beside/x": b"x"})
    await _raises(OSError, errno.ENOTDIR, "beside/x", started)
    await _raises(FileNotFoundError, 0, "started", sandbox.read_file("/testbed/started"))


async def an_executable_file_runs(ground: Ground, sandbox: Sandbox) -> None:
    """And one that is not, does not."""
    await sandbox.write_files({"/testbed/run": b"#!/bin/sh\necho ran"}, executable=True)
    result = await sandbox.exec(["./run"], timeout_s=WAIT_S)
    expect(result.stdout == b"ran\n", told(result))


async def errors_of_files_are_the_kernels(ground: Ground, sandbox: Sandbox) -> None:
    """By the exception's type and errno."""
    await sh(sandbox, "mkfifo fifo; ln -s loop loop; head -c 100 /dev/zero > hundred; mkdir -p d")
    wanted: list[tuple[str, type[Exception], int]] = [
        ("/testbed/none", FileNotFoundError, 1 << 20),
        ("/testbed/d", IsADirectoryError, 1 << 20),
        ("/testbed/fifo", ValueError, 1 << 20),
        ("/dev/zero", ValueError, 1 << 20),
        ("/testbed/hundred", ValueError, 99),
        ("relative", ValueError, 1 << 20),
    ]
    for path, kind, most in wanted:
        await _raises(kind, 0, path, sandbox.read_file(path, max_bytes=most))
    await _raises(OSError, errno.ELOOP, "/testbed/loop", sandbox.read_file("/testbed/loop"))
    expect(len(await sandbox.read_file("/testbed/hundred", max_bytes=100)) == 100, "100 of at most 100 bytes")
    await _raises(OSError, errno.ENOTDIR, "hundred/x", sandbox.write_files({"/testbed/hundred/x": b"x"}))
    await _raises(OSError, errno.EISDIR, "d", sandbox.write_files({"/testbed/d": b"x"}))


async def _raises(
    kind: type[Exception] | tuple[type[Exception], ...], code: int, what: str, call: Awaitable[object]
) -> None:
    try:
        await call
    except kind as error:
        found = error.errno if isinstance(error, OSError) else 0
        expect(not code or found == code, f"{what} gives errno {found} instead of {code}")
        return
    except OSError as error:
        raise CheckFailed(f"{what} gives {error!r} instead of {kind}") from error
    raise CheckFailed(f"{what} gives no {kind}")


async def links_lead_within_the_sandbox_only(ground: Ground, sandbox: Sandbox) -> None:
    """A link out of the tree ends at the sandbox's own file, or at none."""
    await sandbox.write_files({"/testbed/target": b"before"})
    await sh(sandbox, "ln -s target inside; ln -s /etc/hostname hostname; ln -s ../../../../../etc/passwd up")
    await sandbox.write_files({"/testbed/inside": b"through"})
    expect(await sandbox.read_file("/testbed/target") == b"through", "a write did not follow a link")
    for path in ground.secret_files:
        await sandbox.exec(["ln", "-sf", str(path), "secret"], timeout_s=WAIT_S)
        refused = (FileNotFoundError, PermissionError)  # an image may have a home of root that is closed
        await _raises(refused, 0, f"a link to {path} of this machine", sandbox.read_file("/testbed/secret"))
    own = await sh(sandbox, "cat /etc/passwd")
    expect(await sandbox.read_file("/testbed/up") == own.stdout, "a link upwards shows another /etc/passwd")


async def names_and_text_are_found(ground: Ground, sandbox: Sandbox) -> None:
    """`list_names` and `find_text`."""
    tree = {
        "pkg/a.py": b"one\ntwo words\n",
        "pkg/deep/b.py": b"two words",
        ".hid/x": b"",
        "__pycache__/y": b"two words",
    }
    await sandbox.write_files({f"/testbed/look/{name}": data for name, data in tree.items()})
    names = await sandbox.list_names("/testbed/look", depth=2, timeout_s=WAIT_S)
    expect(sorted(names) == [b"pkg/", b"pkg/a.py", b"pkg/deep/"], f"names: {sorted(names)}")
    result = await sandbox.find_text("two words", "/testbed/look", timeout_s=WAIT_S)
    rows = sorted(result.stdout.splitlines())
    wanted = [b"/testbed/look/pkg/a.py\0002:two words", b"/testbed/look/pkg/deep/b.py\0001:two words"]
    expect(rows == wanted, told(result))
    expect((result := await sandbox.find_text("zwei", "/testbed/look", timeout_s=WAIT_S)).exit_code == 1, told(result))
    expect((result := await sandbox.find_text("zwei", "/none", timeout_s=WAIT_S)).exit_code > 1, told(result))


async def a_layer_is_shown_and_never_written(ground: Ground) -> None:
    """Directories of this machine, read-only and copy-on-write."""
    with tempfile.TemporaryDirectory(prefix="deepswe-check-") as name:
        repository, environment = Path(name, "a,b:c d"), Path(name, "env")
        for path, file in ((repository, "code.py"), (environment, "lib.py")):
            path.mkdir()
            (path / file).write_text(f"{file}\n")
        layers = (Layer(repository, "/testbed", writable=True), Layer(environment, "/opt/env"))
        async with ground.pool.open(replace(ground.spec, layers=layers)) as sandbox:
            result = await sh(sandbox, "cat code.py /opt/env/lib.py; echo new > code.py; echo > added; cat code.py")
            expect(result.stdout == b"code.py\nlib.py\nnew\n", told(result))
            result = await sh(sandbox, "(echo > /opt/env/lib.py) 2>/dev/null || echo refused")
            expect(result.stdout == b"refused\n", f"a read-only layer was written: {told(result)}")
        expect((repository / "code.py").read_text() == "code.py\n", "this machine's file was written")
        expect(not (repository / "added").exists(), "a file was added on this machine")


async def what_a_command_leaves_the_next_one_finds(ground: Ground, sandbox: Sandbox) -> None:
    """Files stay; variables, directory and umask do not."""
    await sh(sandbox, "echo kept > /tmp/kept; cd /; export CHECK_X=1; umask 077")
    result = await sh(sandbox, "cat /tmp/kept; pwd -P; echo [$CHECK_X]; umask")
    expect(result.stdout.split() == [b"kept", b"/testbed", b"[]", b"0022"], told(result))


async def sandboxes_share_nothing(ground: Ground, sandbox: Sandbox) -> None:
    """Neither files nor processes nor network."""
    await sandbox.write_files(dict.fromkeys(("/testbed/own", "/tmp/own"), b"x"))
    sleeping = asyncio.ensure_future(sh(sandbox, "sleep 4107", timeout_s=WAIT_S / 2))
    async with ground.pool.open(ground.spec) as other:
        result = await sh(other, "ls /testbed/own /tmp/own 2>/dev/null; true")
        expect(result.stdout == b"", f"another sandbox shows {result.stdout!r}")
        expect((found := await _sleepers(other)) == b"", f"another sandbox's process is seen: {found!r}")
        expect(other.id != sandbox.id, f"both have the id {other.id}")
    sleeping.cancel()
    await asyncio.wait((sleeping,), timeout=WAIT_S)


async def a_fresh_sandbox_is_clean(ground: Ground) -> None:
    """Whatever the one before it did."""
    for turn in range(2):
        async with ground.pool.open(ground.spec) as sandbox:
            result = await sh(sandbox, "ls -A /tmp; ls -d /testbed/dirt 2>/dev/null; echo; true")
            expect(b"dirt" not in result.stdout, f"in turn {turn} it holds {result.stdout!r}")
            await sh(sandbox, "touch /tmp/dirt /testbed/dirt; (setsid sleep 4108 &)")


async def every_limit_is_accounted_for(ground: Ground, sandbox: Sandbox) -> None:
    """`enforced` names each limit; also what built the walls, and what else than the sandbox closes the network."""
    names = {"memory_mib", "disk_mib", "pids", "cpus", "output_bytes"}
    expect(set(sandbox.enforced) - {"network", "walls"} == names, f"enforced names {sorted(sandbox.enforced)}")


async def processor_time_is_bounded(ground: Ground) -> None:
    """A fifth of a core."""
    spec = replace(ground.spec, limits=replace(ground.spec.limits, cpus=0.2))
    async with ground.pool.open(spec) as sandbox:
        need(sandbox, "cpus")
        result = await sh(sandbox, "timeout -s INT 3 sh -c 'while :; do :; done'; times | tail -1")
        minutes, _, seconds = result.stdout.split()[0].decode().rstrip("s").partition("m")
        used = 60 * float(minutes) + float(seconds)
        expect(used < 1.5, f"3 s at cpus=0.2 took {used} s of processor time")


async def commands_and_files_overlap(ground: Ground, sandbox: Sandbox) -> None:
    """Calls do not wait for each other."""
    await sh(sandbox, "mkfifo a b")
    one, two = await asyncio.gather(sh(sandbox, "echo 1 > a; cat b"), sh(sandbox, "cat a; echo 2 > b"))
    expect((one.stdout, two.stdout) == (b"2\n", b"1\n"), f"{told(one)}; {told(two)}")
    many = asyncio.gather(*(sh(sandbox, f"sleep 0.2; echo {n}") for n in range(16)))
    await sandbox.write_files({f"/testbed/w{n}": b"%d" % n for n in range(16)})
    for n, result in enumerate(await many):
        expect(result.stdout == b"%d\n" % n, told(result))
        expect(await sandbox.read_file(f"/testbed/w{n}") == b"%d" % n, f"file {n}")


async def sandboxes_are_alive_together(ground: Ground) -> None:
    """Eight, or as many as the pool admits."""
    number = min(8, ground.pool.concurrency)
    arrived, everyone = 0, asyncio.Event()

    async def one(position: int) -> bytes:
        nonlocal arrived
        async with ground.pool.open(ground.spec) as sandbox:
            arrived += 1
            if arrived == number:
                everyone.set()
            async with asyncio.timeout(CHECK_S):
                await everyone.wait()
            await sandbox.write_files({"/testbed/n": b"%d" % position})
            return (await sandbox.exec(["cat", "n"], timeout_s=WAIT_S)).stdout

    results = await asyncio.gather(*(one(position) for position in range(number)))
    expect(results == [b"%d" % position for position in range(number)], f"{results}")


Call = Callable[[Sandbox], Awaitable[object]]
CALLS: tuple[tuple[str, Call], ...] = (
    ("exec", lambda sandbox: sandbox.exec(["sleep", "4109"], timeout_s=2 * WAIT_S)),
    ("read_file", lambda sandbox: _read_for_ever(sandbox)),
    ("write_files", lambda sandbox: _write_for_ever(sandbox)),
    ("list_names", lambda sandbox: _list_for_ever(sandbox)),
    ("find_text", lambda sandbox: _find_for_ever(sandbox)),
)
"""Calls of the protocol that go on until the sandbox dies."""


async def _read_for_ever(sandbox: Sandbox) -> None:
    await sandbox.write_files({"/testbed/big": bytes(4 << 20)})
    while True:
        expect(len(await sandbox.read_file("/testbed/big")) == 4 << 20, "a file came back cut off as the sandbox died")


async def _write_for_ever(sandbox: Sandbox) -> None:
    while True:
        await sandbox.write_files({"/testbed/big": bytes(4 << 20)})


async def _list_for_ever(sandbox: Sandbox) -> None:
    while True:
        await sandbox.list_names("/", depth=2, timeout_s=WAIT_S)


async def _find_for_ever(sandbox: Sandbox) -> None:
    while True:
        await sandbox.find_text("no such text", "/etc", timeout_s=WAIT_S)


def _death_during(name: str, call: Call) -> Check:
    async def run(ground: Ground) -> None:
        async with ground.pool.open(ground.spec) as sandbox:
            going = asyncio.ensure_future(call(sandbox))
            try:
                await asyncio.wait((going,), timeout=0.7)
                expect(not going.done(), f"{name} ended before the sandbox did: {_fate(going)}")
                await ground.pool.end(sandbox)
                await asyncio.wait((going,), timeout=WAIT_S)
                expect(going.done(), f"{name} still waits {WAIT_S:.0f} s after the sandbox died")
                expect(isinstance(going.exception(), SandboxDied), f"{name} gives {_fate(going)}, not SandboxDied")
                await _raises(SandboxDied, 0, "exec after death", sandbox.exec(["true"], timeout_s=5))
                await _raises(SandboxDied, 0, "read_file after death", sandbox.read_file("/etc/passwd"))
            finally:
                going.cancel()

    return Check("death", f"death_during_{name}_is_an_error", run)


def _fate(task: asyncio.Future[object]) -> str:
    if task.cancelled() or not task.done():
        return "cancelled" if task.cancelled() else "nothing yet"
    error = task.exception()
    return repr(error) if error is not None else repr(task.result())[:200]


async def the_sandbox_is_gone_after_its_block(ground: Ground) -> None:
    """Calls on it raise, at once."""
    async with ground.pool.open(ground.spec) as sandbox:
        await sh(sandbox, "(setsid sleep 4110 &)")
    started = time.monotonic()
    await _raises(SandboxDied, 0, "exec after the end", sandbox.exec(["true"], timeout_s=5))
    expect(time.monotonic() - started < 10, "the error took more than 10 s")


async def a_cancelled_start_leaves_nothing(ground: Ground) -> None:
    """At any moment; the pool goes on."""
    rng = random.Random(3)

    async def life() -> None:
        async with ground.pool.open(ground.spec) as sandbox:
            await sandbox.exec(["sleep", "0.1"], timeout_s=WAIT_S)

    started = time.monotonic()
    await life()
    usual = time.monotonic() - started
    tasks = [asyncio.ensure_future(life()) for _ in range(4)]
    for task in tasks:
        await asyncio.sleep(rng.uniform(0, usual / 2))
        task.cancel()
    await asyncio.wait(tasks, timeout=WAIT_S)
    await life()
    for _ in range(int(WAIT_S * 10)):
        if ground.pool.alive == 0:
            break
        await asyncio.sleep(0.1)
    expect(ground.pool.alive == 0, f"{ground.pool.alive} sandboxes are still held")


CHECKS: tuple[Check, ...] = (
    *checks(
        "exec",
        exit_code_and_streams_come_back_apart,
        a_signal_is_128_and_its_number,
        what_cannot_be_started_is_126_or_127,
        stdin_and_binary_output_are_exact,
        arguments_and_environment_are_exact,
        numeric_libraries_start_a_thread_for_each_core_of_the_sandbox,
        a_command_starts_in_its_directory,
        the_channel_is_apart_from_the_output,
        output_over_its_limit_is_dropped_and_counted,
    ),
    *checks(
        "files",
        files_of_any_size_and_name_come_back_exactly,
        many_files_are_written_in_one_call,
        files_of_a_command_are_there_when_it_starts,
        an_executable_file_runs,
        errors_of_files_are_the_kernels,
        links_lead_within_the_sandbox_only,
        names_and_text_are_found,
    ),
    Check("files", "a_layer_is_shown_and_never_written", a_layer_is_shown_and_never_written),
    *checks("state", what_a_command_leaves_the_next_one_finds, sandboxes_share_nothing),
    Check("state", "a_fresh_sandbox_is_clean", a_fresh_sandbox_is_clean),
    *checks("limits", every_limit_is_accounted_for),
    Check("limits", "processor_time_is_bounded", processor_time_is_bounded, heavy=True),
    *checks(
        "kill",
        a_timeout_ends_all_that_the_command_started,
        a_timeout_spares_another_command,
        background_children_live_on_and_do_not_hold_the_command,
        a_cancelled_command_is_ended,
    ),
    *checks("concurrency", commands_and_files_overlap),
    Check("concurrency", "sandboxes_are_alive_together", sandboxes_are_alive_together),
    *(_death_during(name, call) for name, call in CALLS),
    Check("death", "the_sandbox_is_gone_after_its_block", the_sandbox_is_gone_after_its_block),
    Check("death", "a_cancelled_start_leaves_nothing", a_cancelled_start_leaves_nothing),
    *HOSTILE,
)


def select(names: Sequence[str], *, quick: bool) -> list[Check]:
    """The checks of these names or groups; all without names.

    Args:
        names: of checks or groups.
        quick: leave out the heavy ones that are not named.

    Raises:
        ConfigError: a name that no check has.
    """
    known = {check.name for check in CHECKS} | {check.group for check in CHECKS}
    for name in names:
        if name not in known:
            groups = ", ".join(dict.fromkeys(check.group for check in CHECKS))
            raise ConfigError(f"no check is named {name!r}; the groups are {groups}")
    chosen = [check for check in CHECKS if not names or check.name in names or check.group in names]
    return [check for check in chosen if not (quick and check.heavy) or check.name in names]


async def run_checks(pool: SandboxPool, chosen: Sequence[Check], progress: Progress, secret: str) -> list[Verdict]:
    """Run checks one after another on a pool."""
    verdicts = []
    progress.begin(f"checking {pool.config.backend}", len(chosen))
    with _secret_files(secret) as files:
        ground = Ground(pool, secret, files)
        for check in chosen:
            verdict = await run_check(check, ground)
            verdicts.append(verdict)
            progress.advance(1, f"{check.group}: {check.name}")
            if verdict.outcome != "passed":
                progress.say(f"{verdict.outcome}: {verdict.check}: {verdict.reason}")
    return verdicts


async def run_check(check: Check, ground: Ground) -> Verdict:
    """Run one check, within its time."""
    started = time.monotonic()
    outcome: Literal["passed", "failed", "refused"] = "failed"
    reason = ""
    try:
        async with asyncio.timeout(CHECK_S):
            await check.run(ground)
        outcome = "passed"
    except (Refused, SandboxUnsupported) as error:
        outcome, reason = "refused", str(error)
    except TimeoutError:
        reason = f"it took more than {CHECK_S:.0f} s"
    except (AssertionError, SandboxError, OSError, ValueError, LookupError) as error:
        reason = str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
    return Verdict(f"{check.group}.{check.name}", outcome, reason, time.monotonic() - started)


def check_backend(
    config: SandboxConfig, progress: Progress, *, names: Sequence[str] = (), quick: bool = False
) -> list[Verdict]:
    """Run the suite on the backend that a recipe chooses. Not inside a running event loop.

    Raises:
        ConfigError: an unknown name.
        SandboxUnavailable: this machine cannot run the backend.
    """
    chosen = select(names, quick=quick)

    async def run() -> list[Verdict]:
        async with SandboxPool(config, run="check") as pool:
            await pool.check()
            return await run_checks(pool, chosen, progress, secret)

    with _secret_environment() as secret:
        return asyncio.run(run())


@contextmanager
def _secret_environment() -> Iterator[str]:
    """A word in the environment that whatever the backend starts could inherit."""
    secret = secrets.token_hex(12)
    os.environ[_SECRET] = secret
    try:
        yield secret
    finally:
        del os.environ[_SECRET]


@contextmanager
def _secret_files(secret: str) -> Iterator[tuple[Path, ...]]:
    """Files of this machine that hold the word: in the home directory, where that can be written, and in /tmp."""
    directories = []
    try:
        for parent in (Path.home(), Path(tempfile.gettempdir())):
            if os.access(parent, os.W_OK):
                directories.append(Path(tempfile.mkdtemp(prefix=".deepswe-check-", dir=parent)))
        files = tuple(directory / "secret" for directory in directories)
        for file in files:
            file.write_text(secret)
        yield files
    finally:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
