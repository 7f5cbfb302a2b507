"""One watch over all pods of a namespace that are ours, instead of a question for each.

A list gives the state and its resource version; the watch goes on from there, and its bookmarks keep the version young.
When the server has forgotten the version (410) or the connection breaks, the pods are listed anew; a pod that is
missing from the new list has been deleted meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from deepswe.sandbox.kubernetes.client import ApiError, Client, pause_s
from deepswe.sandbox.kubernetes.failures import PodState, Reason, gone, read_state

WATCH_S = 300
"""How long the server keeps one watch open."""
IDLE_S = WATCH_S + 60.0
PAGE = 500
BURST = 100
"""Events taken before others get a turn on the event loop."""
NOTHING = PodState("pending")
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError)
"""What reading an object raises that is not of the form of a pod."""


class PodWatch:
    """The last known state of each pod that somebody asked about."""

    def __init__(self, client: Client, selector: str) -> None:
        """Prepare.

        Args:
            client: of the cluster.
            selector: of labels; which pods to watch.
        """
        self.relists = 0
        self._client = client
        self._selector = selector
        self._states: dict[str, PodState] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._listed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to watch, and wait for the first list.

        Raises:
            ApiError: the pods cannot be listed at all.
        """
        version = await self._list()
        self._task = asyncio.create_task(self._run(version))

    async def close(self) -> None:
        """End the watch."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def expect(self, name: str) -> None:
        """From now on keep the state of a pod, which is about to be made."""
        self._states.setdefault(name, NOTHING)
        self._changed.setdefault(name, asyncio.Event())

    async def refresh(self, name: str) -> None:
        """Ask once for the state of a pod that was there before it was expected.

        Raises:
            ApiError: it cannot be read.
        """
        self._set(name, read_state(await self._client.request("GET", f"{self._client.pods}/{name}")))

    def forget(self, name: str) -> None:
        """Keep its state no longer; whoever waits for it learns that it is gone."""
        self._states.pop(name, None)
        changed = self._changed.pop(name, None)
        if changed is not None:
            changed.set()

    def state(self, name: str) -> PodState:
        """The last known state; pending before the first."""
        return self._states.get(name, NOTHING)

    async def wait(self, name: str, enough: Callable[[PodState], bool]) -> PodState:
        """Wait until the state of an expected pod is `enough`, or it is gone. No deadline of its own."""
        while True:
            changed = self._changed.get(name)
            if changed is None:
                return PodState("gone", Reason.DELETED, "it was ended by its owner")
            state = self._states[name]
            if state.stage == "gone" or enough(state):
                return state
            changed.clear()
            await changed.wait()

    def _set(self, name: str, state: PodState) -> None:
        """Keep a state. The first cause of an end stays: what follows it is only the clearing away."""
        if name in self._states and self._states[name].stage != "gone" and self._states[name] != state:
            self._states[name] = state
            self._changed[name].set()

    async def _run(self, version: str) -> None:
        failures = 0
        while True:
            try:
                version = await self._follow(version) or await self._list()
                failures = 0
            except ApiError as error:
                failures += 1
                await asyncio.sleep(pause_s(min(failures, 6), error.retry_after_s))
                version = await self._persist(self._list)

    async def _persist(self, listing: Callable[[], Awaitable[str]]) -> str:
        """List until it succeeds: without a watch no pod's end would ever be known."""
        attempt = 0
        while True:
            try:
                return await listing()
            except ApiError as error:
                await asyncio.sleep(pause_s(min(attempt, 6), error.retry_after_s))
                attempt += 1

    async def _list(self) -> str:
        """Take all pods; returns the resource version."""
        self.relists += 1
        expected = set(self._states)
        seen: set[str] = set()
        more = ""
        while True:
            query = {"labelSelector": self._selector, "limit": str(PAGE)} | ({"continue": more} if more else {})
            page = await self._client.request("GET", self._client.pods, query=query)
            try:
                for pod in page.get("items") or []:
                    seen.add(pod["metadata"]["name"])
                    self._set(pod["metadata"]["name"], read_state(pod))
                more, version = page["metadata"].get("continue", ""), str(page["metadata"]["resourceVersion"])
            except _UNREADABLE as error:
                raise ApiError("GET pods", 0, "BadList", repr(error)) from error
            if not more:
                break
        for name in expected - seen:
            if self.state(name) is not NOTHING:
                self._set(name, PodState("gone", Reason.DELETED, "the pod was deleted"))
        return version

    async def _follow(self, version: str) -> str:
        """Take events from a version on; returns the version to go on from, or nothing if it is forgotten."""
        query = {
            "watch": "true",
            "labelSelector": self._selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        taken = 0
        try:
            async for line in self._client.lines(self._client.pods, query, IDLE_S):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    if event["object"].get("code") == 410:
                        return ""
                    raise _broken(event["object"])
                version = event["object"]["metadata"]["resourceVersion"]
                self._take(event["type"], event["object"])
                taken += 1
                if taken % BURST == 0:
                    await asyncio.sleep(0)
        except ApiError as error:
            if error.status == 410:
                return ""
            raise
        except _UNREADABLE as error:
            raise ApiError("WATCH pods", 0, "BadEvent", repr(error)) from error
        return version

    def _take(self, kind: str, pod: dict[str, Any]) -> None:
        name = pod["metadata"].get("name", "")
        if kind == "DELETED":
            self._set(name, gone(pod))
        elif kind in ("ADDED", "MODIFIED"):
            self._set(name, read_state(pod))


def _broken(status: dict[str, Any]) -> ApiError:
    code = status.get("code", 500)
    return ApiError("WATCH pods", code, status.get("reason", ""), status.get("message", ""))
