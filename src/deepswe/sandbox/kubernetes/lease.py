"""A sign of life of the owner: a Lease that it renews, so that a reaper on another machine can tell that it is dead.

One write each third of `lease_s`, for a whole run. A process that is gone stops renewing; its pods then are orphans.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from deepswe.sandbox.base import OWNER, RUN
from deepswe.sandbox.kubernetes.client import ApiError, Client
from deepswe.sandbox.kubernetes.pods import MANAGED, MANAGER, PREFIX, label_value, pod_name, read_time, write_time

_log = logging.getLogger(__name__)


def path_of(client: Client) -> str:
    """The path of the namespace's leases."""
    return f"/apis/coordination.k8s.io/v1/namespaces/{client.config.namespace}/leases"


class Lease:
    """The lease of one owner and run."""

    def __init__(self, client: Client, owner: str, run: str) -> None:
        """Prepare.

        Args:
            client: of the cluster.
            owner: tag of the process.
            run: name of the run.
        """
        self._client = client
        self._owner = owner
        self._run = run
        self._name = pod_name(f"owner-{run}", owner)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Make the lease and go on renewing it.

        Raises:
            ApiError: it cannot be made.
        """
        labels = {MANAGED: MANAGER, PREFIX + OWNER: self._owner, PREFIX + RUN: label_value(self._run)}
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "labels": labels},
            "spec": {
                "holderIdentity": self._owner,
                "leaseDurationSeconds": self._client.config.lease_s,
                "renewTime": write_time(time.time()),
            },
        }
        try:
            await self._client.request("POST", path_of(self._client), body=body)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
        self._task = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._client.config.lease_s / 3)
            body = {"spec": {"renewTime": write_time(time.time())}}
            try:
                await self._client.request("PATCH", f"{path_of(self._client)}/{self._name}", body=body)
            except ApiError as error:
                _log.warning("the lease of run %s is not renewed: %s", self._run, error)

    async def close(self) -> None:
        """Stop renewing, and remove the lease."""
        if self._task is None:
            return
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        with suppress(ApiError):
            await self._client.request("DELETE", f"{path_of(self._client)}/{self._name}", tries=2)


def is_stale(lease: Mapping[str, Any], now: float) -> bool:
    """Whether the holder has not renewed in time."""
    spec = lease["spec"]
    return read_time(spec.get("renewTime", "")) + float(spec.get("leaseDurationSeconds", 0)) < now


def holder(lease: Mapping[str, Any]) -> str:
    """The owner's tag."""
    return str(lease["spec"].get("holderIdentity", ""))
