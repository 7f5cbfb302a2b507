"""The system calls that make a sandbox's walls, through the C library; imports nothing that costs a start.

Every function raises OSError with the kernel's reason. Numbers and structures: Linux `include/uapi/linux/mount.h`,
`prctl.h`, `capability.h`, `openat2.h`; calls above 400 have one number on all machines. Manual pages: clone(2),
prctl(2), capabilities(7), seccomp(2), pivot_root(2), mount_setattr(2), open_tree(2), openat2(2), close_range(2).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 16384, 1 << 18
MNT_DETACH = 2
READ_ONLY, NO_SUID, NO_DEVICES = 1, 2, 4
"""Attributes of mount_setattr(2)."""
PR_SET_PDEATHSIG, PR_SET_NAME, PR_CAPBSET_READ, PR_CAPBSET_DROP = 1, 15, 23, 24
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 22, 38, 47, 4
SECCOMP_MODE_FILTER = 2
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE, _MOVE_MOUNT, _CLOSE_RANGE, _OPENAT2, _MOUNT_SETATTR = 428, 429, 436, 437, 442
_OPEN_TREE_CLONE, _MOVE_FROM_EMPTY, _MOVE_TO_EMPTY, _RESOLVE_IN_ROOT = 1, 0x04, 0x40, 0x10
_CAPABILITY_VERSION_3 = 0x20080522
_SIOCSIFFLAGS, _IFF_UP, _AF_INET, _SOCK_DGRAM = 0x8914, 1, 2, 2
NUMBERS: Mapping[str, Mapping[str, int]] = {
    "x86_64": {"clone": 56, "pivot_root": 155},
    "aarch64": {"clone": 220, "pivot_root": 41},
}

_libc = ctypes.CDLL(None, use_errno=True)
_locked = ctypes.PyDLL(None, use_errno=True)
"""Calls through it keep the interpreter's lock, so that a child of clone(2) finds it as it was."""


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _call(what: str, number: int, *arguments: int | bytes) -> int:
    words = [ctypes.c_char_p(word) if isinstance(word, bytes) else ctypes.c_long(word) for word in arguments]
    return _check(_libc.syscall(ctypes.c_long(number), *words), what)


def _numbers() -> Mapping[str, int]:
    machine = os.uname().machine
    if machine not in NUMBERS:
        raise OSError(38, f"system call numbers of {machine} are not known")
    return NUMBERS[machine]


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(flags), "unshare")


def clone(flags: int) -> int:
    """clone(2) as a fork into new namespaces: 0 in the child. For a process of one thread."""
    number, child_signal = _numbers()["clone"], 17
    words = (ctypes.c_long(value) for value in (number, flags | child_signal, 0, 0, 0, 0))
    return _check(_locked.syscall(*words), "clone")


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """mount(2)."""
    words = (os.fsencode(source), os.fsencode(target), kind.encode())
    _check(_libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(options)), f"mount {kind} on {target}")


def unmount(target: str) -> None:
    """umount2(2), at once for all who come later."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount2 {target}")


def copy_tree(source: str) -> int:
    """A copy of a directory's mount and all mounts below, attached nowhere (open_tree(2)); its descriptor."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | AT_RECURSIVE
    return _call(f"open_tree {source}", _OPEN_TREE, AT_FDCWD, os.fsencode(source), flags)


def restrict(tree: int, attributes: int, below: bool) -> None:
    """Add attributes to the mount at a descriptor, and to all mounts below it."""
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if below else 0)
    setting = struct.pack("=QQQQ", attributes, 0, 0, 0)
    _call("mount_setattr", _MOUNT_SETATTR, tree, b"", flags, setting_address(setting), len(setting))


def setting_address(data: bytes) -> int:
    """Where the bytes of an object lie; good as long as the object lives."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def attach(tree: int, place: int) -> None:
    """Attach a tree of `copy_tree` on the directory of a descriptor."""
    _call("move_mount", _MOVE_MOUNT, tree, b"", place, b"", _MOVE_FROM_EMPTY | _MOVE_TO_EMPTY)


def open_inside(root: int, path: str) -> int:
    """A directory below `root` as a descriptor; no link or `..` leads out of `root` (openat2(2))."""
    how = struct.pack("=QQQ", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT)
    return _call(f"open {path}", _OPENAT2, root, os.fsencode(path), setting_address(how), len(how))


def enter_root(root: int) -> None:
    """Make the mount at a descriptor the root, and let go of all that was mounted before; see pivot_root(2)."""
    os.fchdir(root)
    _call("pivot_root", _numbers()["pivot_root"], b".", b".")
    unmount(".")
    os.chdir("/")


def prctl(option: int, *arguments: int) -> int:
    """prctl(2)."""
    words = [ctypes.c_ulong(word) for word in (*arguments, 0, 0, 0, 0)[:4]]
    return _check(_libc.prctl(option, *words), f"prctl {option}")


def drop_capabilities() -> None:
    """Empty all five sets of this process, for good."""
    for capability in range(64):
        try:
            present = prctl(PR_CAPBSET_READ, capability)
        except OSError:
            break
        if present:
            prctl(PR_CAPBSET_DROP, capability)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    _check(_libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)), "capset")


def filter_calls(program: bytes) -> None:
    """Install a seccomp filter, an array of `struct sock_filter`; needs PR_SET_NO_NEW_PRIVS."""
    frame = struct.pack("@HP", len(program) // 8, setting_address(program))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, setting_address(frame))


def close_from(first: int) -> None:
    """Close every descriptor from `first` on."""
    _call("close_range", _CLOSE_RANGE, first, 0xFFFFFFFF, 0)


def raise_loopback() -> None:
    """Bring up `lo`; the kernel then gives it its addresses (netdevice(7))."""
    descriptor = _check(_libc.socket(_AF_INET, _SOCK_DGRAM, 0), "socket")
    request = struct.pack("16sh22x", b"lo", _IFF_UP)
    try:
        _check(_libc.ioctl(descriptor, ctypes.c_ulong(_SIOCSIFFLAGS), request), "ioctl lo")
    finally:
        os.close(descriptor)


def name_host(name: str) -> None:
    """sethostname(2)."""
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def name_process(name: bytes) -> None:
    """The process's short name, cut after 15 bytes."""
    prctl(PR_SET_NAME, setting_address(name))


def overwrite(address: int, size: int, text: bytes) -> None:
    """Put `text` and zeros into this process's memory, such as over its arguments."""
    ctypes.memset(address, 0, size)
    ctypes.memmove(address, text, min(len(text), size - 1))
