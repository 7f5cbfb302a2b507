"""The filter, run by a small interpreter of classic BPF: what the kernel would decide, without the kernel."""

import errno
import struct

import pytest

from deepswe.errors import SandboxUnavailable
from deepswe.sandbox import seccomp

ALLOW = 0x7FFF0000
KILL = 0x80000000


def decide(code: bytes, *, arch: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    data = struct.pack("=IIQ6Q", number, arch, 0, *(arguments + (0,) * 6)[:6])
    program = list(struct.iter_unpack("=HBBI", code))
    accumulator, at = 0, 0
    while True:
        operation, if_true, if_false, value = program[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif operation == 0x06:
            return value
        else:
            truth = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[operation]
            at += if_true if truth else if_false


def refusal(code: int) -> int:
    return 0x00050000 | code


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_nothing_changes_the_limits_or_the_scheduling_of_process_1_and_anything_its_own(machine):
    table, code = seccomp.ARCHITECTURES[machine], seccomp.program(machine)
    assert {"prlimit64", "sched_setaffinity"} < set(table.aimed)
    for name, number in table.aimed.items():
        assert decide(code, arch=table.audit, number=number, arguments=(1,)) == refusal(errno.EPERM), name
        for own in (0, 2, 1000):
            assert decide(code, arch=table.audit, number=number, arguments=(own,)) == ALLOW, name


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_each_denied_call_fails_with_eperm_and_an_ordinary_one_passes(machine):
    table, code = seccomp.ARCHITECTURES[machine], seccomp.program(machine)
    for name, number in table.denied.items():
        assert decide(code, arch=table.audit, number=number) == refusal(errno.EPERM), name
    for name, number in table.absent.items():
        assert decide(code, arch=table.audit, number=number) == refusal(errno.ENOSYS), name
    read, openat = {"x86_64": (0, 257), "aarch64": (63, 56)}[machine]
    assert decide(code, arch=table.audit, number=read) == ALLOW
    assert decide(code, arch=table.audit, number=openat) == ALLOW


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_clone_is_refused_only_with_namespace_flags(machine):
    table, code = seccomp.ARCHITECTURES[machine], seccomp.program(machine)
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        verdict = decide(code, arch=table.audit, number=table.clone, arguments=(flag | 17,))
        assert verdict == refusal(errno.EPERM), hex(flag)
    thread = 0x3D0F00  # what a C library passes for a new thread
    assert decide(code, arch=table.audit, number=table.clone, arguments=(thread,)) == ALLOW
    assert decide(code, arch=table.audit, number=table.clone, arguments=(17,)) == ALLOW


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_sockets_are_allowed_by_family(machine):
    table, code = seccomp.ARCHITECTURES[machine], seccomp.program(machine)
    allowed = {
        family
        for family in range(50)
        if decide(code, arch=table.audit, number=table.socket, arguments=(family,)) == ALLOW
    }
    assert allowed == {1, 2, 10, 16}
    assert decide(code, arch=table.audit, number=table.socket, arguments=(40,)) == refusal(errno.EAFNOSUPPORT)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_sockets_are_allowed_by_protocol(machine):
    table, code = seccomp.ARCHITECTURES[machine], seccomp.program(machine)

    def verdict(family, protocol):
        return decide(code, arch=table.audit, number=table.socket, arguments=(family, 1, protocol))

    for family in (2, 10):
        allowed = {protocol for protocol in range(300) if verdict(family, protocol) == ALLOW}
        assert allowed == {0, 1, 6, 17, 58}
        assert verdict(family, 132) == refusal(errno.EPROTONOSUPPORT)
    assert {protocol for protocol in range(30) if verdict(16, protocol) == ALLOW} == {0}
    assert verdict(1, 5) == ALLOW


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_pairs_of_sockets_are_local_only(machine):
    table, code = seccomp.ARCHITECTURES[machine], seccomp.program(machine)
    allowed = {
        family
        for family in range(50)
        if decide(code, arch=table.audit, number=table.socketpair, arguments=(family,)) == ALLOW
    }
    assert allowed == {1}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_typing_into_a_terminal_is_refused_and_other_ioctls_pass(machine):
    table, code = seccomp.ARCHITECTURES[machine], seccomp.program(machine)
    assert decide(code, arch=table.audit, number=table.ioctl, arguments=(0, 0x5412)) == refusal(errno.EPERM)
    assert decide(code, arch=table.audit, number=table.ioctl, arguments=(0, 0x541C)) == refusal(errno.EPERM)
    assert decide(code, arch=table.audit, number=table.ioctl, arguments=(0, 0x5413)) == ALLOW


def test_foreign_calling_conventions_are_refused():
    code, audit = seccomp.program("x86_64"), seccomp.ARCHITECTURES["x86_64"].audit
    assert decide(code, arch=0x40000003, number=1) == KILL
    assert decide(code, arch=audit, number=0x40000000 + 101) == refusal(errno.ENOSYS)


def test_unknown_machine_names_the_known_ones():
    with pytest.raises(SandboxUnavailable, match="x86_64, aarch64, not 'vax'"):
        seccomp.program("vax")
