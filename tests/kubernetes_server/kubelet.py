"""Scheduler and kubelet: gives pods a life, real or simulated, and the misfortunes that were asked for."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.kubernetes_server.channels import Channels, attach, internal
from tests.kubernetes_server.faults import Faults
from tests.kubernetes_server.local import Container, ContainerError
from tests.kubernetes_server.simulated import SimulatedContainer
from tests.kubernetes_server.store import Kind, Object, Refused, Store, stamp

POD = Kind("", "v1", "pods", "Pod", short=("po",))
NODE = "test-node"
MISFORTUNES = ("unschedulable", "image_pull", "config_error", "evict", "out_of_memory", "node_lost", "deleted")
EARLY = ("unschedulable", "image_pull", "config_error")
Key = tuple[str, str]


class Latency:
    """How long things take in simulated pods, in seconds: a model of a loaded node."""

    schedule = (0.01, 0.05)
    start = (0.2, 1.0)
    stop = (0.05, 0.3)
    misfortune = (0.2, 3.0)
    slow = 5.0


class Kubelet:
    def __init__(self, store: Store, faults: Faults, simulate: bool) -> None:
        self.store = store
        self.faults = faults
        self.simulate = simulate
        self.containers: dict[Key, Container | SimulatedContainer] = {}
        self.lives: dict[Key, asyncio.Task[None]] = {}
        self.endings: dict[Key, asyncio.Task[None]] = {}
        self.directory = Path(tempfile.mkdtemp(prefix="deepswe-kubelet-"))
        self.started = 0
        self.most = 0

    def take(self, pod: Object) -> None:
        """A pod was created."""
        key = (pod["metadata"]["namespace"], pod["metadata"]["name"])
        self.lives[key] = asyncio.create_task(self.live(key, pod))

    def status(self, key: Key, **values: Any) -> None:
        def edit(pod: Object) -> None:
            conditions = {item["type"]: item for item in pod.setdefault("status", {}).get("conditions", [])}
            for item in values.pop("conditions", []):
                conditions[item["type"]] = item
            pod["status"] |= {**values, "conditions": list(conditions.values())}

        with suppress(Refused):
            self.store.change(POD, *key, edit)

    def container_status(self, pod: Object, ready: bool = False, **state: Any) -> list[dict[str, Any]]:
        container = pod["spec"]["containers"][0]
        return [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": ready,
                "started": ready,
                "restartCount": 0,
                "state": state,
            }
        ]

    def uniform(self, bounds: tuple[float, float]) -> float:
        return self.faults.random.uniform(*bounds)

    async def live(self, key: Key, pod: Object) -> None:
        """From creation to the end of the container."""
        fate = self.faults.first_of(*MISFORTUNES)
        if self.simulate:
            await asyncio.sleep(self.uniform(Latency.schedule))
        if fate == "unschedulable" or pod["spec"].get("nodeSelector"):
            words = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
            self.status(key, conditions=[condition("PodScheduled", "False", "Unschedulable", words)])
            return
        self.store.change(POD, *key, lambda found: found["spec"].update(nodeName=NODE))
        self.status(
            key,
            conditions=[condition("PodScheduled", "True")],
            hostIP="127.0.0.1",
            startTime=stamp(),
            containerStatuses=self.container_status(pod, waiting={"reason": "ContainerCreating"}),
        )
        if fate in EARLY:
            await self.fail_early(key, pod, fate)
            return
        if self.simulate:
            slow = Latency.slow if self.faults.strikes("slow_start") else 0.0
            await asyncio.sleep(self.uniform(Latency.start) + slow)
        try:
            container = self.make(key, pod)
            await container.start()
        except ContainerError as error:
            self.status(key, containerStatuses=self.container_status(pod, waiting=error.waiting))
            return
        self.containers[key] = container
        self.started += 1
        self.most = max(self.most, len(self.containers))
        running = self.container_status(pod, True, running={"startedAt": stamp()})
        ready = [condition(kind, "True") for kind in ("Ready", "ContainersReady", "Initialized")]
        self.status(key, phase="Running", conditions=ready, podIP="10.0.0.1", containerStatuses=running)
        blow = asyncio.create_task(self.strike(key, pod, fate))
        try:
            await self.until_end(key, pod, container)
        finally:
            blow.cancel()

    def make(self, key: Key, pod: Object) -> Container | SimulatedContainer:
        if self.simulate:
            return SimulatedContainer(pod, self.faults)
        return Container(pod, self.directory / key[1])

    async def until_end(self, key: Key, pod: Object, container: Container | SimulatedContainer) -> None:
        deadline = pod["spec"].get("activeDeadlineSeconds")
        try:
            async with asyncio.timeout(deadline):
                code = await container.wait()
        except TimeoutError:
            await container.kill()
            words = "Pod was active on the node longer than the specified deadline"
            self.status(key, phase="Failed", reason="DeadlineExceeded", message=words)
            code = await container.wait()
        reason = "OOMKilled" if container.out_of_memory else "Completed" if code == 0 else "Error"
        ended = {"exitCode": code, "reason": reason, "message": container.words, "finishedAt": stamp()}
        self.containers.pop(key, None)
        self.status(
            key,
            phase="Succeeded" if code == 0 else "Failed",
            containerStatuses=self.container_status(pod, terminated=ended),
            conditions=[condition("Ready", "False", "PodFailed")],
        )

    async def fail_early(self, key: Key, pod: Object, fate: str) -> None:
        waiting = {"reason": "CreateContainerConfigError", "message": 'secret "x" not found'}
        if fate == "image_pull":
            first = {"reason": "ErrImagePull", "message": "failed to pull image: not found"}
            self.status(key, containerStatuses=self.container_status(pod, waiting=first))
            await asyncio.sleep(0.2)
            waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
        self.status(key, containerStatuses=self.container_status(pod, waiting=waiting))

    async def strike(self, key: Key, pod: Object, fate: str) -> None:
        """Let a misfortune befall a running pod."""
        if not fate:
            return
        await asyncio.sleep(self.uniform(Latency.misfortune))
        container = self.containers.get(key)
        if container is None:
            return
        if fate == "evict":
            words = "The node was low on resource: memory."
            disrupted = condition("DisruptionTarget", "True", "TerminationByKubelet", words)
            self.status(key, phase="Failed", reason="Evicted", message=words, conditions=[disrupted])
            await container.kill()
        elif fate == "out_of_memory":
            container.out_of_memory = True
            await container.kill()
        elif fate == "deleted":
            with suppress(Refused):
                self.delete(key, 0)
        elif fate == "node_lost":
            await container.cut()
            self.status(
                key,
                phase="Running",
                reason="NodeLost",
                message=f"Node {NODE} which was running pod {key[1]} is unresponsive",
                conditions=[condition("Ready", "Unknown", "NodeStatusUnknown", "Kubelet stopped posting node status.")],
            )

    def delete(self, key: Key, grace_s: float) -> Object:
        """Begin to end a pod."""
        pod = self.store.get(POD, *key)
        if key in self.endings:
            return pod

        def edit(found: Object) -> None:
            found["metadata"] |= {
                "deletionTimestamp": stamp(grace_s),
                "deletionGracePeriodSeconds": int(grace_s),
            }

        pod = self.store.change(POD, *key, edit)
        self.endings[key] = asyncio.create_task(self.end(key, grace_s))
        return pod

    async def end(self, key: Key, grace_s: float) -> None:
        container = self.containers.get(key)
        if container is not None:
            await container.terminate(grace_s)
        if self.simulate:
            await asyncio.sleep(self.uniform(Latency.stop))
        life = self.lives.pop(key, None)
        if life is not None:
            if container is None:
                life.cancel()
            await asyncio.wait((life,), timeout=20)
            late = self.containers.get(key)
            if late is not None:
                await late.kill()
                await asyncio.wait((life,), timeout=20)
        with suppress(Refused):
            self.store.remove(POD, *key)
        self.endings.pop(key, None)

    async def exec(self, channels: Channels, key: Key, query: Mapping[str, str], command: list[str]) -> None:
        """Run a command in a pod; `channels` is not open yet, so that a refusal is an HTTP status."""
        pod = self.store.get(POD, *key)
        name = query.get("container") or pod["spec"]["containers"][0]["name"]
        if name not in [item["name"] for item in pod["spec"]["containers"]]:
            raise Refused(400, "BadRequest", f"container {name} is not valid for pod {key[1]}")
        if "nodeName" not in pod["spec"]:
            raise Refused(400, "BadRequest", f"pod {key[1]} does not have a host assigned")
        container = self.containers.get(key)
        if container is None:
            raise Refused(500, "InternalError", f'unable to upgrade connection: container not found ("{name}")')
        dropper = None
        await channels.open()
        if self.faults.strikes("exec_drop"):
            dropper = asyncio.create_task(self.drop_later(channels))
        try:
            if isinstance(container, SimulatedContainer):
                await container.exec(channels)
                return
            try:
                process = await container.exec(command)
            except ContainerError as error:
                await channels.finish(internal(error.message))
                return
            try:
                await attach(channels, process, query.get("stdin") in ("true", "1"))
            finally:
                process.stdin.close() if process.stdin else None
        finally:
            if dropper is not None:
                dropper.cancel()

    async def drop_later(self, channels: Channels) -> None:
        await asyncio.sleep(self.uniform((0.1, 2.0)))
        await channels.drop()

    async def close(self) -> None:
        """End everything."""
        for key in [*self.containers]:
            await self.containers[key].kill()
        for task in [*self.lives.values(), *self.endings.values()]:
            task.cancel()
        await asyncio.gather(*self.lives.values(), *self.endings.values(), return_exceptions=True)
        for name in os.listdir(self.directory):
            with suppress(OSError):
                os.rmdir(self.directory / name)
        with suppress(OSError):
            os.rmdir(self.directory)


def condition(kind: str, status: str, reason: str = "", message: str = "") -> dict[str, Any]:
    made = {"type": kind, "status": status, "lastTransitionTime": stamp()}
    return made | {key: value for key, value in (("reason", reason), ("message", message)) if value}


def now() -> float:
    return time.time()
