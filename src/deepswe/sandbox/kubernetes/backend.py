"""Starts and ends pods for one run; lists and reaps pods of all runs."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from deepswe.config import SandboxConfig
from deepswe.errors import SandboxError, SandboxUnavailable
from deepswe.sandbox.base import SandboxRecord, SandboxSpec
from deepswe.sandbox.kubernetes import pods
from deepswe.sandbox.kubernetes.claims import Claims
from deepswe.sandbox.kubernetes.client import ApiError, Client, find_cluster
from deepswe.sandbox.kubernetes.failures import PodDied, PodStartError, PodState, Reason
from deepswe.sandbox.kubernetes.lease import Lease
from deepswe.sandbox.kubernetes.reaper import Reaper, delete_owned, until_gone
from deepswe.sandbox.kubernetes.sandbox import PodSandbox
from deepswe.sandbox.kubernetes.session import Session
from deepswe.sandbox.kubernetes.watch import PodWatch
from deepswe.sandbox.owner import this_process

CAUSE_S = 2.0
"""How long, after a session broke, the watch may take to say that the pod is gone."""
CLOSE_S = 60.0
ABORT_S = 15.0
CREATING = 32
"""Pods being created at once; a thousand starts asked for together do not hold up the event loop."""
CLEAN_S = 2.0
"""Between looks at pods whose deletion failed."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Life:
    """What has to be undone for one sandbox.

    Attributes:
        pod: name of its pod, once it is known (a claim tells it late).
        owned: name of the object that is ours to delete: the pod, or the claim.
        writes: that it has cost.
        abandoned: nobody wants it any more.
    """

    owned: str
    pod: str = ""
    writes: int = 0
    abandoned: bool = False
    creating: asyncio.Task[None] | None = None
    session: Session | None = None
    guard: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Link:
    """The connection to the cluster, for the event loop it was made on."""

    loop: asyncio.AbstractEventLoop
    client: Client
    watch: PodWatch
    lease: Lease
    claims: Claims
    gate: asyncio.Semaphore
    creating: asyncio.Semaphore


