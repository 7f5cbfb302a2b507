"""Why a pod did not start or is gone: one word for each cause, read from the pod's status.

The words are the values of `Reason`, in `PodStartError.reason` and `PodDied.reason`; both errors are the kinds that
every backend raises, so callers that do not care need not know them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from deepswe.errors import SandboxDied, SandboxStartError

Json = Mapping[str, Any]


class Reason(StrEnum):
    """What became of a pod."""

    IMAGE = "image"
    """The image cannot be pulled, or its name is wrong."""
    CONFIG = "config"
    """The container cannot be made or started as it is described."""
    UNSCHEDULABLE = "unschedulable"
    """No node takes it."""
    EVICTED = "evicted"
    """The node took its place away: too little memory or disk, a drain, a pod of higher priority."""
    OOM = "out_of_memory"
    """It passed its memory limit."""
    EXPIRED = "expired"
    """It reached its lifetime."""
    NODE = "node_lost"
    """Its node is gone or does not answer."""
    DELETED = "deleted"
    """Somebody else deleted it."""
    EXITED = "exited"
    """Its process ended by itself."""
    SESSION = "session_lost"
    """It runs, but no session into it can be opened or kept."""
    REFUSED = "refused"
    """The API server does not take the pod: quota, rights, a wrong field."""
    SERVER = "api_server"
    """The API server itself failed, for longer than requests are tried again."""
    SLOW = "slow"
    """It was not ready in time, for no reason that its status tells."""


class PodStartError(SandboxStartError):
    """A pod did not become a sandbox."""

    def __init__(self, message: str, reason: Reason) -> None:
        """Say what, and why in one word."""
        super().__init__(message)
        self.reason = reason


class PodDied(SandboxDied):
    """A pod that was a sandbox is gone, or cannot be reached any more."""

    def __init__(self, message: str, reason: Reason) -> None:
        """Say what, and why in one word."""
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PodState:
    """What a pod's status says.

    Attributes:
        stage: `pending` and `running` may become anything; `gone` is the end.
        reason: of the end; while pending, what stands in the way, if it is known.
        message: for a reader.
    """

    stage: Literal["pending", "running", "gone"]
    reason: Reason | None = None
    message: str = ""


_IMAGE = ("ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError", "RegistryUnavailable")
_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff")
_PODS = {
    "Evicted": Reason.EVICTED,
    "Preempting": Reason.EVICTED,
    "Terminated": Reason.EVICTED,
    "NodeShutdown": Reason.EVICTED,
    "DeadlineExceeded": Reason.EXPIRED,
    "NodeLost": Reason.NODE,
    "NodeAffinity": Reason.UNSCHEDULABLE,
    "OutOfmemory": Reason.UNSCHEDULABLE,
    "OutOfcpu": Reason.UNSCHEDULABLE,
    "OutOfpods": Reason.UNSCHEDULABLE,
    "UnexpectedAdmissionError": Reason.UNSCHEDULABLE,
}
_DISRUPTIONS = {
    "PreemptionByScheduler": Reason.EVICTED,
    "EvictionByEvictionAPI": Reason.EVICTED,
    "TerminationByKubelet": Reason.EVICTED,
    "DeletionByTaintManager": Reason.NODE,
    "DeletionByPodGC": Reason.NODE,
}


def read_state(pod: Json) -> PodState:
    """The state of a pod as the API server gave it."""
    status = pod.get("status", {})
    container = _container(status)
    words = [status.get("reason", ""), status.get("message", "")]
    ended = container.get("state", {}).get("terminated")
    phase = status.get("phase", "Pending")
    if ended is not None or phase in ("Failed", "Succeeded"):
        return _end(status, ended or {}, words)
    disrupted = _condition(status, "DisruptionTarget")
    if disrupted.get("status") == "True":
        reason = _DISRUPTIONS.get(disrupted.get("reason", ""), Reason.EVICTED)
        return PodState("gone", reason, _join(disrupted.get("reason", ""), disrupted.get("message", "")))
    if "deletionTimestamp" in pod.get("metadata", {}):
        return PodState("gone", Reason.NODE if status.get("reason") == "NodeLost" else Reason.DELETED, _join(*words))
    if phase == "Unknown" or status.get("reason") == "NodeLost":
        return PodState("gone", Reason.NODE, _join(*words))
    if container.get("state", {}).get("running") is not None:
        return PodState("running")
    return _pending(status, container)


def gone(pod: Json) -> PodState:
    """The state of a pod that a watch reported as deleted."""
    state = read_state(pod)
    return state if state.stage == "gone" else PodState("gone", Reason.DELETED, "the pod was deleted")


def _end(status: Json, ended: Json, words: list[str]) -> PodState:
    text = [*words, ended.get("reason", ""), ended.get("message", "").strip()[-500:]]
    if "exitCode" in ended:
        text.append(f"exit code {ended['exitCode']}")
    reason = _PODS.get(status.get("reason", ""))
    if reason is None and ended.get("reason") == "OOMKilled":
        reason = Reason.OOM
    if reason is None and ended.get("reason") in ("StartError", "ContainerCannotRun"):
        reason = Reason.CONFIG
    disrupted = _condition(status, "DisruptionTarget")
    if reason is None and disrupted.get("status") == "True":
        reason = _DISRUPTIONS.get(disrupted.get("reason", ""), Reason.EVICTED)
    return PodState("gone", reason or Reason.EXITED, _join(*text))


def _pending(status: Json, container: Json) -> PodState:
    waiting = container.get("state", {}).get("waiting", {})
    word, text = waiting.get("reason", ""), waiting.get("message", "")
    if word in _IMAGE:
        return PodState("gone", Reason.IMAGE, _join(word, text))
    if word in _CONFIG:
        return PodState("gone", Reason.CONFIG, _join(word, text))
    if word == "ErrImagePull":
        return PodState("pending", Reason.IMAGE, _join(word, text))
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return PodState("pending", Reason.UNSCHEDULABLE, _join("Unschedulable", scheduled.get("message", "")))
    return PodState("pending", None, _join(word, text))


def _container(status: Json) -> Json:
    found: list[Json] = status.get("containerStatuses", [])
    return found[0] if found else {}


def _condition(status: Json, kind: str) -> Json:
    conditions: list[Json] = status.get("conditions", [])
    return next((item for item in conditions if item.get("type") == kind), {})


def _join(*parts: str) -> str:
    return ": ".join(dict.fromkeys(part for part in parts if part))
