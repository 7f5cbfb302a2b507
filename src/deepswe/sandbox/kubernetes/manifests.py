"""Manifests that depend on tasks and settings: images brought to nodes ahead of time, and a warm pool of agent-sandbox.

Everything else a cluster needs stands in `deploy/kubernetes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]

from deepswe.config import KubernetesConfig, SandboxConfig
from deepswe.sandbox.base import Limits, SandboxSpec
from deepswe.sandbox.kubernetes import claims, pods
from deepswe.tasks.task import TaskSet

BATCH = 40
"""Images of one DaemonSet: pulled one after another on each node, while the DaemonSets go on side by side."""
PREPULL_PRIORITY = "deepswe-prepull"
_WAIT = "import signal; signal.pause()"
_PROVE = "import sys; sys.exit(sys.version_info < (3, 10))"
"""What an image has to be able to do: run our server."""


def images_of(tasks: TaskSet) -> tuple[str, ...]:
    """The images that tasks name, each once, in order."""
    return tuple(dict.fromkeys(task.image.name for task in tasks.tasks if task.image is not None))


def prepull(images: Sequence[str], config: KubernetesConfig, batch: int = BATCH) -> list[dict[str, Any]]:
    """DaemonSets that bring images to every node of the sandboxes, `batch` images each.

    Each image is an init container that proves in passing that the image can run the resident server; a node that has
    all of a batch keeps one idle pod, so that the images stay.

    Args:
        images: names, without repetitions.
        config: nodes, secrets, pull policy, interpreter.
        batch: images of one DaemonSet.
    """
    parts = [images[start : start + batch] for start in range(0, len(images), batch)]
    return [_daemon_set(f"deepswe-prepull-{number}", part, config) for number, part in enumerate(parts)]


def _daemon_set(name: str, images: Sequence[str], config: KubernetesConfig) -> dict[str, Any]:
    template = pods.pod_spec(SandboxSpec(limits=Limits()), images[0], config, 1)
    for key in ("activeDeadlineSeconds", "hostname", "volumes"):
        del template[key]
    labels = {"app.kubernetes.io/name": "deepswe-prepull", "app.kubernetes.io/instance": name}
    template |= {
        "restartPolicy": "Always",
        "priorityClassName": PREPULL_PRIORITY,
        "initContainers": [_puller(f"image-{n}", image, _PROVE, config) for n, image in enumerate(images)],
        "containers": [_puller("keep", images[0], _WAIT, config)],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": config.namespace, "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%"}},
            "template": {"metadata": {"labels": labels}, "spec": template},
        },
    }


def _puller(name: str, image: str, code: str, config: KubernetesConfig) -> dict[str, Any]:
    size = {"cpu": "10m", "memory": "32Mi", "ephemeral-storage": "16Mi"}
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": config.pull_policy,
        "command": [config.python, "-I", "-S", "-c", code],
        "resources": {"requests": size, "limits": {"cpu": "500m", "memory": "64Mi", "ephemeral-storage": "64Mi"}},
        "securityContext": pods.container_rights(),
    }


def warm_pool(config: SandboxConfig, limits: Limits, replicas: int) -> list[dict[str, Any]]:
    """A SandboxTemplate and a SandboxWarmPool of agent-sandbox whose pods a client of ours can claim.

    Args:
        config: `kubernetes.warm_pool` names the pool, `image` what runs in it.
        limits: of each sandbox.
        replicas: sandboxes kept ready.
    """
    spec = SandboxSpec(limits=limits)
    pods.check(spec, config.image)
    name = config.kubernetes.warm_pool
    metadata = {"name": name, "namespace": config.kubernetes.namespace}
    pod = pods.pod_spec(spec, config.image, config.kubernetes, config.lifetime_s)
    del pod["activeDeadlineSeconds"]  # a warm pod waits for as long as it must; the claim has the expiry
    version = f"{claims.GROUP}/{claims.VERSION}"
    return [
        {
            "apiVersion": version,
            "kind": "SandboxTemplate",
            "metadata": metadata,
            "spec": {"networkPolicyManagement": "Unmanaged", "podTemplate": {"spec": pod}},
        },
        {
            "apiVersion": version,
            "kind": "SandboxWarmPool",
            "metadata": metadata,
            "spec": {"replicas": replicas, "sandboxTemplateRef": {"name": name}},
        },
    ]


def to_yaml(objects: Iterable[dict[str, Any]]) -> str:
    """Several objects as one file for kubectl."""
    made: str = yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=10_000)
    return made


class _Plain(yaml.SafeDumper):  # type: ignore[misc]
    """Writes what occurs twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always."""
        return True
