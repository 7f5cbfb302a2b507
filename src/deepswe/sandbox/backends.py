"""From the recipe's `sandbox.backend` to the backend. Only the chosen one's module, and its client, is imported."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast

from deepswe.config import SandboxConfig
from deepswe.errors import SandboxUnavailable
from deepswe.sandbox.base import Backend, SandboxRecord

MODULES: Mapping[str, str] = {
    "bubblewrap": "deepswe.sandbox.namespaces",
    "docker": "deepswe.sandbox.container",
    "podman": "deepswe.sandbox.container",
    "kubernetes": "deepswe.sandbox.kubernetes.backend",
}
EXTRAS: Mapping[str, str] = {"docker": "docker", "podman": "docker", "kubernetes": "kubernetes"}
"""The extra of this package that brings a backend's client."""


class Registry(Protocol):
    """What a backend's module offers besides `open_backend`, for `deepswe sandbox ls` and `reap`.

    Both look at every sandbox of this package that the backend can see, whichever run made it.
    """

    async def list_sandboxes(self, config: SandboxConfig) -> list[SandboxRecord]:
        """All of them.

        Raises:
            SandboxUnavailable: the backend cannot be asked.
        """

    async def reap(self, config: SandboxConfig) -> list[SandboxRecord]:
        """End and remove those that are orphaned or expired, and what dead owners left otherwise; returns those.

        Raises:
            SandboxUnavailable: the backend cannot be asked.
        """


def open_backend(config: SandboxConfig, run: str, directory: Path) -> Backend:
    """The chosen backend, ready to start sandboxes.

    Args:
        config: the recipe's section.
        run: name of the run.
        directory: empty, private, on this machine; the caller removes it afterwards.

    Raises:
        SandboxUnavailable: this machine cannot run it, or its client is not installed.
    """
    module = load(config.backend)
    if config.backend in ("docker", "podman"):
        return cast(Backend, module.open_backend(config, config.backend, run, directory))
    return cast(Backend, module.open_backend(config, run, directory))


def registry(config: SandboxConfig) -> Registry:
    """The functions that list and reap the chosen backend's sandboxes.

    Raises:
        SandboxUnavailable: its client is not installed.
    """
    return cast(Registry, load(config.backend))


def load(backend: str) -> ModuleType:
    """Import a backend's module.

    Raises:
        SandboxUnavailable: naming the extra that brings what it needs.
    """
    try:
        return importlib.import_module(MODULES[backend])
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.startswith("deepswe."):
            raise SandboxUnavailable(f"sandbox.backend {backend} is not part of this installation") from error
        mend = f"pip install 'deepswe[{EXTRAS[backend]}]'" if backend in EXTRAS else "it runs on Linux only"
        raise SandboxUnavailable(f"sandbox.backend {backend} needs the package {missing}: {mend}") from error