@dataclass(slots=True)
class Figures:
    """What a backend has done.

    Attributes:
        requests: verb -> requests sent, new tries included.
        writes: objects of sandboxes created and deleted, new tries included.
        started, failed: sandboxes.
        reasons: of failed starts.
    """

    requests: Counter[str] = field(default_factory=Counter)
    writes: int = 0
    started: int = 0
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class Backend:
    """The pods of one run. See `deepswe.sandbox.base.Backend`."""

    def __init__(self, config: SandboxConfig, run: str) -> None:
        """Prepare; the cluster is asked at the first start.

        Args:
            config: the recipe's section.
            run: name of the run.
        """
        self.figures = Figures()
        self._config = config
        self._cluster = config.kubernetes
        self._run = run
        self._owner = this_process().tag
        self._link: _Link | None = None
        self._linking: asyncio.Lock | None = None
        self._cleaner: asyncio.Task[None]
        self._lives: dict[str, _Life] = {}
        self._left: dict[str, _Life] = {}
        self._aborted = False

    async def start(self, name: str, spec: SandboxSpec, timeout_s: float) -> PodSandbox:
        """Start one sandbox; see the protocol.

        Raises:
            SandboxUnsupported: the spec asks for what a pod cannot be.
            PodStartError: with the reason in one word.
            SandboxUnavailable: there is no cluster.
        """
        image = spec.image or self._config.image
        if not self._cluster.warm_pool:
            pods.check(spec, image)
        link = await self._connected()
        life = _Life(owned=pods.pod_name(name, self._owner))
        self._lives[name] = life
        try:
            sandbox = await self._start(link, name, life, spec, image, timeout_s)
        except BaseException as error:
            self.figures.failed += 1
            self.figures.reasons[str(getattr(error, "reason", type(error).__name__))] += 1
            await self.stop(name)
            raise
        self.figures.started += 1
        return sandbox

    async def _start(
        self, link: _Link, name: str, life: _Life, spec: SandboxSpec, image: str, timeout_s: float
    ) -> PodSandbox:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                life.creating = asyncio.create_task(self._create(link, life, spec, image))
                await asyncio.shield(life.creating)
                await self._until_running(link, life)
                session = Session(
                    link.client,
                    life.pod,
                    pods.CONTAINER,
                    self._cluster.python,
                    spec.limits.pids,
                    link.gate,
                    lambda: self._cause(link, life),
                )
                life.session = session
                await session.open()
        except TimeoutError as error:
            raise self._late(link, life, timeout_s) from error
        except PodDied as error:
            raise PodStartError(f"sandbox {name} did not start: {error}", error.reason) from error
        _log.debug("pod %s after %.2f s", life.pod, time.monotonic() - begun)
        life.guard = asyncio.create_task(self._guard(link, life))
        return PodSandbox(life.pod, spec, enforced(spec, self._config), session)

    async def _create(self, link: _Link, life: _Life, spec: SandboxSpec, image: str) -> None:
        """Make the pod, or claim one."""
        async with link.creating:
            await self._create_within(link, life, spec, image)

    async def _create_within(self, link: _Link, life: _Life, spec: SandboxSpec, image: str) -> None:
        expires = time.time() + self._config.lifetime_s
        labels = pods.labels_of(spec, self._run, self._owner, expires)
        if self._cluster.warm_pool:
            life.writes += 1
            self.figures.writes += 1
            await link.claims.create(life.owned, labels, expires)
            life.pod = await link.claims.bound(life.owned)
            link.watch.expect(life.pod)
            await link.watch.refresh(life.pod)
            return
        life.pod = life.owned
        link.watch.expect(life.pod)
        whole = spec if image != self._config.image else replace(spec, image="")
        made = pods.pod_manifest(life.pod, whole, image, labels, self._cluster, self._config.lifetime_s)
        while True:
            if life.abandoned:
                raise PodStartError(f"pod {life.pod} is not wanted any more", Reason.DELETED)
            life.writes += 1
            self.figures.writes += 1
            try:
                await link.client.request("POST", link.client.pods, body=made, tries=1)
            except ApiError as error:
                if error.reason == "AlreadyExists" and life.writes > 1:
                    return  # an earlier try arrived, and only its answer was lost
                if not error.passing:
                    raise PodStartError(f"the cluster does not take pod {life.pod}: {error}", Reason.REFUSED) from error
                if life.writes >= self._cluster.writes_per_sandbox - 1:
                    words = f"pod {life.pod} cannot be created after {life.writes} tries: {error}"
                    raise PodStartError(words, Reason.SERVER) from error
                await link.client.rest(life.writes - 1, error)
            else:
                return

    async def _until_running(self, link: _Link, life: _Life) -> None:
        """Wait for the container; a pod without a node is given its own time."""
        state = await self._patiently(link, life.pod)
        if state.stage != "running":
            reason = state.reason or Reason.SLOW
            raise PodStartError(f"pod {life.pod} did not start ({reason}): {state.message}", reason)

    async def _patiently(self, link: _Link, pod: str) -> PodState:
        def done(state: PodState) -> bool:
            return state.stage == "running" or state.reason is Reason.UNSCHEDULABLE

        while True:
            state = await link.watch.wait(pod, done)
            if state.stage != "pending":
                return state
            try:
                async with asyncio.timeout(self._cluster.unschedulable_s):
                    await link.watch.wait(pod, lambda state: state.reason is not Reason.UNSCHEDULABLE)
            except TimeoutError:
                return link.watch.state(pod)

    def _late(self, link: _Link, life: _Life, timeout_s: float) -> PodStartError:
        state = link.watch.state(life.pod)
        reason = state.reason or Reason.SLOW
        words = f": {state.message}" if state.message else ""
        return PodStartError(
            f"pod {life.owned} was not ready within {timeout_s:g} s ({reason}, {state.stage}){words}; "
            "raise sandbox.start_timeout_s, or see `kubectl describe pod`",
            reason,
        )

    async def _cause(self, link: _Link, life: _Life) -> PodDied | None:
        """Why the pod is gone, if it is: the watch may need a moment to know."""
        try:
            async with asyncio.timeout(CAUSE_S):
                state = await link.watch.wait(life.pod, lambda state: False)
        except TimeoutError:
            return None
        return _death(life.pod, state)

    async def _guard(self, link: _Link, life: _Life) -> None:
        """Tell whoever waits for an answer when the pod goes."""
        state = await link.watch.wait(life.pod, lambda state: False)
        if life.session is not None:
            life.session.fail(_death(life.pod, state))

    async def stop(self, name: str) -> None:
        """End one sandbox, to the end even if the caller is cancelled; see the protocol."""
        life = self._lives.get(name)
        if life is None:
            return
        if life.ending is None:
            life.ending = asyncio.ensure_future(self._end(name, life))
        await asyncio.shield(life.ending)

    async def _end(self, name: str, life: _Life) -> None:
        link = self._link
        assert link is not None
        if life.creating is not None and not life.creating.done():
            # What is on its way to the cluster has to arrive before it can be deleted.
            life.abandoned = True
            await asyncio.wait((life.creating,), timeout=self._cluster.request_timeout_s)
            life.creating.cancel()
            await asyncio.wait((life.creating,))
        if life.guard is not None:
            life.guard.cancel()
        if life.session is not None:
            await life.session.close()
        del self._lives[name]
        tries = max(1, self._cluster.writes_per_sandbox - life.writes)
        if life.writes and not await self._delete(link, life, tries):
            self._left[name] = life
        link.watch.forget(life.pod)

    async def _delete(self, link: _Link, life: _Life, tries: int) -> bool:
        """Delete what is ours; False if that has to be tried again later."""
        path = f"{link.claims.path if self._cluster.warm_pool else link.client.pods}/{life.owned}"
        options = {"gracePeriodSeconds": pods.GRACE_S, "propagationPolicy": "Background"}
        for attempt in range(tries):
            life.writes += 1
            self.figures.writes += 1
            try:
                await link.client.request("DELETE", path, body=options, tries=1)
            except ApiError as error:
                if error.status == 404:
                    return True
                if attempt + 1 < tries:
                    await link.client.rest(attempt, error)
            else:
                return True
        return False

    async def _clean(self, link: _Link) -> None:
        """Now and then try again to delete what could not be deleted."""
        while True:
            await asyncio.sleep(CLEAN_S)
            await self._clean_once(link)

    async def _clean_once(self, link: _Link) -> None:
        for name, life in list(self._left.items()):
            if await self._delete(link, life, tries=1):
                self._left.pop(name, None)

    async def close(self) -> None:
        """End all sandboxes and the connection."""
        link = self._link
        if link is None or link.loop is not asyncio.get_running_loop():
            return
        if self._lives:
            await asyncio.wait([asyncio.ensure_future(self.stop(name)) for name in self._lives], timeout=CLOSE_S)
        self._cleaner.cancel()
        try:
            async with asyncio.timeout(CLOSE_S):
                while self._left:
                    await self._clean_once(link)
                    await asyncio.sleep(CLEAN_S / 4 if self._left else 0)
                await delete_owned(link.client, self._owner, self._run)
                await until_gone(link.client, pods.owner_selector(self._owner, self._run))
        except (TimeoutError, SandboxError) as error:
            _log.warning("pods of run %s may be left: %s; `deepswe sandbox reap` ends them", self._run, error)
        await self._disconnect(link)

    async def _disconnect(self, link: _Link) -> None:
        self._link = None
        self._cleaner.cancel()
        await link.lease.close()
        await link.watch.close()
        self.figures.requests.update(link.client.counts)
        await link.client.close()

    def abort(self) -> None:
        """End all pods of this run without this event loop, in a thread with one of its own."""
        if self._aborted or not (self._lives or self._left):
            return
        self._aborted = True
        thread = threading.Thread(target=self._abort, name="abort-pods", daemon=True)
        thread.start()
        thread.join(ABORT_S)

    def _abort(self) -> None:
        async def end() -> None:
            client = Client(self._cluster, await find_cluster(self._cluster))
            try:
                async with asyncio.timeout(ABORT_S):
                    await delete_owned(client, self._owner, self._run)
            finally:
                await client.close()

        try:
            asyncio.run(end())
        except (SandboxError, TimeoutError) as error:
            _log.warning("pods of run %s may be left: %s; `deepswe sandbox reap` ends them", self._run, error)

    async def _connected(self) -> _Link:
        """The connection to the cluster, made anew on another event loop.

        Raises:
            SandboxUnavailable: there is none.
        """
        loop = asyncio.get_running_loop()
        if self._linking is None or (self._link is not None and self._link.loop is not loop):
            self._linking, self._link = asyncio.Lock(), None
        async with self._linking:
            if self._link is None:
                self._link = await self._connect(loop)
            return self._link

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> _Link:
        client = Client(self._cluster, await find_cluster(self._cluster))
        watch = PodWatch(client, pods.owner_selector(self._owner, self._run))
        lease = Lease(client, self._owner, self._run)
        claims = Claims(client, self._cluster.warm_pool)
        try:
            await claims.check()
            await watch.start()
            await lease.start()
        except BaseException as error:
            await watch.close()
            await client.close()
            if isinstance(error, ApiError):
                raise SandboxUnavailable(explain(error, self._cluster.namespace)) from error
            raise
        gates = asyncio.Semaphore(self._cluster.connecting), asyncio.Semaphore(CREATING)
        link = _Link(loop, client, watch, lease, claims, *gates)
        self._cleaner = asyncio.create_task(self._clean(link))
        return link


