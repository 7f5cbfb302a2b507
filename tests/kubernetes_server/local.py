"""Containers that are real: bubblewrap makes the namespaces, control groups bound memory and processes.

The "image" is this machine's /usr and Python, whatever its name; a name that begins with `missing/` cannot be pulled,
and one that begins with `no-python/` has no interpreter.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from deepswe.sandbox import seccomp
from deepswe.sandbox.base import Limits
from deepswe.sandbox.cgroups import Cgroups, Group
from deepswe.sandbox.view import find_bwrap, interpreter, interpreter_prefixes

LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
PASSWD = "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n"


class ContainerError(Exception):
    """The container cannot be made; what its status says then."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.waiting = {"reason": reason, "message": message}


def size_of(text: str) -> int:
    """Bytes of a quantity."""
    return int(text[:-2]) * UNITS[text[-2:]] if text[-2:] in UNITS else int(text)


def cpus_of(text: str) -> float:
    return int(text[:-1]) / 1000 if text.endswith("m") else float(text)


_groups: list[Cgroups] = []


def cgroups() -> Cgroups:
    if not _groups:
        _groups.append(Cgroups())
    return _groups[0]


def clear_cgroups() -> None:
    for groups in _groups:
        groups.clear()


class Container:
    def __init__(self, pod: dict[str, Any], directory: Path) -> None:
        self.pod = pod
        self.spec = pod["spec"]["containers"][0]
        self.directory = directory
        self.out_of_memory = False
        self.words = ""
        self.pid = 0
        self.process: asyncio.subprocess.Process | None = None
        self.group: Group | None = None
        self.ended = asyncio.Event()
        self.sessions: set[asyncio.subprocess.Process] = set()

    @property
    def user(self) -> int:
        context = {**self.pod["spec"].get("securityContext", {}), **self.spec.get("securityContext", {})}
        return int(context.get("runAsUser", 0))

    def limits(self) -> Limits:
        asked = self.spec.get("resources", {}).get("limits", {})
        memory = size_of(asked.get("memory", "1024Mi"))
        return Limits(memory_mib=memory >> 20, cpus=cpus_of(asked.get("cpu", "1")), pids=512)

    def environment(self) -> dict[str, str]:
        path = [os.path.dirname(interpreter()), "/usr/local/bin", "/usr/bin", "/bin"]
        made = {"PATH": ":".join(dict.fromkeys(path)), "HOSTNAME": "sandbox", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        return made | {item["name"]: item.get("value", "") for item in self.spec.get("env", [])}

    def argv(self, told: int, rules: int, passwd: int) -> list[str]:
        argv = [str(find_bwrap()), "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net"]
        argv += ["--unshare-cgroup-try", "--hostname", "sandbox", "--die-with-parent", "--new-session", "--as-pid-1"]
        argv += ["--uid", str(self.user), "--gid", str(self.user), "--cap-drop", "ALL", "--clearenv"]
        argv += ["--info-fd", str(told), "--seccomp", str(rules)]
        argv += ["--perms", "0777", "--tmpfs", "/root", "--perms", "0777", "--dir", "/testbed"]
        argv += ["--perms", "1777", "--tmpfs", "/tmp"]
        argv += ["--ro-bind", "/usr", "/usr"]
        for name in LINKS:
            path = Path("/") / name
            argv += ["--symlink", os.readlink(path), str(path)] if path.is_symlink() else []
            argv += ["--ro-bind", str(path), str(path)] if path.is_dir() and not path.is_symlink() else []
        for prefix in interpreter_prefixes():
            argv += ["--ro-bind", prefix, prefix]
        argv += ["--proc", "/proc", "--dev", "/dev", "--perms", "0755", "--dir", "/etc", "--file", str(passwd)]
        argv += ["/etc/passwd"]
        argv += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--ro-bind-try", "/etc/alternatives"]
        argv += ["/etc/alternatives"]
        argv += ["--remount-ro", "/proc", *self.mounts()]
        for name, value in self.environment().items():
            argv += ["--setenv", name, value]
        return [*argv, "--chdir", self.spec.get("workingDir", "/"), "--", *self.command()]

    def command(self) -> list[str]:
        return [*self.spec.get("command", ["sleep", "infinity"]), *self.spec.get("args", [])]

    def mounts(self) -> list[str]:
        volumes = {item["name"]: item.get("emptyDir", {}) for item in self.pod["spec"].get("volumes", [])}
        argv = []
        for mount in self.spec.get("volumeMounts", []):
            size = size_of(volumes[mount["name"]].get("sizeLimit", "256Mi"))
            argv += ["--perms", "0777", "--size", str(size), "--tmpfs", mount["mountPath"]]
        return argv

    async def start(self) -> None:
        image = self.spec["image"]
        if image.startswith("missing/"):
            never = self.spec.get("imagePullPolicy") == "Never"
            raise ContainerError("ErrImageNeverPull" if never else "ImagePullBackOff", f"image {image} is not present")
        program = self.command()[0]
        if image.startswith("no-python/") and "python" in program:
            words = f'exec: "{program}": executable file not found in $PATH'
            raise ContainerError("RunContainerError", f"failed to create containerd task: {words}")
        self.group = cgroups().take(self.limits())
        self.oom_before = self.oom_kills()
        told, tell = os.pipe()
        rules = written(seccomp.program())
        passwd = written(PASSWD.encode())
        entering = " && ".join(f"echo $$ > {shlex.quote(path)}" for path in self.group.entrances) or "true"
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self.process = await asyncio.create_subprocess_exec(
                "sh", "-c", f'{entering} && exec "$@"', "sh", *self.argv(tell, rules, passwd),
                stdin=asyncio.subprocess.DEVNULL, stdout=self.log, stderr=self.log,
                pass_fds=(tell, rules, passwd), start_new_session=True,
            )  # fmt: skip
        finally:
            for descriptor in (tell, rules, passwd):
                os.close(descriptor)
        data = await asyncio.to_thread(read_all, told)
        if not data:
            await self.process.wait()
            self.give()
            raise ContainerError("RunContainerError", f"bubblewrap: {self.tail()}")
        self.pid = json.loads(data)["child-pid"]
        self.watching = asyncio.create_task(self.watch())

    def tail(self) -> str:
        size = self.log.seek(0, 2)
        self.log.seek(max(0, size - 500))
        return self.log.read().decode("utf-8", "replace").strip()

    async def watch(self) -> None:
        assert self.process
        await self.process.wait()
        self.words = self.tail()
        self.log.close()
        self.out_of_memory = self.out_of_memory or (self.process.returncode != 0 and self.oom_kills() > self.oom_before)
        for session in [*self.sessions]:
            if session.returncode is None:  # not session.kill(), which may take the exit code from asyncio's watcher
                with suppress(ProcessLookupError):
                    os.kill(session.pid, signal.SIGKILL)
            await session.wait()
        self.give()
        self.ended.set()

    def oom_kills(self) -> int:
        for directory in self.group.directories if self.group else ():
            for name in ("memory.oom_control", "memory.events"):
                with suppress(OSError):
                    for line in (Path(directory) / name).read_text().splitlines():
                        if line.startswith("oom_kill "):
                            return int(line.split()[1])
        return 0

    def give(self) -> None:
        if self.group is not None:
            cgroups().give(self.group, self.limits())
            self.group = None

    async def wait(self) -> int:
        await self.ended.wait()
        assert self.process
        code = self.process.returncode or 0
        return code if code >= 0 else 128 - code

    async def terminate(self, grace_s: float) -> None:
        """Ask process 1 to end, then make it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        if not self.ended.is_set():
            await asyncio.wait((asyncio.ensure_future(self.ended.wait()),), timeout=grace_s)
        await self.kill()

    async def kill(self) -> None:
        if self.ended.is_set():
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        await self.ended.wait()

    async def cut(self) -> None:
        """The node is gone: nothing moves any more."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGSTOP)

    async def exec(self, command: list[str]) -> asyncio.subprocess.Process:
        """Start a command in the container."""
        program = command[0]
        shown = Path("/") / program.lstrip("/") if program.startswith("/") else None
        found = shown.exists() if shown else any((Path(part) / program).exists() for part in self.path())
        if not found:
            words = f'exec: "{program}": executable file not found in $PATH'
            raise ContainerError("", f"error executing command in container: failed to exec in container: {words}")
        group = self.group
        entering = " && ".join(f"echo $$ > {shlex.quote(path)}" for path in (group.entrances if group else ()))
        enter = ["nsenter", "--target", str(self.pid), "--user", "--preserve-credentials", "--mount", "--pid", "--ipc"]
        enter += ["--uts", "--net", "--wdns=/", "--", "env", "-i"]
        enter += [f"{name}={value}" for name, value in self.environment().items()]
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", f"{entering or 'true'} && exec \"$@\"", "sh", *enter, *command,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self.sessions.add(process)
        return process

    def path(self) -> list[str]:
        return self.environment()["PATH"].split(":")


def written(data: bytes) -> int:
    """A descriptor to read `data` from."""
    descriptor = os.memfd_create("data")
    os.write(descriptor, data)
    os.lseek(descriptor, 0, 0)
    return descriptor


def read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read()
