"""Directories of this machine in containers: mounted where the engine sees the same files, else sent as archives."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import platform
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import aiodocker

from deepswe.config import ContainerConfig
from deepswe.errors import SandboxError, SandboxUnsupported
from deepswe.sandbox.base import SandboxSpec
from deepswe.sandbox.container_engine import Engine
from deepswe.sandbox.container_spec import interpreter_of, size_mib

BATCH_BYTES = 8 << 20
"""Of files in one archive that is sent into a running container."""
_FILL = "/run/deepswe-fill"
"""Where the helper container that fills a volume has it."""
_numbers = itertools.count(1)


def archives(source: Path) -> Iterator[bytes]:
    """The tree as tar archives of some megabytes, directories before what is in them."""
    paths = _walk(source)
    while True:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            path = None
            for path in paths:
                archive.add(path, arcname=os.path.relpath(path, source), recursive=False)
                if buffer.tell() >= BATCH_BYTES:
                    break
        if path is None:
            return
        yield buffer.getvalue()


def _walk(source: Path) -> Iterator[str]:
    for directory, names, files in os.walk(source):
        for name in sorted(names):
            path = os.path.join(directory, name)
            yield path
        for name in sorted(files):
            yield os.path.join(directory, name)
        names[:] = sorted(name for name in names if not os.path.islink(os.path.join(directory, name)))


def tar_tree(source: Path, target: IO[bytes]) -> None:
    """Write a tree as one tar archive, owned by root; without the packages and the tests of an interpreter."""
    patterns = () if (source / "pyvenv.cfg").exists() else ("lib/python*/site-packages", "lib/python*/test")
    hidden = [str(path) for pattern in patterns for path in source.glob(pattern)]
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in _walk(source):
            if not any(path.startswith(f"{name}/") for name in hidden):
                archive.add(path, arcname=os.path.relpath(path, source), recursive=False, filter=_as_root)


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry


class Store:
    """The layers of one run on one engine: their sizes, and the volumes that hold those that cannot be mounted."""

    def __init__(
        self, docker: aiodocker.Docker, engine: Engine, config: ContainerConfig, run: str, directory: Path
    ) -> None:
        """Begin with none.

        Args:
            docker, engine: where.
            config: the recipe's section.
            run: name of the run, a label of its volumes.
            directory: ours, for an archive on its way.
        """
        self._docker = docker
        self._engine = engine
        self._config = config
        self._run = run
        self._directory = directory
        self._sizes: dict[Path, int] = {}
        self._volumes: dict[Path, str] = {}
        self._filling = asyncio.Lock()

    @property
    def mounts(self) -> bool:
        """Whether directories of this machine can be mounted."""
        return self._config.layers == "mount" or (self._config.layers == "auto" and self._engine.here)

    def sizes(self, spec: SandboxSpec) -> Mapping[Path, int]:
        """MiB of each writable layer.

        Raises:
            SandboxUnsupported: a layer is no directory, or holds programs for another kind of machine.
        """
        for layer in spec.layers:
            if not layer.source.is_dir():
                raise SandboxUnsupported(f"layer {layer.source} for {layer.target} is no directory; build it first")
            if (layer.source / "pyvenv.cfg").exists():
                self._require_same_machine(layer.source)
            if layer.writable and layer.source not in self._sizes:
                self._sizes[layer.source] = size_mib(layer.source)
        return self._sizes

    def _require_same_machine(self, source: Path) -> None:
        ours = f"{platform.system().lower()} {platform.machine().lower().replace('arm64', 'aarch64')}"
        machine = str(self._engine.info.get("Architecture") or platform.machine())
        theirs = f"linux {({'amd64': 'x86_64', 'arm64': 'aarch64'}).get(machine, machine)}"
        if ours != theirs:
            raise SandboxUnsupported(
                f"layer {source} is a Python environment for {ours}, and the engine runs {theirs}; use tasks without "
                "an environment of their own, or tasks with an image"
            )

    async def show(self, spec: SandboxSpec, image: str, labels: Mapping[str, str]) -> Mapping[Path, str]:
        """Volumes for what the spec shows read-only and the engine cannot mount, each filled once.

        Args:
            spec: what is to be shown.
            image: any that is on the engine, for the container that fills a volume.
            labels: of the volumes, besides the run.

        Raises:
            SandboxError: one cannot be made.
        """
        if self.mounts:
            return {}
        sources = [layer.source for layer in spec.layers if not layer.writable]
        sources += [prefix for source in sources if (prefix := interpreter_of(source)) is not None]
        if self._config.interpreter:
            sources.append(Path(self._config.interpreter))
        async with self._filling:
            for source in sources:
                if source not in self._volumes:
                    self._volumes[source] = await self._fill(source, image, labels)
        return self._volumes

    async def _fill(self, source: Path, image: str, labels: Mapping[str, str]) -> str:
        name = f"{self._directory.name}-{next(_numbers)}"
        helper = f"{name}-fill"
        marks = dict(labels)
        await self._docker.volumes.create({"Name": name, "Labels": marks})  # type: ignore[no-untyped-call]
        mount = {"Type": "volume", "Source": name, "Target": _FILL, "VolumeOptions": {"NoCopy": True}}
        body: dict[str, Any] = {
            "Image": image,
            "Entrypoint": ["true"],
            "Labels": marks,
            "NetworkDisabled": True,
            "HostConfig": {"NetworkMode": "none", "Mounts": [mount]},
        }
        archive = self._directory / f"{name}.tar"
        try:
            with archive.open("wb") as file:
                await asyncio.to_thread(tar_tree, source, file)
            container = await self._docker.containers.create(body, name=helper)
            try:
                with archive.open("rb") as file:
                    await container.put_archive(_FILL, file)  # type: ignore[no-untyped-call]
            finally:
                await container.delete(force=True)
        except BaseException:
            await asyncio.shield(remove_volume(self._docker, name))
            raise
        finally:
            archive.unlink(missing_ok=True)
        return name

    async def close(self) -> None:
        """Remove the volumes."""
        while self._volumes:
            await remove_volume(self._docker, self._volumes.popitem()[1])


async def remove_volume(docker: aiodocker.Docker, name: str) -> None:
    """Remove one volume; one that is not there is ignored.

    Raises:
        SandboxError: it cannot be removed.
    """
    try:
        volume = await docker.volumes.get(name)  # type: ignore[no-untyped-call]
        await volume.delete(force=True)
    except aiodocker.DockerError as error:
        if error.status != 404:
            raise SandboxError(f"volume {name} cannot be removed: {error.message}") from error
