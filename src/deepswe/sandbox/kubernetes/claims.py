"""Sandboxes claimed from a warm pool of agent-sandbox (SandboxClaim, SandboxWarmPool), where a cluster has it.

Only `extensions.agents.x-k8s.io/v1beta1` is spoken; anything else is refused with what to install. The pool's template
must run our command as process 1: `deepswe sandbox manifests --warm-pool` writes one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from deepswe.errors import SandboxUnavailable
from deepswe.sandbox.kubernetes.client import ApiError, Client
from deepswe.sandbox.kubernetes.failures import PodStartError, Reason
from deepswe.sandbox.kubernetes.pods import SELECTOR, write_time

GROUP = "extensions.agents.x-k8s.io"
VERSION = "v1beta1"
POD_NAME = "agents.x-k8s.io/pod-name"
"""Annotation of a Sandbox whose pod has another name than itself."""
LOOK_S = 0.1
LONGEST_LOOK_S = 2.0


def path_of(client: Client) -> str:
    """The path of the namespace's claims."""
    return f"/apis/{GROUP}/{VERSION}/namespaces/{client.config.namespace}/sandboxclaims"


async def list_claims(client: Client, selector: str = SELECTOR) -> list[dict[str, Any]]:
    """The claims with these labels; none where agent-sandbox is not installed or not ours to see.

    Raises:
        ApiError: the API server failed.
    """
    try:
        found: dict[str, Any] = await client.request("GET", path_of(client), query={"labelSelector": selector})
    except ApiError as error:
        if error.status in (403, 404):
            return []
        raise
    return list(found.get("items") or [])


class Claims:
    """The claims of one run on one warm pool; does nothing where no pool is named."""

    def __init__(self, client: Client, pool: str) -> None:
        """Prepare.

        Args:
            client: of the cluster.
            pool: name of the SandboxWarmPool; empty for none.
        """
        self._client = client
        self._pool = pool
        self.path = path_of(client)

    async def check(self) -> None:
        """Make sure that there is such a pool.

        Raises:
            SandboxUnavailable: there is none, or agent-sandbox is not installed.
            ApiError: the API server failed.
        """
        if not self._pool:
            return
        root = self.path.rpartition("/")[0]
        try:
            await self._client.request("GET", f"{root}/sandboxwarmpools/{self._pool}")
        except ApiError as error:
            if error.status != 404:
                raise
            raise SandboxUnavailable(
                f"there is no SandboxWarmPool {self._pool} of {GROUP}/{VERSION} in namespace "
                f"{self._client.config.namespace}; install agent-sandbox with its extensions and apply what "
                "`deepswe sandbox manifests --warm-pool` writes, or leave sandbox.kubernetes.warm_pool empty"
            ) from error

    async def create(self, name: str, labels: Mapping[str, str], expires: float) -> None:
        """Claim a sandbox.

        Raises:
            PodStartError: the cluster does not take the claim.
        """
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "SandboxClaim",
            "metadata": {"name": name, "labels": dict(labels)},
            "spec": {
                "warmPoolRef": {"name": self._pool},
                "additionalPodMetadata": {"labels": dict(labels)},
                "lifecycle": {"shutdownTime": write_time(expires)[:19] + "Z", "shutdownPolicy": "Delete"},
            },
        }
        try:
            await self._client.request("POST", self.path, body=body, tries=1)
        except ApiError as error:
            reason = Reason.SERVER if error.passing else Reason.REFUSED
            raise PodStartError(f"the cluster does not take claim {name}: {error}", reason) from error

    async def bound(self, name: str) -> str:
        """Wait until a claim is ready; the name of its pod. No deadline of its own.

        Raises:
            PodStartError: the claim failed.
        """
        pause = LOOK_S
        while True:
            try:
                claim = await self._client.request("GET", f"{self.path}/{name}")
                sandbox = claim.get("status", {}).get("sandbox", {}).get("name", "")
                if sandbox and _is_ready(claim):
                    return await self._pod_of(sandbox)
            except ApiError as error:
                raise PodStartError(f"claim {name} cannot be read: {error}", Reason.SERVER) from error
            await asyncio.sleep(pause)
            pause = min(LONGEST_LOOK_S, 2 * pause)

    async def _pod_of(self, sandbox: str) -> str:
        root = f"/apis/agents.x-k8s.io/{VERSION}/namespaces/{self._client.config.namespace}/sandboxes"
        try:
            found = await self._client.request("GET", f"{root}/{sandbox}")
        except ApiError as error:
            if error.status in (403, 404):
                return sandbox
            raise
        return str(found["metadata"].get("annotations", {}).get(POD_NAME) or sandbox)


def _is_ready(claim: Mapping[str, Any]) -> bool:
    conditions = claim.get("status", {}).get("conditions", [])
    return any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions)
