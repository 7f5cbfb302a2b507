"""Docker and Podman: each sandbox a container whose process 1 is the resident server, reached over one attached stream.

Nothing is installed in a container: the server's text is an argument of the image's own python3. A command in a live
sandbox is one frame there and one back. A container ends when its stream does: process 1 leaves at the end of its
input, and the engine removes what has ended. So a supervisor that is killed leaves nothing that runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiodocker
from aiodocker.containers import DockerContainer
from aiodocker.stream import Stream

from deepswe.config import ContainerConfig, SandboxConfig
from deepswe.errors import SandboxDied, SandboxError, SandboxStartError, SandboxUnavailable, SandboxUnsupported
from deepswe.sandbox import container_boot, seccomp
from deepswe.sandbox.base import EXPIRES, TASK, Layer, SandboxRecord, SandboxSpec
from deepswe.sandbox.container_engine import FAILURES, GONE, Engine, EngineName, Images, find_engine
from deepswe.sandbox.container_layers import Store, archives, remove_volume
from deepswe.sandbox.container_spec import (
    BUNDLE,
    GRADE,
    LAYOUTS,
    MARK,
    PURPOSE,
    Plan,
    container_body,
    enforced,
    environment,
    interpreter_env,
    labels_of,
    make_plan,
    read_record,
)
from deepswe.sandbox.served import Answer, ServedSandbox, Wire

DEFAULT_IMAGE = "python:3.11-bookworm"
"""Python and git on Debian; for tasks and recipes that name no image."""
STOP_S = 60.0
VOLUME_S = 30 * 86400.0
"""Lifetime of a volume whose owner cannot be asked; that of one whose owner is dead is over."""
WORDS_BYTES = 2000
SETUP_S = 600.0

_UNPACK = """
import sys, tarfile
options = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
    archive.extractall(sys.argv[1], **options)
