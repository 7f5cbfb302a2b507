"""Ends pods that nobody will end: of dead owners and expired. Any process may do it, at any time, many at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from deepswe.config import KubernetesConfig
from deepswe.errors import SandboxUnavailable
from deepswe.sandbox.base import OWNER, SandboxRecord
from deepswe.sandbox.kubernetes import claims, lease, pods
from deepswe.sandbox.kubernetes.client import ApiError, Client, find_cluster
from deepswe.sandbox.owner import read_owner

PAGE = 500
AT_ONCE = 32
WAIT_S = 60.0
LOOK_S = 0.5


async def list_objects(client: Client, path: str, selector: str) -> list[dict[str, Any]]:
    """All objects under a path with these labels, page by page.

    Raises:
        ApiError: they cannot be listed.
    """
    found: list[dict[str, Any]] = []
    more = ""
    while True:
        query = {"labelSelector": selector, "limit": str(PAGE)} | ({"continue": more} if more else {})
        page = await client.request("GET", path, query=query)
        found += page.get("items") or []
        more = page["metadata"].get("continue", "")
        if not more:
            return found


async def delete_owned(client: Client, owner: str, run: str) -> None:
    """Delete all claims and pods of one owner and run that are still there.

    Raises:
        ApiError: that cannot be done.
    """
    selector = pods.owner_selector(owner, run)
    for claim in await claims.list_claims(client, selector) if client.config.warm_pool else ():
        await _delete(client, f"{claims.path_of(client)}/{claim['metadata']['name']}")
    for pod in await list_objects(client, client.pods, selector):
        if "deletionTimestamp" not in pod["metadata"]:
            await _delete(client, f"{client.pods}/{pod['metadata']['name']}")


async def until_gone(client: Client, selector: str, names: frozenset[str] = frozenset()) -> None:
    """Wait until the cluster has removed pods. No deadline of its own.

    Args:
        client: of the cluster.
        selector: of labels.
        names: which of those; all if empty.

    Raises:
        ApiError: they cannot be listed.
    """
    while True:
        found = {pod["metadata"]["name"] for pod in await list_objects(client, client.pods, selector)}
        if not (found & names if names else found):
            return
        await asyncio.sleep(LOOK_S)


async def _delete(client: Client, path: str) -> None:
    options = {"gracePeriodSeconds": pods.GRACE_S, "propagationPolicy": "Background"}
    try:
        await client.request("DELETE", path, body=options)
    except ApiError as error:
        if error.status != 404:
            raise


class Reaper:
    """One look at the namespace."""

    def __init__(self, config: KubernetesConfig) -> None:
        """Prepare.

        Args:
            config: which cluster and namespace.
        """
        self._config = config

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            SandboxUnavailable: there is no cluster.
        """
        self._client = Client(self._config, await find_cluster(self._config))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def records(self) -> list[SandboxRecord]:
        """All pods of this package, by name.

        Raises:
            SandboxUnavailable: the cluster does not answer or does not allow it.
        """
        try:
            return [record for record, _ in await self._look()]
        except ApiError as error:
            raise SandboxUnavailable(str(error)) from error

    async def reap(self) -> list[SandboxRecord]:
        """End orphaned and expired pods, wait until they are gone, and remove leases of dead owners.

        Raises:
            SandboxUnavailable: the cluster does not answer or does not allow it.
        """
        try:
            condemned = [(record, path) for record, path in await self._look() if record.state != "live"]
            gate = asyncio.Semaphore(AT_ONCE)

            async def end(path: str) -> None:
                async with gate:
                    await _delete(self._client, path)

            await asyncio.gather(*(end(path) for _, path in condemned))
            names = frozenset(record.name for record, _ in condemned)
            if names:
                with contextlib.suppress(TimeoutError):  # some may take longer than we wait
                    await asyncio.wait_for(until_gone(self._client, pods.SELECTOR, names), WAIT_S)
            for path in await self._stale_leases():
                await _delete(self._client, path)
        except ApiError as error:
            raise SandboxUnavailable(str(error)) from error
        return [record for record, _ in condemned]

    async def _look(self) -> list[tuple[SandboxRecord, str]]:
        """Every pod, and the path to delete: its own, or that of the claim that holds it."""
        now = time.time()
        leases = await list_objects(self._client, lease.path_of(self._client), pods.SELECTOR)
        orphans = frozenset(lease.holder(item) for item in leases if lease.is_stale(item, now))
        found = await list_objects(self._client, self._client.pods, pods.SELECTOR)
        held = await claims.list_claims(self._client)
        rows = [(self._client.pods, pod) for pod in found if "ownerReferences" not in pod["metadata"]]
        rows += [(claims.path_of(self._client), item) for item in held]
        records = [(pods.read_record(item, now, orphans), f"{root}/{item['metadata']['name']}") for root, item in rows]
        return sorted(records, key=lambda item: item[0].name)

    async def _stale_leases(self) -> list[str]:
        """Leases to remove: stale for long, or of an owner that is known to be dead."""
        now = time.time()
        root = lease.path_of(self._client)
        return [
            f"{root}/{item['metadata']['name']}"
            for item in await list_objects(self._client, root, pods.SELECTOR)
            if lease.is_stale(item, now) or _dead(item)
        ]


def _dead(item: Mapping[str, Any]) -> bool:
    owner = read_owner(item["metadata"].get("labels", {}).get(pods.PREFIX + OWNER, ""))
    return owner is not None and owner.state() == "dead"
