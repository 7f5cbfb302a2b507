"""What is asked of the cluster for one sandbox: the pod, its labels and its name. Pure functions."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Mapping
from typing import Any

from deepswe.config import KubernetesConfig
from deepswe.errors import SandboxUnsupported
from deepswe.sandbox.base import EXPIRES, OWNER, RUN, TASK, SandboxRecord, SandboxSpec
from deepswe.sandbox.kubernetes import program
from deepswe.sandbox.owner import judge

HOME = "/home/agent"
CONTAINER = "sandbox"
PREFIX = "deepswe.sandbox/"
"""Of our labels and annotations: run, task, owner, expires."""
MANAGED = "app.kubernetes.io/managed-by"
MANAGER = "deepswe"
SELECTOR = f"{MANAGED}={MANAGER}"
GRACE_S = 1
"""Between asking the processes of a pod to end and killing them; process 1 ends when it is told to by its session."""
NAME_LENGTH = 63
_LEAST_MIB = 1


def pod_name(name: str, salt: str) -> str:
    """A legal name for a pod that says which sandbox it is, different for each owner.

    Args:
        name: the pool's.
        salt: of the owner.
    """
    tail = hashlib.sha256(f"{salt}/{name}".encode()).hexdigest()[:10]
    head = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[: NAME_LENGTH - len(tail) - 1].strip("-")
    return f"{head or 'sandbox'}-{tail}"


def label_value(text: str) -> str:
    """Text as the value of a label: at most 63 characters, with a hash where something had to go."""
    made = re.sub(r"[^A-Za-z0-9_.-]", "-", text)
    if made == text and len(text) <= NAME_LENGTH and re.fullmatch(r"([A-Za-z0-9](.*[A-Za-z0-9])?)?", text):
        return text
    tail = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{made[: NAME_LENGTH - 9].strip('-_.')}-{tail}".lstrip("-")


def labels_of(spec: SandboxSpec, run: str, owner: str, expires: float) -> dict[str, str]:
    """The labels of a sandbox's objects."""
    own = {RUN: run, TASK: "", OWNER: owner, EXPIRES: str(int(expires))}
    wanted = {**own, **spec.labels}
    made = {PREFIX + label_value(name): label_value(value) for name, value in wanted.items()}
    return {MANAGED: MANAGER, "app.kubernetes.io/name": "deepswe-sandbox", **made}


def owner_selector(owner: str, run: str) -> str:
    """The labels of the pods of one owner and run."""
    return f"{SELECTOR},{PREFIX}{OWNER}={label_value(owner)},{PREFIX}{RUN}={label_value(run)}"


def check(spec: SandboxSpec, image: str) -> None:
    """Refuse what a pod cannot be.

    Raises:
        SandboxUnsupported: naming it.
    """
    if not image:
        raise SandboxUnsupported("a pod needs an image: set sandbox.image, or use tasks that name one")
    if spec.layers:
        raise SandboxUnsupported(
            f"layer {spec.layers[0].source} lies on this machine, and pods run on others; put it into an image"
        )


def pod_manifest(
    name: str, spec: SandboxSpec, image: str, labels: Mapping[str, str], config: KubernetesConfig, lifetime_s: float
) -> dict[str, Any]:
    """The pod of one sandbox.

    Args:
        name: from `pod_name`.
        spec: what to start.
        image: of the spec, or the recipe's.
        labels: from `labels_of`.
        config: the recipe's section.
        lifetime_s: seconds after which the cluster ends it, whoever holds it.
    """
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": dict(labels),
            "annotations": {
                PREFIX + RUN: labels.get(PREFIX + RUN, ""),
                PREFIX + TASK: spec.labels.get(TASK, ""),
                "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
                "karpenter.sh/do-not-disrupt": "true",
            },
        },
        "spec": pod_spec(spec, image, config, lifetime_s),
    }