"""


class Link:
    """The attached stream of one container: frames in both directions, and the last words of its stderr."""

    def __init__(self, engine: Engine, container: str) -> None:
        """Name it; nothing is opened before `open`."""
        self._docker = engine.connect()
        self._stream: Stream = self._docker.containers.container(container).attach(stdin=True, stdout=True, stderr=True)
        self._outbox = bytearray()
        self._more = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.wire = Wire(self._put, container_boot.seal)
        self.words = ""
        self.ended = asyncio.Event()

    async def open(self) -> None:
        """Attach. The container need not run yet."""
        await self._stream.__aenter__()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    def _put(self, data: bytes) -> None:
        self._outbox += data
        self._more.set()

    async def _read(self) -> None:
        reason = ""
        try:
            while (message := await self._stream.read_out()) is not None:
                if message.stream == 1:
                    self.wire.feed(message.data)
                else:
                    self.words = (self.words + message.data.decode("utf-8", "replace"))[-WORDS_BYTES:]
                if self.wire.lost:
                    break
        except FAILURES as error:
            reason = f"{type(error).__name__}: {error}"
        self._finish(reason)

    async def _write(self) -> None:
        try:
            while True:
                await self._more.wait()
                self._more.clear()
                data, self._outbox = bytes(self._outbox), bytearray()
                await self._stream.write_in(data)
        except FAILURES as error:
            self._finish(f"{type(error).__name__}: {error}")

    def _finish(self, reason: str) -> None:
        self.wire.lose(self.words.strip() or reason or "its stream was closed")
        self.ended.set()

    async def close(self) -> None:
        """End the stream, and with it the container."""
        self._finish("")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(*FAILURES, AssertionError):  # the client asserts a connection that may be gone by now
            await self._stream.close()
        await self._docker.close()


class ContainerSandbox(ServedSandbox):
    """One live container; see `deepswe.sandbox.base.Sandbox`. Made by `SandboxPool.open`."""

    def __init__(
        self, name: str, spec: SandboxSpec, variables: dict[str, str], limits: dict[str, str], link: Link
    ) -> None:
        super().__init__(name, spec, variables)
        self.enforced = limits
        self._link = link

    async def _call(self, kind: int, fields: Sequence[bytes], timeout_s: float) -> Answer:
        try:
            answer = await self._link.wire.ask(kind, fields, timeout_s)
        except TimeoutError as error:
            self._link.wire.lose("it did not answer")
            raise SandboxDied(f"sandbox {self.id} has not answered for {timeout_s:.0f} s; it is ended") from error
        if answer is None:
            raise self.death(self._link.wire.lost)
        return answer


@dataclass(slots=True)
class _Life:
    """What has to be undone for one sandbox."""

    name: str
    link: Link | None = None
    ending: asyncio.Task[None] | None = None
    creating: asyncio.Task[DockerContainer] | None = None


@dataclass(slots=True)
class _Session:
    """What belongs to the event loop on which the backend is used."""

    docker: aiodocker.Docker
    images: Images
    store: Store
    starts: asyncio.Semaphore
    lives: dict[str, _Life] = field(default_factory=dict)


class Backend:
    """Starts and ends the containers of one run. See `deepswe.sandbox.base.Backend`."""

    def __init__(self, config: SandboxConfig, engine: Engine, run: str, directory: Path) -> None:
        """Prepare; nothing is made before the first start.

        Args:
            config: the recipe's section.
            engine: found already.
            run: name of the run.
            directory: empty, ours.
        """
        self._config = config
        self._own = section(config, engine.name)
        self._engine = engine
        self._run = run
        self._directory = directory
        self._default = config.image or DEFAULT_IMAGE
        self._rules = filter_for(engine)
        self._session: _Session | None = None

    def _open(self) -> _Session:
        if self._session is None:
            docker = self._engine.connect()
            images = Images(self._own)
            store = Store(docker, self._engine, self._own, self._run, self._directory)
            self._session = _Session(docker, images, store, asyncio.Semaphore(self._own.starts))
        return self._session

    async def start(self, name: str, spec: SandboxSpec, timeout_s: float) -> ContainerSandbox:
        """Start one container. However this ends, what is not returned is ended too. The time for pulling an image
        does not count.

        Raises:
            SandboxUnsupported: the spec asks for what a container cannot be.
            SandboxStartError: it did not start; `ImageUnavailable` if its image cannot be had.
        """
        session = self._open()
        life = _Life(name)
        session.lives[name] = life
        try:
            sizes = await asyncio.to_thread(session.store.sizes, spec)
            image = await session.images.get(session.docker, spec.image or self._default)
            shown = await session.store.show(spec, spec.image or self._default, self._lasting(name, spec))
            plan = self._opened(make_plan(spec, self._own, self._default, sizes, shown))
            async with session.starts:
                return await self._start(session, life, spec, plan, image, timeout_s)
        except TimeoutError as error:
            await self.stop(name)
            raise SandboxStartError(
                f"sandbox {name} did not start within {timeout_s} s; raise sandbox.start_timeout_s or lower the load"
            ) from error
        except FAILURES as error:
            await self.stop(name)
            raise SandboxStartError(f"sandbox {name} did not start: {error}") from error
        except BaseException:
            await self.stop(name)
            raise

    def _opened(self, plan: Plan) -> Plan:
        """Cover the image's /root, which is closed to others, by one of ours where something below it is shown.

        Raises:
            SandboxUnsupported: the engine cannot mount it.
        """
        if not plan.opened:
            return plan
        if plan.volumes:
            raise SandboxUnsupported(
                f"/root/{plan.opened[0]} is shown to user {plan.user}, who may not enter the image's /root; set "
                f"sandbox.{self._engine.name}.user to 0:0"
            )
        root = self._directory / "root"
        for place in plan.opened:
            (root / place).mkdir(parents=True, exist_ok=True)
            for directory in (root / place, *(root / place).parents):
                if directory.is_relative_to(root):
                    directory.chmod(0o755)
        return replace(plan, binds=((str(root), "/root"), *plan.binds))

    def _lasting(self, name: str, spec: SandboxSpec) -> dict[str, str]:
        """Labels of what serves many sandboxes of the run."""
        return labels_of(name, {**spec.labels, EXPIRES: str(int(time.time() + VOLUME_S)), TASK: ""})

    async def _start(
        self, session: _Session, life: _Life, spec: SandboxSpec, plan: Plan, image: Any, timeout_s: float
    ) -> ContainerSandbox:
        python = f"{BUNDLE}/bin/python3" if self._own.interpreter else self._own.python
        body = container_body(
            life.name, spec, plan, container_boot.command(python, self._rules), self._own, self._engine.name
        )
        async with asyncio.timeout(timeout_s):
            life.creating = asyncio.ensure_future(session.docker.containers.create(body, name=life.name))
            try:
                container = await asyncio.shield(life.creating)
            except aiodocker.DockerError as error:
                if error.status == 404:
                    session.images.forget(plan.image)
                raise SandboxStartError(f"sandbox {life.name} cannot be made: {error.message}") from error
            life.link = link = Link(self._engine, container.id)
            try:
                await link.open()  # podman looks for the program here already
                await container.start()
            except aiodocker.DockerError as error:
                raise SandboxStartError(self._no_start(life.name, plan.image, python, error.message)) from error
            if not await link.wire.hello:
                raise SandboxStartError(self._no_start(life.name, plan.image, python, link.wire.lost))
        layout = LAYOUTS[self._own.layout]
        variables = environment(spec, plan, layout, (image.get("Config") or {}).get("Env") or ())
        sandbox = ContainerSandbox(life.name, spec, variables, enforced(plan, self._engine.info, self._own), link)
        for layer, _ in plan.copied:
            await self._copy_in(sandbox, layer, python)
        if plan.own and layout.removed and spec.labels.get(PURPOSE) != GRADE:
            await self._must(sandbox, ["rm", "-rf", "--", *layout.removed], b"")
        return sandbox

    def _no_start(self, name: str, image: str, python: str, words: str) -> str:
        mend = (
            f"; the image must have {python} of version 3.10 or newer: name it in sandbox.{self._engine.name}.python, "
            f"or give a directory that holds one in sandbox.{self._engine.name}.interpreter"
        )
        missing = "executable file" in words or "no such file" in words.lower() or "needs Python" in words
        return f"sandbox {name} of image {image} did not start: {words}{mend if missing else ''}"

    async def _copy_in(self, sandbox: ContainerSandbox, layer: Layer, python: str) -> None:
        for archive in archives(layer.source):
            await self._must(sandbox, [python, "-I", "-S", "-c", _UNPACK, layer.target], archive)

    async def _must(self, sandbox: ContainerSandbox, argv: Sequence[str], stdin: bytes) -> None:
        env = interpreter_env(self._own)
        result = await sandbox.exec(argv, timeout_s=SETUP_S, stdin=stdin, cwd="/", env=env)
        if result.exit_code:
            raise SandboxStartError(
                f"sandbox {sandbox.id} could not be set up: {result.stderr.decode('utf-8', 'replace').strip()[-500:]}"
            )

    async def stop(self, name: str) -> None:
        """Remove one container, to the end even if the caller is cancelled. Ended ones are ignored."""
        life = self._session.lives.get(name) if self._session is not None else None
        if life is None:
            return
        if life.ending is None:
            life.ending = asyncio.ensure_future(self._end(life))
        await asyncio.shield(life.ending)

    async def _end(self, life: _Life) -> None:
        session = self._open()
        try:
            if life.creating is not None:
                # A request to make it may still be under way; only when it is answered can the container be removed.
                await asyncio.wait((life.creating,), timeout=STOP_S)
                if not life.creating.done() or life.creating.cancelled():
                    life.creating.cancel()
                else:
                    life.creating.exception()
            if life.link is not None:
                await life.link.close()
            if life.creating is not None:
                await remove(session.docker, life.name)
        finally:
            session.lives.pop(life.name, None)

    async def close(self) -> None:
        """Remove all containers and volumes of this backend."""
        session = self._session
        if session is None:
            return
        if session.lives:
            await asyncio.wait([asyncio.ensure_future(self.stop(name)) for name in session.lives], timeout=STOP_S)
        try:
            await session.store.close()
        finally:
            self._session = None
            await session.docker.close()

    def abort(self) -> None:
        """Nothing to do: the streams end with this process, the containers with their streams."""


async def remove(docker: aiodocker.Docker, name: str) -> None:
    """Kill and remove one container with its anonymous volumes; one that is not there is ignored."""
    for pause in (0.1, 0.4, 1.6, None):
        try:
            await docker.containers.container(name).delete(force=True, v=True, timeout=STOP_S)
            return
        except aiodocker.DockerError as error:
            if error.status == 404:
                return
            if pause is None:
                if error.status in GONE:
                    return
                raise SandboxError(f"container {name} cannot be removed: {error.message}") from error
        except FAILURES as error:
            if pause is None:
                raise SandboxError(f"container {name} cannot be removed: {error}") from error
        assert pause is not None
        await asyncio.sleep(pause)


def filter_for(engine: Engine) -> bytes:
    """Our system call filter for the engine's machine, on top of the engine's own; empty for one without a table."""
    names = {"amd64": "x86_64", "arm64": "aarch64"}
    machine = str(engine.info.get("Architecture") or "")
    machine = names.get(machine, machine)
    return seccomp.program(machine) if machine in seccomp.ARCHITECTURES else b""


def section(config: SandboxConfig, engine: str) -> ContainerConfig:
    """The recipe's settings of an engine."""
    return config.podman if engine == "podman" else config.docker


