"""What is asked of Docker or Podman for one sandbox: the container, its mounts and its labels. Pure but for reading
layers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from deepswe.config import ContainerConfig
from deepswe.errors import SandboxStartError, SandboxUnsupported
from deepswe.sandbox.base import EXPIRES, OWNER, RUN, TASK, Layer, Limits, SandboxRecord, SandboxSpec
from deepswe.sandbox.owner import judge

HOME = "/home/agent"
BUNDLE = "/run/deepswe-python"
"""Where an interpreter that the config brings is shown."""
PREFIX = "deepswe."
"""Of our labels: run, task, owner, expires; and of every other label of a spec."""
MARK = "deepswe.sandbox"
"""Label of everything of ours; its value is the sandbox's name."""
DEFAULT_USER = "1000:1000"
PURPOSE, GRADE = "purpose", "grade"
"""The label of a spec that says what a sandbox is for, and its value where the work is graded."""
FILE_RIGHTS = ("CHOWN", "DAC_OVERRIDE", "FOWNER")
"""What root keeps in a task's own image: rights over its files, which may belong to others or be closed to writing."""
_INODES_PER_MIB = 256
_PAGE = 4096
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Layout:
    """Conventions of a family of task images. Chosen by config, never guessed from a name.

    Attributes:
        path: directories that come first in PATH.
        env: variables of every command.
        removed: paths that hold tests or answers; removed at the start of every sandbox that does not grade.
    """

    path: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


_CONDA = Layout(
    path=("/opt/miniconda3/envs/testbed/bin", "/opt/miniconda3/condabin"),
    env={"CONDA_DEFAULT_ENV": "testbed", "CONDA_PREFIX": "/opt/miniconda3/envs/testbed", "CONDA_SHLVL": "1"},
)
LAYOUTS: Mapping[str, Layout] = {
    "plain": Layout(),
    "r2e": Layout(
        path=("/testbed/.venv/bin", "/root/.local/bin", "/root/.cargo/bin"),
        env={"VIRTUAL_ENV": "/testbed/.venv"},
        removed=("/testbed/run_tests.sh", "/testbed/r2e_tests", "/r2e_tests", "/root/r2e_tests", "/root/run_tests.sh"),
    ),
    "swebench": _CONDA,
    "swesmith": _CONDA,
}
"""The environments lie where the published images have them; the repository at /testbed in all of them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one sandbox is to be.

    Attributes:
        image: its name.
        own: the image is the task's, with files of its own in the working directory; else it is the default one.
        user: "UID:GID".
        limits: as asked for.
        tmpfs: target -> size in MiB, of private writable directories.
        binds: (source on the engine's machine, target) shown read-only.
        volumes: (name of a volume, target) shown read-only.
        hidden: directories covered by an empty one.
        opened: what is shown below /root, relative to it, to a user who may not pass through the image's own /root.
        copied: writable layers whose files are copied in, with their sizes in MiB.
        read_only: the image's files cannot be changed.
    """

    image: str
    own: bool
    user: str
    limits: Limits
    tmpfs: Mapping[str, int]
    binds: tuple[tuple[str, str], ...] = ()
    volumes: tuple[tuple[str, str], ...] = ()
    hidden: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    copied: tuple[tuple[Layer, int], ...] = ()
    read_only: bool = True

    @property
    def memory_mib(self) -> int:
        """Files in memory count against the bound on memory; what was copied in is not the agent's."""
        return self.limits.memory_mib + sum(size for _, size in self.copied)