def _death(pod: str, state: PodState) -> PodDied:
    reason = state.reason or Reason.DELETED
    return PodDied(f"pod {pod} is gone ({reason}): {state.message}", reason)


def enforced(spec: SandboxSpec, config: SandboxConfig) -> Mapping[str, str]:
    """Limit -> how it is kept."""
    memory = config.kubernetes.scratch == "memory"
    disk = f"tmpfs of {pods.scratch_mib(spec)} MiB" if memory else "eviction by the kubelet, after some time"
    return {
        "memory_mib": "control group of the container",
        "cpus": "control group of the container",
        "pids": "server, looking five times a second",
        "disk_mib": f"{disk}; elsewhere in the image: eviction by the kubelet, after some time",
        "output_bytes": "server",
        "network": "NetworkPolicy of the namespace, where the cluster's network plugin honours it",
    }


def explain(error: ApiError, namespace: str) -> str:
    """One line for a cluster that does not let us work, with what to do."""
    hints = {
        0: "is the cluster up, and sandbox.kubernetes.kubeconfig (or KUBECONFIG) right?",
        401: "the credentials are not valid; renew them",
        403: f"apply deploy/kubernetes, which has a role for namespace {namespace}",
        404: f"make the namespace {namespace}, or set sandbox.kubernetes.namespace",
    }
    return f"{error}; {hints.get(error.status, 'see the events of the cluster')}"


def open_backend(config: SandboxConfig, run: str, directory: Path) -> Backend:
    """See `deepswe.sandbox.backends`."""
    return Backend(config, run)


async def list_sandboxes(config: SandboxConfig) -> list[SandboxRecord]:
    """All pods of this package in the namespace; see `deepswe.sandbox.backends.Registry`."""
    async with Reaper(config.kubernetes) as reaper:
        return await reaper.records()


async def reap(config: SandboxConfig) -> list[SandboxRecord]:
    """End orphaned and expired pods; see `deepswe.sandbox.backends.Registry`."""
    async with Reaper(config.kubernetes) as reaper:
        return await reaper.reap()
