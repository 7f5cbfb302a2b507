"""What a check of the conformance suite is made of. The checks themselves are in `conformance` and `hostile`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from deepswe.sandbox.base import ExecResult, Limits, Sandbox, SandboxSpec
from deepswe.sandbox.pool import SandboxPool

WAIT_S = 60.0
"""Longest that an ordinary command of a check may take, on a busy machine or a slow cluster."""
LIMITS = Limits(memory_mib=192, disk_mib=32, pids=64, cpus=1.0, output_bytes=1 << 20)


class CheckFailed(AssertionError):
    """The sandbox did not do what the protocol promises; the message says what it did."""


class Refused(Exception):
    """The backend states that it does not honour what the check asks for; the message is its statement."""


@dataclass(frozen=True, slots=True)
class Ground:
    """Where a check runs.

    Attributes:
        pool: opens sandboxes of the backend under check.
        secret: a word in this process's environment and in files of this machine, which no sandbox may show.
        secret_files: those files.
        spec: what checks open unless they say otherwise.
    """

    pool: SandboxPool
    secret: str
    secret_files: tuple[Path, ...] = ()
    spec: SandboxSpec = field(default_factory=lambda: SandboxSpec(limits=LIMITS))


Body = Callable[[Ground], Awaitable[None]]
SandboxBody = Callable[[Ground, Sandbox], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        group: such as "exec" or "hostile".
        name: a claim, in words joined by underscores.
        run: raises `CheckFailed`, `Refused` or `SandboxUnsupported`; any other exception is a failure too.
        heavy: takes more than a few seconds of processor time.
    """

    group: str
    name: str
    run: Body
    heavy: bool = False


def in_one_sandbox(body: SandboxBody) -> Body:
    """The check that opens one fresh sandbox for `body`."""

    async def run(ground: Ground) -> None:
        async with ground.pool.open(ground.spec) as sandbox:
            await body(ground, sandbox)

    return run


def checks(group: str, *bodies: SandboxBody, heavy: bool = False) -> tuple[Check, ...]:
    """A check for each function, of its name, in one fresh sandbox each."""
    return tuple(Check(group, body.__name__, in_one_sandbox(body), heavy) for body in bodies)


def expect(truth: bool, otherwise: str) -> None:
    """Fail the check with the text `otherwise` unless `truth`.

    Raises:
        CheckFailed: it is false.
    """
    if not truth:
        raise CheckFailed(otherwise)


def need(sandbox: Sandbox, limit: str) -> None:
    """Refuse the check where the backend says that it does not enforce a limit.

    Raises:
        Refused: it says so.
    """
    if sandbox.enforced.get(limit, "none") == "none":
        raise Refused(f"limit {limit} is not enforced")


async def sh(
    sandbox: Sandbox, script: str, timeout_s: float = WAIT_S, cwd: str | None = None, channel: bool = False
) -> ExecResult:
    """Run a POSIX shell script."""
    return await sandbox.exec(["sh", "-c", script], timeout_s=timeout_s, cwd=cwd, channel=channel)


async def python(sandbox: Sandbox, program: str, timeout_s: float = WAIT_S) -> ExecResult:
    """Run a Python program of the standard library.

    Raises:
        Refused: the sandbox has no Python.
    """
    result = await sandbox.exec(["python3", "-I", "-S", "-c", program], timeout_s=timeout_s)
    if result.exit_code == 127:
        raise Refused("the image has no python3")
    return result


async def is_usable(sandbox: Sandbox, after: str) -> None:
    """Fail unless a command still runs.

    Raises:
        CheckFailed: it does not.
    """
    result = await sh(sandbox, "echo usable")
    if b"process or memory limit was reached" in result.stderr:  # the server ended what was in the way, and says so
        result = await sh(sandbox, "echo usable")
    expect(result.stdout == b"usable\n", f"after {after} a command gives {told(result)}")


def told(result: ExecResult) -> str:
    """A result in a few words, for a message."""
    late = ", timed out" if result.timed_out else ""
    return f"exit code {result.exit_code}{late}, stdout {result.stdout[-200:]!r}, stderr {result.stderr[-200:]!r}"
