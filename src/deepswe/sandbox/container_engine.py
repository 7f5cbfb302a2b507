"""The Engine API of Docker and Podman: where the engine listens, what it says of itself, and images pulled."""

from __future__ import annotations

import asyncio
import os
import random
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiodocker
import aiohttp

from deepswe.config import ContainerConfig
from deepswe.errors import SandboxStartError, SandboxUnavailable

EngineName = Literal["docker", "podman"]
PROBE_S = 60.0
CONNECT_S = 20.0
PODMAN_API = "v1.40"
REQUEST_S = 120.0
PULL_S = 3600.0
BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 60.0
FAILURES = (aiodocker.DockerError, aiohttp.ClientError, OSError, TimeoutError)
"""Whatever a request to an engine may raise."""
GONE = (404, 409)
"""Answers to a removal of what is not there, or is being removed already."""

Result = TypeVar("Result")

_engines: dict[tuple[EngineName, str], Engine] = {}
"""Engines that have answered this process."""


class ImageUnavailable(SandboxStartError):
    """An image is not on the engine and cannot be pulled.

    Attributes:
        cause: `absent` (no such image), `denied` (no right to it), `limited` (too many pulls), `unreachable` (the
            registry, or the way to it, failed), `never` (pulling is switched off).
    """

    def __init__(self, message: str, cause: Literal["absent", "denied", "limited", "unreachable", "never"]) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine.

    Attributes:
        name: which kind.
        address: its URL; empty for what the Docker client finds by itself (a context, the default socket).
        version: of its API, such as "v1.41".
        info: its answer to `info`.
        here: it runs on this machine, as far as its address tells.
    """

    name: EngineName
    address: str
    version: str
    info: Mapping[str, Any]
    here: bool

    @asynccontextmanager
    async def client(self) -> AsyncIterator[aiodocker.Docker]:
        """A client for the length of the block."""
        docker = self.connect()
        try:
            yield docker
        finally:
            await docker.close()

    def connect(self) -> aiodocker.Docker:
        """A client, which the caller closes. Needs a running event loop."""
        return connect(self.address, self.version)


def connect(address: str, version: str = "auto") -> aiodocker.Docker:
    """A client of the engine at an address.

    Raises:
        FileNotFoundError: the address is empty, and no socket is where Docker puts one.
    """
    timeout = aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=CONNECT_S)
    try:
        return aiodocker.Docker(url=address or None, api_version=version, timeout=timeout)
    except AssertionError as error:  # how aiodocker says that it found none
        raise FileNotFoundError("there is no socket in the usual places") from error


def addresses(name: EngineName, config: ContainerConfig, environ: Mapping[str, str]) -> list[str]:
    """Where the engine may listen, best first. For Docker an empty address leaves contexts and default sockets to the
    client.

    Args:
        name: which kind.
        config: the recipe's section; its `host` is the only answer where it is set.
        environ: as `os.environ`.
    """
    if config.host:
        return [config.host]
    if name == "docker":
        return [""]
    if environ.get("CONTAINER_HOST"):
        return [environ["CONTAINER_HOST"]]
    home = Path(environ.get("HOME") or Path.home())
    runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    rootless, rootful = Path(runtime) / "podman/podman.sock", Path("/run/podman/podman.sock")
    machines = [
        home / ".local/share/containers/podman/machine/podman.sock",
        Path(environ.get("TMPDIR") or tempfile.gettempdir()) / "podman/podman-machine-default-api.sock",
    ]
    order = [rootful, rootless] if os.getuid() == 0 else [rootless, rootful]
    return [f"unix://{path}" for path in [*order, *machines]]


def find_engine(name: EngineName, config: ContainerConfig) -> Engine:
    """Ask the engine what it is, once in this process. May be called with or without a running event loop.

    Raises:
        SandboxUnavailable: none answers; the message says where it was looked for.
    """
    tried = []
    for address in addresses(name, config, os.environ):
        path = address.removeprefix("unix://")
        if path != address and not config.host and not _is_socket(Path(path)):
            tried.append(f"{path} is no socket")
            continue
        if (name, address) in _engines:
            return _engines[name, address]
        try:
            _engines[name, address] = in_thread(lambda address=address: _probe(name, address))  # type: ignore[misc]
            return _engines[name, address]
        except (*FAILURES, ValueError) as error:
            tried.append(f"{address or 'the default address'}: {type(error).__name__}: {error}")
    variable = "DOCKER_HOST" if name == "docker" else "CONTAINER_HOST"
    start = "start dockerd or Docker Desktop" if name == "docker" else "run `podman system service --time=0`"
    raise SandboxUnavailable(
        f"no {name} engine answers ({'; '.join(tried)}); {start}, or set {variable} or sandbox.{name}.host to its "
        "address, or use another sandbox.backend"
    )


async def _probe(name: EngineName, address: str) -> Engine:
    # Podman looks through the packages of its machine for each answer to `version` and `info`: seconds, under load.
    async with asyncio.timeout(PROBE_S):
        docker = connect(address, PODMAN_API if name == "podman" else "auto")
        try:
            version = PODMAN_API if name == "podman" else f"v{(await docker.version())['ApiVersion']}"
            info = await docker.system.info()
            found = docker.docker_host
        finally:
            await docker.close()
    here = found.startswith("unix://") and not address.startswith("ssh://") and sys.platform == "linux"
    return Engine(name, address, version, dict(info), here)


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def in_thread(work: Callable[[], Awaitable[Result]]) -> Result:
    """Run a coroutine on an event loop of its own, whether or not this thread has one running; wait for it."""

    async def awaited() -> Result:
        return await work()

    with ThreadPoolExecutor(1, thread_name_prefix="deepswe-engine-probe") as pool:
        return pool.submit(lambda: asyncio.run(awaited())).result()


class Images:
    """The images of one engine: looked up, and pulled where they are missing, each once at a time."""

    def __init__(self, config: ContainerConfig) -> None:
        self._config = config
        self._known: dict[str, Mapping[str, Any]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, docker: aiodocker.Docker, image: str) -> Mapping[str, Any]:
        """What the engine knows of an image, its `Config` above all; pulled if need be.

        Raises:
            ImageUnavailable: it cannot be had.
        """
        async with self._locks.setdefault(image, asyncio.Lock()):
            if image not in self._known:
                self._known[image] = await self._fetch(docker, image)
            return self._known[image]

    def forget(self, image: str) -> None:
        """Look it up again next time: the engine says that it is gone."""
        self._known.pop(image, None)

    async def _fetch(self, docker: aiodocker.Docker, image: str) -> Mapping[str, Any]:
        if self._config.pull != "always":
            found = await self._inspect(docker, image)
            if found is not None:
                return found
            if self._config.pull == "never":
                raise ImageUnavailable(
                    f"image {image} is not on the engine, and pull is 'never'; load it there, or set pull to 'missing'",
                    "never",
                )
        await self._pull(docker, image)
        found = await self._inspect(docker, image)
        if found is None:
            raise ImageUnavailable(f"image {image} was pulled and is not there; see the engine's log", "absent")
        return found

    async def _inspect(self, docker: aiodocker.Docker, image: str) -> Mapping[str, Any] | None:
        try:
            return await docker.images.inspect(image)
        except aiodocker.DockerError as error:
            if error.status == 404:
                return None
            raise

    async def _pull(self, docker: aiodocker.Docker, image: str) -> None:
        """Pull, again after a growing pause where a later try may succeed."""
        name = image if ":" in image.rpartition("/")[2] or "@" in image else f"{image}:latest"
        for attempt in range(self._config.pull_retries + 1):
            try:
                async with asyncio.timeout(PULL_S):
                    await docker.images.pull(name)
                return
            except FAILURES as error:
                failure = explain_pull(image, error)
                if failure.cause in ("absent", "denied") or attempt == self._config.pull_retries:
                    raise failure from error
            pause = min(LONGEST_BACKOFF_S, BACKOFF_S * 2**attempt)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))


_ABSENT = ("not found", "manifest unknown", "no such image", "does not exist", "name unknown", "invalid reference")
_DENIED = ("denied", "unauthorized", "authentication required", "forbidden", "no basic auth")
_LIMITED = ("toomanyrequests", "too many requests", "rate limit")


def explain_pull(image: str, error: BaseException) -> ImageUnavailable:
    """What a failed pull means, from the engine's status and words."""
    words = str(error) or type(error).__name__
    status = error.status if isinstance(error, aiodocker.DockerError) else 0
    text = words.lower()
    if status == 429 or any(word in text for word in _LIMITED):
        return ImageUnavailable(f"image {image}: the registry takes no more pulls for now: {words}", "limited")
    if status in (401, 403) or any(word in text for word in _DENIED):
        return ImageUnavailable(
            f"image {image} cannot be pulled: {words}; check its name, log in and pull it by hand once", "denied"
        )
    if status == 404 or any(word in text for word in _ABSENT):
        return ImageUnavailable(f"there is no image {image}: {words}; check its name, or build or load it", "absent")
    return ImageUnavailable(f"image {image} cannot be pulled: {words}", "unreachable")