def pod_spec(spec: SandboxSpec, image: str, config: KubernetesConfig, lifetime_s: float) -> dict[str, Any]:
    """The specification of a pod, also for the template of a warm pool."""
    made: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": max(1, int(lifetime_s)),
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": "sandbox",
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(spec, image, config)],
        "volumes": [{"name": "scratch", "emptyDir": _scratch(spec, config)}],
    }
    if config.user > 0:
        ids = {"runAsUser": config.user, "runAsGroup": config.user, "fsGroup": config.user, "runAsNonRoot": True}
        made["securityContext"] |= ids
    elif config.user == 0:
        made["securityContext"] |= {"runAsUser": 0, "runAsGroup": 0}
    optional = {
        "nodeSelector": config.node_selector,
        "tolerations": [item.model_dump(exclude_defaults=True) for item in config.tolerations],
        "imagePullSecrets": [{"name": secret} for secret in config.pull_secrets],
        "runtimeClassName": config.runtime_class,
        "priorityClassName": config.priority_class,
    }
    return made | {key: value for key, value in optional.items() if value}


def _container(spec: SandboxSpec, image: str, config: KubernetesConfig) -> dict[str, Any]:
    limits = spec.limits
    disk = limits.disk_mib if config.scratch == "disk" else 2 * limits.disk_mib
    share = config.requests
    return {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": config.pull_policy,
        "command": program.boot_command(config.python),
        "workingDir": "/",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {
            "limits": {
                "cpu": f"{round(limits.cpus * 1000)}m",
                "memory": f"{limits.memory_mib}Mi",
                "ephemeral-storage": f"{disk}Mi",
            },
            "requests": {
                "cpu": f"{max(1, round(limits.cpus * 1000 * share))}m",
                "memory": f"{max(_LEAST_MIB, round(limits.memory_mib * share))}Mi",
                "ephemeral-storage": f"{max(_LEAST_MIB, round(disk * share))}Mi",
            },
        },
        "securityContext": container_rights(),
        "volumeMounts": _mounts(spec),
    }


def container_rights() -> dict[str, Any]:
    """No capability, and no way to gain one."""
    return {"allowPrivilegeEscalation": False, "privileged": False, "capabilities": {"drop": ["ALL"]}}


def _mounts(spec: SandboxSpec) -> list[dict[str, Any]]:
    """Private directories; an image that a task names brings its working directory itself."""
    wanted = {"tmp": "/tmp", "home": HOME, "shm": "/dev/shm"}
    if not spec.image and spec.workdir not in wanted.values():
        wanted["workdir"] = spec.workdir
    return [{"name": "scratch", "mountPath": path, "subPath": name} for name, path in wanted.items()]


def _scratch(spec: SandboxSpec, config: KubernetesConfig) -> dict[str, Any]:
    """Files in memory count against its limit, of which a quarter is left to the processes."""
    if config.scratch == "disk":
        return {"sizeLimit": f"{spec.limits.disk_mib}Mi"}
    return {"medium": "Memory", "sizeLimit": f"{scratch_mib(spec)}Mi"}


def scratch_mib(spec: SandboxSpec) -> int:
    """The bound on files in memory."""
    return max(1, min(spec.limits.disk_mib, spec.limits.memory_mib * 3 // 4))


def read_record(pod: Mapping[str, Any], now: float, orphans: frozenset[str] = frozenset()) -> SandboxRecord:
    """A pod as `deepswe sandbox ls` shows it.

    Args:
        pod: as the API server gave it.
        now: seconds since 1970.
        orphans: tags of owners that are known to be dead, for owners on other machines.
    """
    metadata = pod["metadata"]
    labels = metadata.get("labels", {})
    owner = labels.get(PREFIX + OWNER, "")
    created = read_time(metadata.get("creationTimestamp", ""))
    text = labels.get(PREFIX + EXPIRES, "")
    expires = float(text) if text.isdigit() else created
    state = "orphaned" if owner in orphans else judge(owner, expires, now)
    return SandboxRecord(
        backend="kubernetes",
        name=metadata["name"],
        run=labels.get(PREFIX + RUN, ""),
        task=metadata.get("annotations", {}).get(PREFIX + TASK) or labels.get(PREFIX + TASK, ""),
        owner=owner,
        created=created,
        expires=expires,
        state=state,
    )


def read_time(text: str) -> float:
    """Seconds since 1970 of a time as Kubernetes writes it; 0 for none."""
    return datetime.datetime.fromisoformat(text).timestamp() if text else 0.0


def write_time(seconds: float) -> str:
    """A time as Kubernetes writes it, with microseconds."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