def open_backend(config: SandboxConfig, engine: EngineName, run: str, directory: Path) -> Backend:
    """The backend of a run; see `deepswe.sandbox.backends`.

    Raises:
        SandboxUnavailable: no engine answers, or it cannot do what the recipe asks for.
    """
    found = find_engine(engine, section(config, engine))
    check(found, section(config, engine))
    return Backend(config, found, run, directory)


def check(engine: Engine, config: ContainerConfig) -> None:
    """Refuse settings that the engine cannot honour.

    Raises:
        SandboxUnavailable: naming the setting.
    """
    if engine.info.get("OSType", "linux") != "linux":
        raise SandboxUnavailable(
            f"the {engine.name} engine runs {engine.info['OSType']} containers; switch it to linux"
        )
    runtimes = engine.info.get("Runtimes") or {}
    if config.runtime and engine.name == "docker" and config.runtime not in runtimes:
        raise SandboxUnavailable(
            f"sandbox.docker.runtime is {config.runtime!r}, but the engine knows {', '.join(sorted(runtimes))}; "
            "add it to the engine's daemon.json"
        )
    if config.interpreter and not (Path(config.interpreter) / "bin/python3").exists():
        raise SandboxUnavailable(
            f"sandbox.{engine.name}.interpreter is {config.interpreter}, which holds no bin/python3; give the "
            "directory of a relocatable Python"
        )


