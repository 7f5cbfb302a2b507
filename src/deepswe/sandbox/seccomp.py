"""The system calls that code in a sandbox may not make, as a classic BPF program.

A deny list: what a build, a test run or a shell needs is far more than what it must not have. Denied are the calls that
make or join namespaces, mount, trace or read other processes, load code into the kernel, or open kernel surfaces with a
history of escapes. A denied call fails (EPERM, or ENOSYS where programs fall back); it does not kill.

Numbers: Linux `arch/x86/entry/syscalls/syscall_64.tbl` and `include/uapi/asm-generic/unistd.h`.
"""

from __future__ import annotations

import errno
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import pack

from deepswe.errors import SandboxUnavailable

_LOAD, _EQUAL, _AND_SET, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCH_AT, _ARGUMENT_AT = 0, 4, 16

_NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET (NEWTIME: not for clone)."""

_SERVER = 1
"""The process that a sandbox ends with. The kernel lets its peers change its limits, since they are of one user."""
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
"""The families that may be used. All others, such as AF_VSOCK, AF_ALG and AF_TIPC, are refused."""
_INET_PROTOCOLS = (0, 1, 6, 17, 58)
"""The default, ICMP, TCP, UDP, ICMPv6: asking for another one, such as SCTP, would load its kernel module."""
_ROUTE = 0
"""Of netlink the listing of interfaces alone."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """System call numbers of one machine.

    Attributes:
        audit: the AUDIT_ARCH_* value the kernel reports.
        denied: name -> number of the calls that fail with EPERM.
        absent: name -> number of the calls that fail with ENOSYS, for which programs have a fallback.
        aimed: name -> number of the calls that change another process, by its id; with process 1 they fail with EPERM.
        clone, socket, socketpair, ioctl: numbers of the calls whose arguments are looked at.
        x32_bit: numbers from here on belong to a second table and are all refused; 0 if there is none.
    """

    audit: int
    denied: Mapping[str, int] = field(repr=False)
    absent: Mapping[str, int]
    aimed: Mapping[str, int]
    clone: int
    socket: int
    socketpair: int
    ioctl: int
    x32_bit: int = 0


_SHARED_NEW = {
    "pidfd_getfd": 438,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "set_mempolicy_home_node": 450,
    "open_tree_attr": 467,
}
_SHARED_ABSENT = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "clone3": 435}

ARCHITECTURES: Mapping[str, Architecture] = {
    "x86_64": Architecture(
        audit=0xC000003E,
        denied={
            **_SHARED_NEW,
            "ptrace": 101,
            "syslog": 103,
            "uselib": 134,
            "personality": 135,
            "ustat": 136,
            "sysfs": 139,
            "vhangup": 153,
            "modify_ldt": 154,
            "pivot_root": 155,
            "_sysctl": 156,
            "chroot": 161,
            "acct": 163,
            "settimeofday": 164,
            "mount": 165,
            "umount2": 166,
            "swapon": 167,
            "swapoff": 168,
            "reboot": 169,
            "sethostname": 170,
            "setdomainname": 171,
            "iopl": 172,
            "ioperm": 173,
            "create_module": 174,
            "init_module": 175,
            "delete_module": 176,
            "get_kernel_syms": 177,
            "query_module": 178,
            "quotactl": 179,
            "nfsservctl": 180,
            "lookup_dcookie": 212,
            "clock_settime": 227,
            "mbind": 237,
            "set_mempolicy": 238,
            "kexec_load": 246,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "migrate_pages": 256,
            "unshare": 272,
            "move_pages": 279,
            "perf_event_open": 298,
            "fanotify_init": 300,
            "name_to_handle_at": 303,
            "open_by_handle_at": 304,
            "clock_adjtime": 305,
            "setns": 308,
            "process_vm_readv": 310,
            "process_vm_writev": 311,
            "kcmp": 312,
            "finit_module": 313,
            "kexec_file_load": 320,
            "bpf": 321,
            "userfaultfd": 323,
            "mknod": 133,
        },
        absent=_SHARED_ABSENT,
        aimed={
            "sched_setparam": 142,
            "sched_setscheduler": 144,
            "sched_setaffinity": 203,
            "prlimit64": 302,
            "sched_setattr": 314,
        },
        clone=56,
        socket=41,
        socketpair=53,
        ioctl=16,
        x32_bit=0x40000000,
    ),
    "aarch64": Architecture(
        audit=0xC00000B7,
        denied={
            **_SHARED_NEW,
            "lookup_dcookie": 18,
            "umount2": 39,
            "mount": 40,
            "pivot_root": 41,
            "nfsservctl": 42,
            "chroot": 51,
            "vhangup": 58,
            "quotactl": 60,
            "acct": 89,
            "personality": 92,
            "unshare": 97,
            "kexec_load": 104,
            "init_module": 105,
            "delete_module": 106,
            "clock_settime": 112,
            "syslog": 116,
            "ptrace": 117,
            "reboot": 142,
            "sethostname": 161,
            "setdomainname": 162,
            "settimeofday": 170,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "swapon": 224,
            "swapoff": 225,
            "mbind": 235,
            "set_mempolicy": 237,
            "migrate_pages": 238,
            "move_pages": 239,
            "perf_event_open": 241,
            "fanotify_init": 262,
            "name_to_handle_at": 264,
            "open_by_handle_at": 265,
            "clock_adjtime": 266,
            "setns": 268,
            "process_vm_readv": 270,
            "process_vm_writev": 271,
            "kcmp": 272,
            "finit_module": 273,
            "bpf": 280,
            "userfaultfd": 282,
            "kexec_file_load": 294,
        },
        absent=_SHARED_ABSENT,
        aimed={
            "sched_setparam": 118,
            "sched_setscheduler": 119,
            "sched_setaffinity": 122,
            "prlimit64": 261,
            "sched_setattr": 274,
        },
        clone=220,
        socket=198,
        socketpair=199,
        ioctl=29,
    ),
}


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return pack("=HBBI", code, if_true, if_false, value)


def _refuse(number: int, error: int) -> bytes:
    return _instruction(_EQUAL, number, 0, 1) + _instruction(_RETURN, _ERRNO | error)


def _one_of(values: Sequence[int], beyond: int) -> bytes:
    """Jump over the rest of these comparisons and `beyond` more instructions if the loaded value is one of these."""
    last = len(values) - 1
    return b"".join(_instruction(_EQUAL, value, last - n + beyond, 0) for n, value in enumerate(values))


def _socket_rules(table: Architecture) -> bytes:
    """socket(2) by family and protocol, socketpair(2) by family; the way past both keeps the number loaded."""
    allow = _instruction(_RETURN, _ALLOW)
    no_family = _instruction(_RETURN, _ERRNO | errno.EAFNOSUPPORT)
    no_protocol = _instruction(_RETURN, _ERRNO | errno.EPROTONOSUPPORT)
    family, protocol = _instruction(_LOAD, _ARGUMENT_AT), _instruction(_LOAD, _ARGUMENT_AT + 16)
    netlink = protocol + _one_of((_ROUTE,), 1) + no_protocol + allow
    inet = protocol + _one_of(_INET_PROTOCOLS, 1) + no_protocol + allow
    unix = allow
    size = _instruction_count
    chosen = family + _one_of((_UNIX,), 3 + 1) + _one_of((_INET, _INET6), 1 + 1 + size(unix))
    chosen += _one_of((_NETLINK,), 1 + size(unix) + size(inet)) + no_family
    body = chosen + unix + inet + netlink
    pair = family + _one_of((_UNIX,), 1) + no_family + allow
    code = _instruction(_EQUAL, table.socket, 0, size(body)) + body
    return code + _instruction(_EQUAL, table.socketpair, 0, size(pair)) + pair


def _instruction_count(code: bytes) -> int:
    return len(code) // 8


def program(machine: str = "") -> bytes:
    """The filter, an array of `struct sock_filter`, ready for `bwrap --seccomp`.

    Args:
        machine: as `platform.machine()` names it; this machine if empty.

    Raises:
        SandboxUnavailable: the machine has no table here.
    """
    machine = machine or platform.machine()
    table = ARCHITECTURES.get(machine)
    if table is None:
        known = ", ".join(ARCHITECTURES)
        raise SandboxUnavailable(f"the system call filter knows {known}, not {machine!r}; use another sandbox backend")
    code = _instruction(_LOAD, _ARCH_AT)
    code += _instruction(_EQUAL, table.audit, 1, 0) + _instruction(_RETURN, _KILL)
    code += _instruction(_LOAD, _NUMBER_AT)
    if table.x32_bit:
        code += _instruction(_AT_LEAST, table.x32_bit, 0, 1) + _instruction(_RETURN, _ERRNO | errno.ENOSYS)
    for number in table.denied.values():
        code += _refuse(number, errno.EPERM)
    for number in table.absent.values():
        code += _refuse(number, errno.ENOSYS)
    # Each block looks at one argument of one call and leaves the number loaded for the next block.
    reload_number = _instruction(_LOAD, _NUMBER_AT)
    code += _instruction(_EQUAL, table.clone, 0, 4) + _instruction(_LOAD, _ARGUMENT_AT)
    code += _instruction(_AND_SET, _NAMESPACE_FLAGS, 0, 1) + _instruction(_RETURN, _ERRNO | errno.EPERM) + reload_number
    code += _instruction(_EQUAL, table.ioctl, 0, 5) + _instruction(_LOAD, _ARGUMENT_AT + 8)
    code += _instruction(_EQUAL, _TIOCSTI, 1, 0) + _instruction(_EQUAL, _TIOCLINUX, 0, 1)
    code += _instruction(_RETURN, _ERRNO | errno.EPERM) + reload_number
    for number in table.aimed.values():
        code += _instruction(_EQUAL, number, 0, 4) + _instruction(_LOAD, _ARGUMENT_AT)
        code += _instruction(_EQUAL, _SERVER, 0, 1) + _instruction(_RETURN, _ERRNO | errno.EPERM) + reload_number
    code += _socket_rules(table)
    return code + _instruction(_RETURN, _ALLOW)