def disk_mib(limits: Limits) -> int:
    """The bound on each private directory: it lives in memory, and must leave a quarter of that to the processes."""
    return max(1, min(limits.disk_mib, limits.memory_mib * 3 // 4))


def make_plan(
    spec: SandboxSpec,
    config: ContainerConfig,
    default_image: str,
    sizes: Mapping[Path, int],
    shown: Mapping[Path, str],
) -> Plan:
    """Decide what a sandbox shows and may write.

    Args:
        spec: what to start.
        config: the recipe's section.
        default_image: for a spec that names none; a spec that names it has no image of its own either.
        sizes: source of each writable layer -> MiB.
        shown: source of what is not mounted from this machine -> name of the volume that holds it.

    Raises:
        SandboxUnsupported: a target that cannot be.
    """
    own = spec.image not in ("", default_image)
    user = config.user or ("0:0" if own else DEFAULT_USER)
    room = disk_mib(spec.limits)
    tmpfs = {"/tmp": room, "/var/tmp": room, HOME: room}
    copied = []
    pairs: list[tuple[Path, str]] = []
    hidden: list[str] = []
    for layer in spec.layers:
        check_target(layer.target)
        if layer.writable:
            copied.append((layer, sizes[layer.source]))
            tmpfs[layer.target] = room + sizes[layer.source]
        else:
            pairs.append((layer.source, layer.target))
            prefix = interpreter_of(layer.source)
            if prefix is not None and (prefix, str(prefix)) not in pairs:
                pairs.append((prefix, str(prefix)))
                hidden += [str(path) for path in sorted(prefix.glob("lib/python*/site-packages"))]
    check_target(spec.workdir)
    if not own and not _inside(spec.workdir, [*tmpfs, *(layer.target for layer in spec.layers)]):
        tmpfs[spec.workdir] = room
    if config.interpreter:
        pairs.append((Path(config.interpreter), BUNDLE))
    closed = [target for _, target in pairs if _inside(target, ["/root"])] if user.split(":")[0] != "0" else []
    opened = tuple(target.removeprefix("/root/") for target in closed)
    return Plan(
        image=spec.image or default_image,
        own=own,
        user=user,
        limits=spec.limits,
        tmpfs=tmpfs,
        binds=tuple((str(source.resolve()), target) for source, target in pairs if source not in shown),
        volumes=tuple((shown[source], target) for source, target in pairs if source in shown),
        hidden=tuple(hidden),
        opened=opened,
        copied=tuple(copied),
        read_only=config.read_only and not own,
    )


def check_target(target: str) -> None:
    """Refuse a directory that no sandbox can have.

    Raises:
        SandboxUnsupported: naming it.
    """
    path = PurePosixPath(target)
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2 or path.parts[1] in ("proc", "dev", "sys"):
        raise SandboxUnsupported(
            f"{target!r} cannot be a directory of a sandbox; give an absolute path such as /testbed"
        )


def _inside(target: str, directories: Sequence[str]) -> bool:
    return any(PurePosixPath(target).is_relative_to(directory) for directory in directories)


def interpreter_of(source: Path) -> Path | None:
    """The installation that a virtual environment needs besides itself, where that is not the system's own.

    Raises:
        SandboxStartError: its `pyvenv.cfg` names none.
    """
    try:
        lines = (source / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    settings = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
    if not settings.get("home"):
        raise SandboxStartError(f"{source}/pyvenv.cfg names no home; build the environment again")
    prefix = Path(os.path.realpath(settings["home"])).parent
    return None if prefix in (Path("/"), Path("/usr")) else prefix


def size_mib(source: Path) -> int:
    """MiB that a tree takes in memory, rounded up."""
    pages = 0
    for directory, names, files in os.walk(source):
        pages += len(names)
        pages += sum(1 + os.lstat(os.path.join(directory, name)).st_size // _PAGE for name in files)
    return 1 + pages * _PAGE // (1 << 20)


def container_body(
    name: str, spec: SandboxSpec, plan: Plan, command: Sequence[str], config: ContainerConfig, engine: str
) -> dict[str, Any]:
    """The request that makes the container of one sandbox.

    Args:
        name: the pool's.
        spec, plan: what to start.
        command: of process 1.
        config: the recipe's section.
        engine: "docker" or "podman", which differ in options of a tmpfs.
    """
    return {
        "Image": plan.image,
        "Entrypoint": list(command[:1]),
        "Cmd": list(command[1:]),
        "User": plan.user,
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Env": [f"{name}={value}" for name, value in interpreter_env(config).items()],
        "Labels": labels_of(name, spec.labels),
        "Tty": False,
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "NetworkDisabled": True,
        "StopSignal": "SIGKILL",
        "StopTimeout": 1,
        "Healthcheck": {"Test": ["NONE"]} if engine == "docker" else None,
        "HostConfig": _host_config(plan, config, engine),
    }


def interpreter_env(config: ContainerConfig) -> dict[str, str]:
    """Variables of an interpreter that the config brings: its shared library may be linked by another path."""
    return {"LD_LIBRARY_PATH": f"{BUNDLE}/lib"} if config.interpreter else {}


def _host_config(plan: Plan, config: ContainerConfig, engine: str) -> dict[str, Any]:
    limits = plan.limits
    memory = plan.memory_mib << 20
    made: dict[str, Any] = {
        "AutoRemove": True,
        "NetworkMode": "none",
        "IpcMode": "private",
        "CapDrop": ["ALL"],
        "CapAdd": list(FILE_RIGHTS) if plan.own and plan.user.split(":")[0] == "0" else [],
        "SecurityOpt": ["no-new-privileges"],
        "ReadonlyRootfs": plan.read_only,
        "Memory": memory,
        "MemorySwap": memory,
        "PidsLimit": limits.pids,
        "NanoCpus": int(limits.cpus * 1e9),
        "ShmSize": disk_mib(limits) << 20,
        "LogConfig": {"Type": "none", "Config": {}},
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
        "Tmpfs": _tmpfs(plan, engine),
        "Mounts": [_bind(source, target) for source, target in plan.binds]
        + [_volume(name, target) for name, target in plan.volumes],
    }
    if config.runtime:
        made["Runtime"] = config.runtime
    if config.disk_quota and not plan.read_only:
        made["StorageOpt"] = {"size": f"{limits.disk_mib}M"}
    return made


def _tmpfs(plan: Plan, engine: str) -> dict[str, str]:
    uid, _, gid = plan.user.partition(":")
    owner = f",uid={uid},gid={gid or uid}" if engine == "docker" and uid.isdigit() and (gid or uid).isdigit() else ""
    whole = ",notmpcopyup" if engine == "podman" else ""  # else podman fills it with the image's files
    made = {}
    for target, size in plan.tmpfs.items():
        mode = "1777" if target in ("/tmp", "/var/tmp") or not owner else "755"
        inodes = f",nr_inodes={size * _INODES_PER_MIB}" if engine == "docker" else ""
        made[target] = f"rw,exec,nosuid,nodev,size={size}m,mode={mode}{inodes}{owner}{whole}"
    return made | dict.fromkeys(plan.hidden, f"ro,nosuid,nodev,size=64k,mode=755{whole}")


def _bind(source: str, target: str) -> dict[str, Any]:
    return {
        "Type": "bind",
        "Source": source,
        "Target": target,
        "ReadOnly": True,
        "BindOptions": {"Propagation": "rprivate"},
    }


def _volume(name: str, target: str) -> dict[str, Any]:
    return {"Type": "volume", "Source": name, "Target": target, "ReadOnly": True, "VolumeOptions": {"NoCopy": True}}


def environment(spec: SandboxSpec, plan: Plan, layout: Layout, image_env: Sequence[str]) -> dict[str, str]:
    """What every command of a sandbox sees: the image's variables, ours, the layout's, the spec's.

    Args:
        spec, plan, layout: of the sandbox.
        image_env: `NAME=value`, as the image has them.
    """
    image = {name: value for name, _, value in (item.partition("=") for item in image_env)}
    user = "root" if plan.user.split(":")[0] == "0" else "agent"
    own = {"HOME": HOME, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash", "TERM": "dumb"}
    git = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    made = {"LANG": "C.UTF-8", **image, **own, **git, **layout.env}
    made["PATH"] = ":".join([*layout.path, image.get("PATH") or _PATH])
    return {**made, **spec.env}


def enforced(plan: Plan, info: Mapping[str, Any], config: ContainerConfig) -> dict[str, str]:
    """The limits really in force, by what the engine says of itself.

    Args:
        plan: of the sandbox.
        info: the engine's answer to `info`.
        config: the recipe's section.
    """
    version = str(info.get("CgroupVersion") or "1")
    rootless = any("rootless" in option for option in info.get("SecurityOptions") or ())
    cgroup = f"cgroup v{version}"

    def by(key: str) -> str:
        return cgroup if info.get(key, True) and not (rootless and version == "1") else "none"

    room = f"tmpfs of {disk_mib(plan.limits)} MiB each"
    quota = f"{room}, and storage-opt" if config.disk_quota else "none"
    return {
        "memory_mib": by("MemoryLimit"),
        "pids": by("PidsLimit"),
        "cpus": by("CpuCfsQuota"),
        "disk_mib": room if plan.read_only else quota,
        "output_bytes": "server",
    }


def labels_of(name: str, labels: Mapping[str, str]) -> dict[str, str]:
    """The labels of a container or a volume."""
    return {MARK: name, **{PREFIX + key: value for key, value in labels.items()}}


def read_record(backend: str, name: str, labels: Mapping[str, str], created: float, now: float) -> SandboxRecord:
    """A container or a volume as `deepswe sandbox ls` shows it."""
    text = labels.get(PREFIX + EXPIRES, "")
    expires = float(text) if text.isdigit() else created
    owner = labels.get(PREFIX + OWNER, "")
    return SandboxRecord(
        backend=backend,
        name=name,
        run=labels.get(PREFIX + RUN, ""),
        task=labels.get(PREFIX + TASK, ""),
        owner=owner,
        created=created,
        expires=expires,
        state=judge(owner, expires, now),
    )
