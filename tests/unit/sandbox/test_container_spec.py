"""What is asked of an engine for one sandbox, and what its answers mean. Without an engine."""

from __future__ import annotations

import asyncio
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiodocker")

import aiodocker

from deepswe.config import ContainerConfig
from deepswe.errors import SandboxStartError, SandboxUnsupported
from deepswe.sandbox import container_boot, server
from deepswe.sandbox.base import Layer, Limits, SandboxSpec
from deepswe.sandbox.container_engine import addresses, explain_pull
from deepswe.sandbox.container_layers import archives
from deepswe.sandbox.container_spec import (
    HOME,
    LAYOUTS,
    Plan,
    container_body,
    enforced,
    environment,
    interpreter_of,
    make_plan,
)
from deepswe.sandbox.served import Wire

PLAIN = ContainerConfig()
LIMITS = Limits(memory_mib=400, disk_mib=100, pids=7, cpus=0.5)


def plan_of(spec: SandboxSpec, config: ContainerConfig = PLAIN, sizes: dict[Path, int] | None = None) -> Plan:
    return make_plan(spec, config, "default:1", sizes or {}, {})


def test_the_default_image_is_read_only_and_run_by_a_plain_user() -> None:
    plan = plan_of(SandboxSpec(limits=LIMITS))
    assert (plan.image, plan.own, plan.user, plan.read_only) == ("default:1", False, "1000:1000", True)
    assert plan.tmpfs == {"/tmp": 100, "/var/tmp": 100, HOME: 100, "/testbed": 100}


def test_a_tasks_own_image_keeps_its_working_directory_and_its_root() -> None:
    plan = plan_of(SandboxSpec(image="task:1", limits=LIMITS))
    assert (plan.own, plan.user, plan.read_only) == (True, "0:0", False)
    assert "/testbed" not in plan.tmpfs
    body = container_body("n", SandboxSpec(), plan, ["python3"], PLAIN, "docker")
    assert body["HostConfig"]["CapAdd"] == ["CHOWN", "DAC_OVERRIDE", "FOWNER"], "rights over the image's files alone"
    assert plan_of(SandboxSpec(image="task:1"), ContainerConfig(user="5:6")).user == "5:6"


def test_a_writable_layer_is_paid_for_on_top_of_the_limits(tmp_path: Path) -> None:
    spec = SandboxSpec((Layer(tmp_path, "/testbed", writable=True),), limits=LIMITS)
    plan = plan_of(spec, sizes={tmp_path: 30})
    assert (plan.tmpfs["/testbed"], plan.memory_mib) == (130, 430)


def test_the_container_has_the_limits_and_no_rights() -> None:
    spec = SandboxSpec(limits=LIMITS, labels={"owner": "1-2-x"})
    body = container_body("n", spec, plan_of(spec), ["python3", "-c", "x"], ContainerConfig(runtime="runsc"), "docker")
    host: dict[str, Any] = body["HostConfig"]
    assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (400 << 20, 400 << 20, 7)
    assert host["NanoCpus"] == 500_000_000
    assert (host["NetworkMode"], host["CapDrop"], host["SecurityOpt"]) == ("none", ["ALL"], ["no-new-privileges"])
    assert (host["ReadonlyRootfs"], host["AutoRemove"], host["Runtime"]) == (True, True, "runsc")
    assert body["StdinOnce"] is True, "process 1 ends with its client"
    assert body["Labels"] == {"deepswe.sandbox": "n", "deepswe.owner": "1-2-x"}
    assert "uid=1000" in host["Tmpfs"]["/testbed"]


@pytest.mark.parametrize("target", ["testbed", "/", "/proc/x", "/a/../b", "/sys"])
def test_an_impossible_target_is_refused(target: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxUnsupported, match="cannot be a directory of a sandbox"):
        plan_of(SandboxSpec((Layer(tmp_path, target),)))


def test_an_environments_interpreter_is_shown_with_it_but_not_its_packages(tmp_path: Path) -> None:
    prefix, environment_ = tmp_path / "python", tmp_path / "env"
    (prefix / "lib/python3.11/site-packages").mkdir(parents=True)
    (prefix / "bin").mkdir()
    environment_.mkdir()
    (environment_ / "pyvenv.cfg").write_text(f"home = {prefix}/bin\nversion = 3.11\n")
    plan = plan_of(SandboxSpec((Layer(environment_, "/opt/env"),)))
    assert plan.binds == ((str(environment_), "/opt/env"), (str(prefix), str(prefix)))
    assert plan.hidden == (str(prefix / "lib/python3.11/site-packages"),)
    (environment_ / "pyvenv.cfg").write_text("home = /usr/bin\n")
    assert interpreter_of(environment_) is None, "the system's own is the image's"
    (environment_ / "pyvenv.cfg").write_text("")
    with pytest.raises(SandboxStartError, match="names no home"):
        interpreter_of(environment_)