async def list_sandboxes(config: SandboxConfig) -> list[SandboxRecord]:
    """All containers and volumes of this package on the engine, whichever run made them.

    Raises:
        SandboxUnavailable: the engine cannot be asked.
    """
    engine = await asyncio.to_thread(find_engine, _engine_name(config), section(config, config.backend))
    async with engine.client() as docker:
        return [record for record, _ in await _asked(engine, lambda: _found(docker, engine.name))]


async def reap(config: SandboxConfig) -> list[SandboxRecord]:
    """Remove those whose owner is dead or whose time is over; returns those.

    Raises:
        SandboxUnavailable: the engine cannot be asked.
        SandboxError: some cannot be removed; all others are.
    """
    engine = await asyncio.to_thread(find_engine, _engine_name(config), section(config, config.backend))
    async with engine.client() as docker:
        ended, failures = [], []
        for record, kind in await _asked(engine, lambda: _found(docker, engine.name)):
            if record.state == "live":
                continue
            end = remove if kind == "container" else remove_volume
            try:
                await end(docker, record.name)
            except SandboxError as error:
                failures.append(str(error))
            else:
                ended.append(record)
    if failures:
        raise SandboxError(f"{len(ended)} were removed, {len(failures)} cannot be: {failures[0]}")
    return ended


def _engine_name(config: SandboxConfig) -> EngineName:
    return "podman" if config.backend == "podman" else "docker"


async def _asked(engine: Engine, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    try:
        return await work()
    except FAILURES as error:
        raise SandboxUnavailable(f"the {engine.name} engine cannot be asked: {error}") from error


async def _found(docker: aiodocker.Docker, backend: str) -> list[tuple[SandboxRecord, str]]:
    """Containers first, so that a volume is free when it is removed."""
    now = time.time()
    found = []
    for container in await docker.containers.list(all=1, filters=f'{{"label": ["{MARK}"]}}'):
        labels = container["Labels"] or {}
        created = float(container["Created"]) if str(container["Created"]).isdigit() else now
        found.append((read_record(backend, labels.get(MARK, container.id), labels, created, now), "container"))
    for volume in (await docker.volumes.list(filters={"label": [MARK]})).get("Volumes") or ():  # type: ignore[no-untyped-call]
        found.append((read_record(backend, volume["Name"], volume.get("Labels") or {}, now, now), "volume"))
    return found
