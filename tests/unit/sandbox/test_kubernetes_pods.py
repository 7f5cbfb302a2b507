"""What is asked of a cluster, and what its answers mean: pure functions."""

from pathlib import Path

import pytest

from deepswe.config import KubernetesConfig, SandboxConfig, Toleration
from deepswe.errors import SandboxDied, SandboxStartError, SandboxUnsupported
from deepswe.sandbox.base import Layer, Limits, SandboxSpec
from deepswe.sandbox.kubernetes import pods, program
from deepswe.sandbox.kubernetes.failures import PodDied, PodStartError, Reason, gone, read_state
from deepswe.sandbox.kubernetes.manifests import images_of, prepull, to_yaml, warm_pool
from deepswe.sandbox.kubernetes.resident import DOWN, UP, Broken, Codec
from deepswe.tasks.task import TaskSet

SPEC = SandboxSpec(limits=Limits(memory_mib=512, disk_mib=100, cpus=1.5))


def manifest(config=None, spec=SPEC):
    labels = pods.labels_of(spec, "run", "1-2-abc", 1000.0)
    return pods.pod_manifest("x", spec, "image:1", labels, config or KubernetesConfig(), 60.0)


def test_a_pod_has_limits_a_share_of_them_as_requests_and_an_expiry():
    spec = manifest()["spec"]
    resources = spec["containers"][0]["resources"]
    assert resources["limits"] == {"cpu": "1500m", "memory": "512Mi", "ephemeral-storage": "200Mi"}
    assert resources["requests"] == {"cpu": "375m", "memory": "128Mi", "ephemeral-storage": "50Mi"}
    assert spec["activeDeadlineSeconds"] == 60
    assert spec["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "100Mi"}


def test_a_pod_has_no_rights():
    spec = manifest()["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    rights = spec["containers"][0]["securityContext"]
    assert rights == {"allowPrivilegeEscalation": False, "privileged": False, "capabilities": {"drop": ["ALL"]}}


def test_everything_of_the_recipe_is_in_the_pod():
    config = KubernetesConfig(
        node_selector={"pool": "a"},
        tolerations=(Toleration(key="pool", operator="Equal", value="a", effect="NoSchedule"),),
        pull_secrets=("registry",),
        runtime_class="gvisor",
        priority_class="low",
        pull_policy="Never",
        user=0,
    )
    spec = manifest(config)["spec"]
    assert spec["nodeSelector"] == {"pool": "a"}
    assert spec["tolerations"] == [{"key": "pool", "operator": "Equal", "value": "a", "effect": "NoSchedule"}]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert (spec["runtimeClassName"], spec["priorityClassName"]) == ("gvisor", "low")
    assert spec["containers"][0]["imagePullPolicy"] == "Never"
    assert spec["securityContext"]["runAsUser"] == 0
    assert "runAsNonRoot" not in spec["securityContext"]


def test_an_image_of_a_task_keeps_its_working_directory():
    def mounted(spec):
        return {item["mountPath"] for item in manifest(spec=spec)["spec"]["containers"][0]["volumeMounts"]}

    assert "/testbed" in mounted(SPEC)
    assert "/testbed" not in mounted(SandboxSpec(image="task:1"))


def test_labels_are_legal_and_tell_run_task_owner_and_expiry():
    spec = SandboxSpec(labels={"task": "a__b/c d" * 20})
    labels = pods.labels_of(spec, "my run!", "1-2-abc", 1000.7)
    assert labels["deepswe.sandbox/owner"] == "1-2-abc"
    assert labels["deepswe.sandbox/expires"] == "1000"
    assert labels["deepswe.sandbox/run"].startswith("my-run-")
    assert all(len(value) <= 63 and value.strip("-_.") == value for value in labels.values())


def test_names_of_pods_are_legal_and_differ_by_owner():
    one, two = pods.pod_name("Run_1-" * 30, "a"), pods.pod_name("Run_1-" * 30, "b")
    assert one != two
    assert len(one) <= 63
    assert one.replace("-", "").isalnum()
    assert one == one.lower()


def test_layers_and_a_missing_image_are_refused():
    with pytest.raises(SandboxUnsupported, match=r"set sandbox\.image"):
        pods.check(SPEC, "")
    with pytest.raises(SandboxUnsupported, match="/here lies on this machine"):
        pods.check(SandboxSpec(layers=(Layer(Path("/here"), "/x"),)), "image")


def container(**state):
    return {"status": {"phase": "Pending", "containerStatuses": [{"name": "sandbox", "state": state}]}, "metadata": {}}


def waiting(reason):
    return container(waiting={"reason": reason, "message": "m"})


def failed(**status):
    return {"metadata": {}, "status": {"phase": "Failed", **status}}


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
LOST = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}


@pytest.mark.parametrize(
    ("pod", "stage", "reason"),
    [
        ({"metadata": {}}, "pending", None),
        (waiting("ContainerCreating"), "pending", None),
        (waiting("ErrImagePull"), "pending", Reason.IMAGE),
        (waiting("ImagePullBackOff"), "gone", Reason.IMAGE),
        (waiting("ErrImageNeverPull"), "gone", Reason.IMAGE),
        (waiting("InvalidImageName"), "gone", Reason.IMAGE),
        (waiting("CreateContainerConfigError"), "gone", Reason.CONFIG),
        (waiting("RunContainerError"), "gone", Reason.CONFIG),
        (container(running={"startedAt": "x"}), "running", None),
        (container(terminated={"reason": "OOMKilled", "exitCode": 137}), "gone", Reason.OOM),
        (container(terminated={"reason": "StartError", "exitCode": 128}), "gone", Reason.CONFIG),
        (container(terminated={"reason": "Error", "exitCode": 1, "message": "needs Python"}), "gone", Reason.EXITED),
        (failed(reason="Evicted", message="low on memory"), "gone", Reason.EVICTED),
        (failed(reason="DeadlineExceeded"), "gone", Reason.EXPIRED),
        (failed(reason="NodeLost"), "gone", Reason.NODE),
        ({"metadata": {}, "status": {"phase": "Unknown"}}, "gone", Reason.NODE),
        ({"metadata": {}, "status": {"phase": "Running", "conditions": [LOST]}}, "gone", Reason.NODE),
        ({"metadata": {}, "status": {"conditions": [UNSCHEDULABLE]}}, "pending", Reason.UNSCHEDULABLE),
        ({"metadata": {"deletionTimestamp": "x"}, "status": {"phase": "Running"}}, "gone", Reason.DELETED),
    ],
)
def test_each_status_of_a_pod_has_one_word(pod, stage, reason):
    state = read_state(pod)
    assert (state.stage, state.reason) == (stage, reason)


def test_a_pod_that_was_deleted_keeps_the_cause_of_its_end():
    assert gone(failed(reason="Evicted")).reason is Reason.EVICTED
    assert gone(container(running={})).reason is Reason.DELETED


def test_the_errors_are_those_of_every_backend():
    assert issubclass(PodStartError, SandboxStartError)
    assert issubclass(PodDied, SandboxDied)


def test_a_frame_that_was_lost_cut_or_forged_breaks_the_session():
    key, nonce = b"k" * 32, b"n" * 16
    sender = Codec(key, nonce, UP)
    one, two, three = sender.encode(b"one"), sender.encode(b"two"), sender.encode(b"three")
    assert Codec(key, nonce, UP).decode(one + two[:9]) == [b"one"]
    for wrong in (two, one + three, one[:-1] + b"x" + two, one + one):
        with pytest.raises(Broken):
            Codec(key, nonce, UP).decode(wrong)
    with pytest.raises(Broken):
        Codec(key, nonce, DOWN).decode(one)
    with pytest.raises(Broken):
        Codec(b"other" * 8, nonce, UP).decode(one)


def test_what_is_sent_into_a_pod_is_small_and_compiles():
    compile(program.BOOT, "boot", "exec")
    compile(program.SESSION, "session", "exec")
    assert len(program.BOOT) < 1000
    assert len(program.parcel(bytes(32))) < 20_000


def test_images_are_pulled_in_batches():
    config = KubernetesConfig(node_selector={"pool": "a"})
    sets = prepull([f"image:{n}" for n in range(95)], config, 40)
    assert [len(item["spec"]["template"]["spec"]["initContainers"]) for item in sets] == [40, 40, 15]
    assert sets[0]["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "a"}
    assert to_yaml(sets).count("kind: DaemonSet") == 3
    assert images_of(TaskSet((), {})) == ()


def test_a_warm_pool_runs_our_process_1():
    config = SandboxConfig(backend="kubernetes", image="i", kubernetes=KubernetesConfig(warm_pool="w"))
    template, pool = warm_pool(config, Limits(), 5)
    assert template["spec"]["podTemplate"]["spec"]["containers"][0]["command"] == program.boot_command("python3")
    assert pool["spec"] == {"replicas": 5, "sandboxTemplateRef": {"name": "w"}}


def test_a_record_is_judged_by_owner_lease_and_expiry():
    pod = manifest() | {}
    pod["metadata"]["creationTimestamp"] = "1970-01-01T00:10:00Z"
    assert pods.read_record(pod, 900.0).state == "live"
    assert pods.read_record(pod, 1001.0).state == "expired"
    assert pods.read_record(pod, 900.0, frozenset({"1-2-abc"})).state == "orphaned"
    assert pods.read_record(pod, 900.0).created == 600.0
