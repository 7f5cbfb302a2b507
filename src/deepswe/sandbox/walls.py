"""A sandbox's walls, built by a forked process around itself: what bubblewrap would do for the same arguments.

Starting an interpreter inside every sandbox costs as much as all its namespaces and mounts together. So the launcher,
which runs one already, clones itself into new namespaces; the child builds the view, drops every right, and goes on as
the resident server and process 1. Bubblewrap's arguments stay the one description of a view: they are read here, and a
list with an option that is not known exactly is refused, so that the launcher leaves it to bubblewrap.

The order follows bubblewrap (`bubblewrap.c`): user namespace with id 0 that owns all others, mounts, pivot_root(2), a
second user namespace without rights over the first, capabilities, no_new_privs, the system call filter.

Imports little (no dataclasses): a child copies the page tables of all that the launcher has loaded.
"""

from __future__ import annotations

import os
import posixpath
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from deepswe.sandbox import server, syscalls
from deepswe.sandbox.syscalls import NO_DEVICES, NO_SUID, READ_ONLY

NAMESPACES = (
    syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
)
"""All but the control group's, which is left when the child has entered its groups."""
_APART = ("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
_SWITCHES = frozenset((*_APART, "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"))
"""Options without a value, all of which are done, and all of which must be asked for."""
_VALUES = {"--cap-drop": "ALL", "--seccomp": "4", "--uid": None, "--gid": None, "--hostname": None}
"""Options with one value that must be asked for, and the value where only one is known."""
_MOUNTS = {
    "--ro-bind": 2,
    "--ro-bind-try": 2,
    "--bind": 2,
    "--symlink": 2,
    "--proc": 1,
    "--dev": 1,
    "--remount-ro": 1,
    "--overlay-src": 1,
    "--overlay": 3,
}
"""Options that build the view -> number of values."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "core": "/proc/kcore",
    "ptmx": "pts/ptmx",
}

Step = tuple[str, tuple[str, ...]]


class NotKnown(Exception):
    """Bubblewrap's arguments ask for something that is not done here."""


class Plan(NamedTuple):
    """What bubblewrap's arguments say.

    Attributes:
        uid, gid, hostname: in the sandbox.
        steps: the options that build the view, in their order.
    """

    uid: int
    gid: int
    hostname: str
    steps: tuple[Step, ...]


def read_plan(arguments: Sequence[str]) -> Plan:
    """Understand a whole list of bubblewrap's arguments, without its program and its command.

    Raises:
        NotKnown: an option is not known, or one of those that make a sandbox safe is missing.
    """
    counts = {**dict.fromkeys(_SWITCHES, 0), **dict.fromkeys(_VALUES, 1), **_MOUNTS}
    options = _split(arguments, counts)
    values = {option: words[0] for option, words in options if option in _VALUES}
    missing = sorted((_SWITCHES | set(_VALUES)) - {option for option, _ in options})
    if missing:
        raise NotKnown(f"bubblewrap's options {missing} are not asked for")
    odd = [option for option, only in _VALUES.items() if only is not None and values[option] != only]
    if odd:
        raise NotKnown(f"of bubblewrap's options {odd} the value is not known")
    return Plan(
        int(values["--uid"]),
        int(values["--gid"]),
        values["--hostname"],
        tuple(step for step in options if step[0] in _MOUNTS),
    )


def read_steps(arguments: Sequence[str]) -> tuple[Step, ...]:
    """The options of one sandbox's own directories.

    Raises:
        NotKnown: one of them is none of these.
    """
    return _split(arguments, _MOUNTS)


def _split(arguments: Sequence[str], counts: Mapping[str, int]) -> tuple[Step, ...]:
    """Options with their values; `counts` tells how many each has."""
    options: list[Step] = []
    at = 0
    while at < len(arguments):
        option = arguments[at]
        if option not in counts or at + counts[option] >= len(arguments):
            raise NotKnown(f"bubblewrap's option {option!r} is not known, or lacks values")
        options.append((option, tuple(arguments[at + 1 : at + 1 + counts[option]])))
        at += 1 + counts[option]
    return tuple(options)


class Template:
    """The mounts that all sandboxes of a pool share, made once in the launcher's mount namespace and copied by each."""

    def __init__(self, plan: Plan, place: str, upper: str) -> None:
        """Make them.

        Args:
            plan: of all sandboxes.
            place: an empty directory.
            upper: what lies below it belongs to each sandbox alone.

        Raises:
            OSError: this kernel, or this user, cannot.
        """
        self._place = place
        self._made = 0
        self._trees: dict[str, str] = {}
        """Outermost target -> where its tree is."""
        self.steps: list[Step] = []
        """What each sandbox does; `tree` copies one of ours."""
        syscalls.mount("tmpfs", place, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=700")
        for option, values in plan.steps:
            if option in ("--ro-bind", "--ro-bind-try") and not is_below(values[0], upper):
                self._share(option, *values)
            elif option == "--dev":
                self._devices(values[0])
            else:
                self.steps.append((option, values))

    def _share(self, option: str, source: str, target: str) -> None:
        if option == "--ro-bind-try" and not os.path.isdir(source):
            return
        outer = next((known for known in self._trees if is_below(target, known)), None)
        place = self._trees[outer] + target.removeprefix(outer) if outer else self._new(target)
        bind(source, os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW), READ_ONLY | NO_SUID | NO_DEVICES)

    def _new(self, target: str) -> str:
        self._made += 1
        place = f"{self._place}/{self._made}"
        os.mkdir(place)
        self._trees[target] = place
        self.steps.append(("tree", (place, target)))
        return place

    def _devices(self, target: str) -> None:
        """A /dev without what belongs to each sandbox: its terminals."""
        place = self._new(target)
        syscalls.mount("tmpfs", place, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=755")
        for name in _DEVICES:
            os.close(os.open(f"{place}/{name}", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600))
            bind(f"/dev/{name}", os.open(f"{place}/{name}", os.O_PATH), NO_SUID)
        for name, value in _DEVICE_LINKS.items():
            os.symlink(value, f"{place}/{name}")
        for name in ("pts", "shm"):
            os.mkdir(f"{place}/{name}")
        self.steps.append(("devpts", (target + "/pts",)))


def is_below(path: str, directory: str) -> bool:
    """Whether a path is in a directory, by its name."""
    return posixpath.normpath(path).startswith(posixpath.normpath(directory).rstrip("/") + "/")


def bind(source: str, place: int, attributes: int) -> None:
    """Show a directory or file of the host at a descriptor, which is closed; restricted before it can be seen."""
    tree = syscalls.copy_tree(source)
    try:
        if attributes:
            syscalls.restrict(tree, attributes, below=True)
        syscalls.attach(tree, place)
    finally:
        os.close(tree)
        os.close(place)


class View:
    """The file system of one sandbox while it is built, below a root of its own."""

    def __init__(self, place: str) -> None:
        """Begin with an empty tmpfs at `place`."""
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
        syscalls.mount("tmpfs", place, "tmpfs", flags, "mode=755,size=1m")
        self.root = os.open(place, os.O_PATH | os.O_DIRECTORY)
        self._lowers: list[str] = []

    def build(self, steps: Sequence[Step]) -> None:
        """Do what bubblewrap's options say, in their order."""
        for option, values in steps:
            if option == "tree":
                bind(values[0], self.directory(values[1]), 0)
            elif option == "--bind":
                bind(values[0], self.directory(values[1]), NO_SUID | NO_DEVICES)
            elif option in ("--ro-bind", "--ro-bind-try"):
                bind(values[0], self.directory(values[1]), READ_ONLY | NO_SUID | NO_DEVICES)
            elif option == "--symlink":
                self.link(*values)
            elif option == "--remount-ro":
                self.close(values[0])
            elif option == "--overlay-src":
                self._lowers.append(values[0])
            elif option == "--overlay":
                self.overlay(*values)
            else:
                self.mount(option.removeprefix("--"), values[0])

    def directory(self, path: str) -> int:
        """A directory in the view as a descriptor, made where it is missing."""
        try:
            return syscalls.open_inside(self.root, path)
        except FileNotFoundError:
            above = self.directory(posixpath.dirname(path))
        try:
            os.mkdir(posixpath.basename(path), 0o755, dir_fd=above)
        except OSError as error:
            raise OSError(error.errno, f"cannot make {path} in the sandbox: {error.strerror}") from error
        finally:
            os.close(above)
        return syscalls.open_inside(self.root, path)

    def link(self, value: str, path: str) -> None:
        """A symbolic link."""
        above = self.directory(posixpath.dirname(path))
        try:
            os.symlink(value, posixpath.basename(path), dir_fd=above)
        finally:
            os.close(above)

    def close(self, path: str) -> None:
        """Make the mount at `path`, and no other, read-only."""
        place = syscalls.open_inside(self.root, path)
        syscalls.restrict(place, READ_ONLY, below=False)
        os.close(place)

    def overlay(self, upper: str, work: str, path: str) -> None:
        """A copy-on-write view of the directories named before."""
        lowers = ":".join(_escape(lower) for lower in reversed(self._lowers))
        self._lowers.clear()
        options = f"upperdir={_escape(upper)},workdir={_escape(work)},lowerdir={lowers},userxattr"
        self._mount("overlay", path, syscalls.MS_NOSUID | syscalls.MS_NODEV, options)

    def mount(self, kind: str, path: str) -> None:
        """A new `proc` or `devpts`."""
        if kind == "proc":
            self._mount(kind, path, syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC, "")
        elif kind == "devpts":
            self._mount(kind, path, syscalls.MS_NOSUID | syscalls.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
        else:
            raise OSError(22, f"no {kind} can be mounted on {path}")

    def _mount(self, kind: str, path: str, flags: int, options: str) -> None:
        place = self.directory(path)
        syscalls.mount(kind, f"/proc/self/fd/{place}", kind, flags, options)
        os.close(place)


def _escape(path: str) -> str:
    """A path within overlay's options."""
    return "".join("\\" + letter if letter in "\\,:" else letter for letter in path)


class Builder(NamedTuple):
    """What a child needs to build its walls. Made once by the launcher, before any child.

    Attributes:
        plan: of all sandboxes.
        template: their shared mounts.
        upper: where a sandbox's tmpfs is mounted.
        root: where its view is built.
        rules: the system call filter.
        uid, gid: of the launcher.
    """

    plan: Plan
    template: Template
    upper: str
    root: str
    rules: bytes
    uid: int
    gid: int

    def enter(
        self, launcher: int, cgroups: Sequence[str], options: str, directories: Mapping[str, int], steps: Sequence[Step]
    ) -> None:
        """In a child cloned with `NAMESPACES`: from here on it is inside, and has no right to get out.

        Descriptors 0 to 3 stay; all others are closed.

        Args:
            launcher: process id of the parent.
            cgroups: files to enter control groups by.
            options: of its tmpfs.
            directories: name -> mode, in that tmpfs.
            steps: of its own directories.

        Raises:
            OSError: it could not; the process must end at once.
        """
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
        die_with(launcher, proc)
        os.setsid()
        for path in cgroups:
            write(path, "0")
        map_ids(proc, 0, self.uid, 0, self.gid)
        leave_control_group()
        syscalls.raise_loopback()
        syscalls.name_host(self.plan.hostname)
        syscalls.mount("tmpfs", self.upper, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
        for name, mode in directories.items():
            os.mkdir(f"{self.upper}/{name}")
            os.chmod(f"{self.upper}/{name}", mode)
        view = View(self.root)
        view.build((*self.template.steps, *steps))
        view.close("/")
        syscalls.enter_root(view.root)
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        map_ids(proc, self.plan.uid, 0, self.plan.gid, 0)
        syscalls.drop_capabilities()
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        die_with(launcher, proc)  # again: a change of rights forgets it
        syscalls.close_from(server.CONTROL + 1)
        syscalls.filter_calls(self.rules)


def die_with(parent: int, proc: int) -> None:
    """Have the kernel kill this process when its parent dies; fails where it is dead already.

    Args:
        parent: its process id.
        proc: descriptor of the parent's /proc; getppid(2) does not see out of a process namespace.
    """
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    descriptor = os.open("self/stat", os.O_RDONLY, dir_fd=proc)
    words = os.read(descriptor, 4096).rpartition(b")")[2].split()
    os.close(descriptor)
    if int(words[1]) != parent:
        raise OSError(3, "the launcher is gone")


def map_ids(proc: int, uid: int, outer_uid: int, gid: int, outer_gid: int) -> None:
    """Give this process's new user namespace one user and one group; see user_namespaces(7)."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {outer_uid} 1"),
        ("gid_map", f"{gid} {outer_gid} 1"),
    ):
        descriptor = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def leave_control_group() -> None:
    """A control group namespace of its own, where the kernel has them (as `--unshare-cgroup-try`)."""
    try:
        syscalls.unshare(syscalls.CLONE_NEWCGROUP)
    except OSError as error:
        if error.errno != 22:
            raise


def write(path: str, text: str) -> None:
    """Write to a file of the kernel's."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
