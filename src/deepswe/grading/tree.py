"""Lay a task's tree in a sandbox: base layer, changed files, removed paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

from deepswe.errors import SandboxError
from deepswe.sandbox.base import Layer, Limits, Sandbox, SandboxSpec
from deepswe.tasks.task import Repository, Task

ROOT = "/testbed"
"""Where a task's repository lies."""
ENVIRONMENT = "/opt/env"
"""Where a task's environment lies."""
REMOVE_TIMEOUT_S = 60.0

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
        env: dict[str, str] = {}
        if task.repository.environment is not None:
            layers.append(Layer(self.resolve_layer(task.repository.environment), ENVIRONMENT))
            env = {"PATH": f"{ENVIRONMENT}/bin:/usr/local/bin:/usr/bin:/bin", "VIRTUAL_ENV": ENVIRONMENT}
        if task.repository.pythonpath != ("",):
            env["PYTHONPATH"] = ":".join(f"{ROOT}/{path}".rstrip("/") for path in task.repository.pythonpath)
        labels = {**self.labels, "task": task.id, "purpose": purpose}
        return self.open_sandbox(SandboxSpec(tuple(layers), ROOT, env, self.limits, labels))


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
    if repository.removed:
        paths = [f"{ROOT}/{path}" for path in repository.removed]
        result = await sandbox.exec(["rm", "-rf", "--", *paths], timeout_s=REMOVE_TIMEOUT_S)
        if result.exit_code:
            raise SandboxError(
                f"paths of the base layer could not be removed: {result.stderr.decode(errors='replace')}"
            )
    files = {f"{ROOT}/{path}": text.encode() for path, text in repository.files.items()}
    await sandbox.write_files({**files, **(extra or {})})