def test_a_layouts_environment_comes_before_the_images_and_the_specs_before_all() -> None:
    spec = SandboxSpec(image="t:1", env={"LANG": "C"})
    made = environment(spec, plan_of(spec), LAYOUTS["r2e"], ["PATH=/image/bin", "FROM_IMAGE=a=b", "HOME=/x"])
    assert made["PATH"].startswith("/testbed/.venv/bin:")
    assert made["PATH"].endswith(":/image/bin")
    assert (made["FROM_IMAGE"], made["HOME"], made["LANG"], made["USER"]) == ("a=b", HOME, "C", "root")


def test_limits_that_no_engine_enforces_are_said_to_be_none() -> None:
    own = plan_of(SandboxSpec(image="t:1", limits=LIMITS))
    rootless = {"CgroupVersion": "1", "SecurityOptions": ["name=rootless"]}
    assert enforced(own, rootless, PLAIN) == {
        "memory_mib": "none", "pids": "none", "cpus": "none", "disk_mib": "none", "output_bytes": "server"
    }  # fmt: skip
    ours = enforced(plan_of(SandboxSpec(limits=LIMITS)), {"CgroupVersion": "2", "PidsLimit": False}, PLAIN)
    assert (ours["memory_mib"], ours["pids"], ours["disk_mib"]) == ("cgroup v2", "none", "tmpfs of 100 MiB each")


@pytest.mark.parametrize(
    ("status", "words", "cause"),
    [
        (404, "pull access denied, repository does not exist or may require docker login", "denied"),
        (404, "manifest for x:1 not found: manifest unknown", "absent"),
        (500, "toomanyrequests: You have reached your pull rate limit", "limited"),
        (401, "unauthorized", "denied"),
        (500, 'Get "https://registry/v2/": dial tcp: i/o timeout', "unreachable"),
    ],
)
def test_a_failed_pull_is_told_by_its_cause(status: int, words: str, cause: str) -> None:
    assert explain_pull("x:1", aiodocker.DockerError(status, words)).cause == cause


def test_the_engines_own_environment_names_its_address() -> None:
    assert addresses("docker", PLAIN, {}) == [""], "DOCKER_HOST, contexts and default sockets are the client's"
    assert addresses("podman", PLAIN, {"CONTAINER_HOST": "tcp://h:1"}) == ["tcp://h:1"]
    assert addresses("podman", ContainerConfig(host="unix:///x"), {"CONTAINER_HOST": "tcp://h:1"}) == ["unix:///x"]
    assert "unix:///r/podman/podman.sock" in addresses("podman", PLAIN, {"XDG_RUNTIME_DIR": "/r", "HOME": "/h"})


def test_a_tree_goes_into_archives_directories_first(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/big").write_bytes(bytes(9 << 20))
    (tmp_path / "z").symlink_to("a")
    names = []
    for archive in archives(tmp_path):
        with tarfile.open(fileobj=BytesIO(archive)) as opened:
            names += opened.getnames()
    assert names == ["a", "z", "a/b", "a/b/big"]
    assert len(list(archives(tmp_path / "a/b"))) == 1


def test_the_program_of_a_container_fits_one_argument() -> None:
    command = container_boot.command("python3", b"rules")
    assert command[:2] == ["python3", "-I"]
    assert max(map(len, command)) < 128 << 10, "the kernel's limit for one argument"


def test_a_frame_that_lost_a_byte_ends_the_wire() -> None:
    async def main() -> str:
        wire = Wire(lambda data: None, container_boot.seal)
        frame = server.pack(1, server.DATA, b"content")
        wire.feed(server.pack(0, server.HELLO) + container_boot.seal(server.pack(0, server.HELLO)))
        assert wire.hello.done()
        cut = frame.replace(b"content", b"konTent")
        wire.feed(cut + container_boot.seal(frame))
        assert await wire.ask(server.READ, [], 1) is None
        return wire.lost

    assert asyncio.run(main()) == "a frame was cut or altered on its way"
