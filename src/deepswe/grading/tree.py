"""Lay a task's tree in a sandbox: base layer, changed files, removed paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

from deepswe.errors import EnvironmentFault, SandboxError
from deepswe.sandbox.base import Layer, Limits, Sandbox, SandboxSpec
from deepswe.tasks.task import Image, Repository, Task

ROOT = "/testbed"
"""Where a task's repository lies."""
ENVIRONMENT = "/opt/env"
"""Where a task's environment lies."""
REMOVE_TIMEOUT_S = 60.0
SETUP_TIMEOUT_S = 600.0

OpenSandbox = Callable[[SandboxSpec], AbstractAsyncContextManager[Sandbox]]
ResolveLayer = Callable[[str], Path]


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where sandboxes come from.

    Attributes:
        open_sandbox: opens one and ends it.
        resolve_layer: key of a layer -> its directory on the host.
        limits: what each may use.
        labels: for the owner of the sandboxes.
    """

    open_sandbox: OpenSandbox
    resolve_layer: ResolveLayer
    limits: Limits = field(default_factory=Limits)
    labels: Mapping[str, str] = field(default_factory=dict)

    def open(self, task: Task, purpose: str) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox that shows the task's layers.

        Args:
            task: whose.
            purpose: a label, such as "attempt" or "grade".
        """
        layers = []
        if task.repository.base is not None:
            layers.append(Layer(self.resolve_layer(task.repository.base), ROOT, writable=True))
        env: dict[str, str] = dict(task.image.env) if task.image else {}
        if task.repository.environment is not None:
            layers.append(Layer(self.resolve_layer(task.repository.environment), ENVIRONMENT))
            env |= {"PATH": f"{ENVIRONMENT}/bin:/usr/local/bin:/usr/bin:/bin", "VIRTUAL_ENV": ENVIRONMENT}
        if task.repository.pythonpath != ("",):
            env["PYTHONPATH"] = ":".join(f"{ROOT}/{path}".rstrip("/") for path in task.repository.pythonpath)
        labels = {**self.labels, "task": task.id, "purpose": purpose}
        image = task.image.name if task.image else ""
        return self.open_sandbox(SandboxSpec(tuple(layers), ROOT, env, self.limits, labels, image=image))


async def prepare_image(sandbox: Sandbox, image: Image, *, for_agent: bool) -> None:
    """Make the tree that an image holds the task's: its setup, the bug, and for an agent nothing that tells the answer.

    Args:
        sandbox: fresh, of that image.
        image: what to do there. The bug's patch comes by standard input, so that no file of it is left.
        for_agent: remove what the agent must not have, and every repository of git with its history.

    Raises:
        SandboxError: the sandbox failed.
        EnvironmentFault: the setup, the patch or the removal did.
    """
    if image.setup:
        await _step(sandbox, "setup", ["sh", "-c", image.setup], cwd="/")
    if image.patch:
        await _step(sandbox, "patch", ["git", "apply", "--whitespace=nowarn", "-"], stdin=image.patch.encode())
    if for_agent:
        await _step(sandbox, "clean-up", ["rm", "-rf", "--", *image.hide], cwd="/")
        command = ["find", ROOT, "-name", ".git", "-prune", "-exec", "rm", "-rf", "--", "{}", "+"]
        await _step(sandbox, "clean-up", command, cwd="/")


async def _step(sandbox: Sandbox, name: str, command: list[str], *, cwd: str = ROOT, stdin: bytes = b"") -> None:
    result = await sandbox.exec(command, timeout_s=SETUP_TIMEOUT_S, cwd=cwd, stdin=stdin)
    if result.exit_code:
        words = result.stderr.decode("utf-8", "replace").strip()[-500:]
        ending = f"took more than {SETUP_TIMEOUT_S:.0f} s" if result.timed_out else f"exit code {result.exit_code}"
        raise EnvironmentFault(f"the {name} of the image failed ({ending}): {words}")


async def lay_tree(sandbox: Sandbox, repository: Repository, extra: Mapping[str, bytes] | None = None) -> None:
    """Write and remove what differs from the base layer.

    Args:
        sandbox: fresh.
        repository: what to lay.
        extra: absolute path -> bytes, written in the same go.

    Raises:
        OSError: a file could not be written.
        SandboxError: the sandbox failed, or would not remove a path.
    """
    await remove_paths(sandbox, repository)
    await sandbox.write_files({**tree_files(repository), **(extra or {})})


async def remove_paths(sandbox: Sandbox, repository: Repository) -> None:
    """Remove what the base layer has and the tree has not.

    Raises:
        SandboxError: the sandbox failed, or would not remove a path.
    """
    if not repository.removed:
        return
    paths = [f"{ROOT}/{path}" for path in repository.removed]
    result = await sandbox.exec(["rm", "-rf", "--", *paths], timeout_s=REMOVE_TIMEOUT_S)
    if result.exit_code:
        raise SandboxError(f"paths of the base layer could not be removed: {result.stderr.decode(errors='replace')}")


def tree_files(repository: Repository) -> dict[str, bytes]:
    """What is written over the base layer: absolute path -> bytes."""
    return {f"{ROOT}/{path}": text.encode() for path, text in repository.files.items()}
