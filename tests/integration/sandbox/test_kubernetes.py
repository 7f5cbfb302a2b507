"""The Kubernetes backend against the API server of the tests: real pods, real sessions, and what goes wrong."""

import asyncio
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("kubernetes_asyncio", reason="the kubernetes extra is not installed")

from tests.kubernetes_server.process import ServerProcess

from deepswe.config import SandboxConfig
from deepswe.errors import SandboxUnavailable
from deepswe.sandbox.base import Limits, SandboxSpec
from deepswe.sandbox.kubernetes import backend as kubernetes
from deepswe.sandbox.kubernetes import session as sessions
from deepswe.sandbox.kubernetes.failures import PodDied, PodStartError, Reason
from deepswe.sandbox.kubernetes.manifests import warm_pool
from deepswe.sandbox.pool import SandboxPool


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ServerProcess(tmp_path_factory.mktemp("cluster"), "--warm") as server:
        yield server


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    with ServerProcess(tmp_path_factory.mktemp("simulated"), "--simulate", "--token", "test-token") as server:
        yield server


def config_of(server, image="test", **settings):
    cluster = {"kubeconfig": str(server.kubeconfig), **settings}
    return SandboxConfig.model_validate({"backend": "kubernetes", "image": image, "kubernetes": cluster})


@asynccontextmanager
async def opened(config, run="test"):
    backend = kubernetes.open_backend(config, run, Path("/"))
    try:
        yield backend
    finally:
        await backend.close()


async def start(backend, name="a", spec=None, timeout_s=30.0):
    return await backend.start(name, spec or SandboxSpec(), timeout_s)


async def fail(config, reason, timeout_s=30.0):
    """A start that fails for `reason`, and leaves nothing."""
    async with opened(config) as backend:
        with pytest.raises(PodStartError) as caught:
            await start(backend, timeout_s=timeout_s)
        assert caught.value.reason is reason
        return str(caught.value)


def test_a_sandbox_from_start_to_end_costs_two_writes(cluster):
    async def main():
        async with opened(config_of(cluster)) as backend:
            sandbox = await start(backend)
            result = await sandbox.exec(["sh", "-c", "id -u; pwd; cat; exit 3"], timeout_s=30, stdin=b"in")
            assert (result.exit_code, result.stdout) == (3, b"1000\n/testbed\nin")
            data = bytes(range(256)) * 20_000
            await sandbox.write_files({"/testbed/d/big": data})
            assert await sandbox.read_file("/testbed/d/big") == data
            await backend.stop("a")
            with pytest.raises(PodDied):
                await sandbox.exec(["true"], timeout_s=5)
        assert backend.figures.writes == 2
        assert cluster.figures()["pods"] == cluster.figures()["leases"] == 0

    asyncio.run(main())


def test_a_session_that_breaks_comes_back_and_the_command_ran_once(cluster):
    async def main():
        async with opened(config_of(cluster)) as backend:
            sandbox = await start(backend)
            script = "echo ran >> runs; sleep 0.5; cat runs"
            running = asyncio.ensure_future(sandbox.exec(["sh", "-c", script], timeout_s=30))
            await asyncio.sleep(0.2)
            await sandbox._session._drop()
            assert (await running).stdout == b"ran\n"
            assert sandbox.sessions_opened == 2
            await sandbox.exec(["sh", "-c", "kill -9 -1"], timeout_s=30)
            assert (await sandbox.exec(["echo", "on"], timeout_s=30)).stdout == b"on\n"

    asyncio.run(main())


def test_bytes_that_the_cluster_loses_are_sent_again(cluster, monkeypatch):
    monkeypatch.setattr(sessions, "PROBE_S", 0.3)
    monkeypatch.setattr(sessions, "OPENING_S", 2.0)

    async def main():
        async with opened(config_of(cluster)) as backend:
            sandbox = await start(backend)
            cluster.post("faults", {"exec_lost": 1.0})
            running = asyncio.ensure_future(sandbox.exec(["head", "-c", "100000", "/dev/zero"], timeout_s=60))
            await asyncio.sleep(0.5)
            cluster.post("faults", {"exec_lost": 0.0})
            assert (await running).stdout == bytes(100_000)
            assert sandbox.sessions_opened > 1

    try:
        asyncio.run(main())
    finally:
        cluster.post("faults", {"exec_lost": 0.0})


def test_what_stands_in_the_way_of_a_start_has_a_name(cluster):
    async def main():
        assert "missing/x" in await fail(config_of(cluster, "missing/x"), Reason.IMAGE)
        assert "executable file not found" in await fail(config_of(cluster, "no-python/x"), Reason.CONFIG)
        nowhere = config_of(cluster, node_selector={"x": "y"}, unschedulable_s=0.3)
        assert "0/1 nodes" in await fail(nowhere, Reason.UNSCHEDULABLE)
        words = await fail(config_of(cluster, node_selector={"x": "y"}), Reason.UNSCHEDULABLE, timeout_s=0.5)
        assert "within 0.5 s" in words
        assert cluster.figures()["pods"] == 0

    asyncio.run(main())


def test_the_end_of_a_pod_is_told_to_whoever_waits(cluster):
    async def main():
        async with opened(config_of(cluster)) as backend:
            sandbox = await start(backend)
            running = asyncio.ensure_future(sandbox.exec(["sleep", "60"], timeout_s=60))
            await asyncio.sleep(0.2)
            began = time.monotonic()
            await backend._link.client.request("DELETE", f"{backend._link.client.pods}/{sandbox.id}")
            with pytest.raises(PodDied) as caught:
                await running
            assert caught.value.reason is Reason.DELETED
            assert time.monotonic() - began < 10

    asyncio.run(main())


def test_a_fork_bomb_is_ended_though_a_pod_has_no_limit_on_processes(cluster):
    async def main():
        async with opened(config_of(cluster)) as backend:
            sandbox = await start(backend, spec=SandboxSpec(limits=Limits(pids=40, memory_mib=256)))
            script = "for n in $(seq 60); do sleep 50 & done; wait"
            result = await sandbox.exec(["sh", "-c", script], timeout_s=40)
            assert result.exit_code == 137
            assert b"limit on processes" in result.stderr
            assert not result.timed_out
            assert (await sandbox.exec(["echo", "on"], timeout_s=30)).stdout == b"on\n"

    asyncio.run(main())


def test_a_sandbox_is_claimed_from_a_warm_pool_where_there_is_one(cluster):
    async def main():
        settings = config_of(cluster, warm_pool="warm")
        async with opened(settings) as backend:
            with pytest.raises(SandboxUnavailable, match="install agent-sandbox"):
                await start(backend)
        async with opened(config_of(cluster)) as plain:
            await start(plain, "other")
            client = plain._link.client
            root = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/deepswe"
            template, pool = warm_pool(settings, Limits(), 1)
            await client.request("POST", f"{root}/sandboxtemplates", body=template)
            await client.request("POST", f"{root}/sandboxwarmpools", body=pool)
        async with opened(settings) as backend:
            sandbox = await start(backend)
            assert (await sandbox.exec(["echo", "warm"], timeout_s=30)).stdout == b"warm\n"

    asyncio.run(main())
    deadline = time.monotonic() + 10
    while cluster.figures()["pods"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert cluster.figures()["pods"] == 0


def test_requests_are_tried_again_and_no_pod_is_made_twice(simulated):
    faults = ("http_429", "http_500", "http_503", "reset", "watch_410", "watch_reset", "exec_refused", "exec_drop")
    simulated.post("faults", dict.fromkeys(faults, 0.15))

    async def life(backend, number):
        sandbox = await start(backend, f"s{number}", timeout_s=60)
        await sandbox.exec(["true"], timeout_s=30)
        await backend.stop(f"s{number}")

    async def main():
        async with opened(config_of(simulated, writes_per_s=500, reads_per_s=500, writes_per_sandbox=12)) as backend:
            await asyncio.gather(*(life(backend, number) for number in range(20)))

    try:
        asyncio.run(main())
    finally:
        simulated.post("faults", dict.fromkeys(faults, 0.0))
    assert simulated.figures()["started"] == 20
    assert simulated.figures()["pods"] == 0


def test_a_cancelled_start_leaves_no_pod(simulated):
    async def main():
        async with SandboxPool(config_of(simulated), run="cancel") as pool:
            for delay in (0.0, 0.01, 0.05, 0.2, 0.5):
                task = asyncio.ensure_future(pool.open(SandboxSpec()).__aenter__())
                await asyncio.sleep(delay)
                task.cancel()
                await asyncio.wait((task,))
        assert simulated.figures()["pods"] == 0

    asyncio.run(main())


def test_abort_ends_pods_without_the_event_loop(simulated):
    async def main():
        backend = kubernetes.open_backend(config_of(simulated), "abort", Path("/"))
        await start(backend)
        assert simulated.figures()["pods"] == 1
        backend.abort()
        await backend.close()

    asyncio.run(main())
    assert simulated.figures()["pods"] == 0


def test_a_pod_is_expired_and_its_owner_alive_until_the_reaper_says_otherwise(simulated):
    async def main():
        config = config_of(simulated)
        async with opened(config) as backend:
            await start(backend)
            (record,) = await kubernetes.list_sandboxes(config)
            assert (record.state, record.run) == ("live", "test")
            assert await kubernetes.reap(config) == []
            labels = {"metadata": {"labels": {"deepswe.sandbox/expires": "1000"}}}
            await backend._link.client.request("PATCH", f"{backend._link.client.pods}/{record.name}", body=labels)
            assert [item.name for item in await kubernetes.reap(config)] == [record.name]
            assert simulated.figures()["pods"] == 0

    asyncio.run(main())


def test_no_cluster_and_wrong_credentials_are_one_clear_line(simulated, tmp_path):
    async def main():
        wrong = tmp_path / "kubeconfig"
        text = simulated.kubeconfig.read_text()
        for change, words in (("test-token", "renew them"), ("127.0.0.1:", "is the cluster up")):
            wrong.write_text(text.replace(change, "127.0.0.1:1" if ":" in change else "other"))
            settings = {"kubeconfig": str(wrong), "retries": 0}
            config = SandboxConfig.model_validate({"backend": "kubernetes", "image": "i", "kubernetes": settings})
            async with opened(config) as backend:
                with pytest.raises(SandboxUnavailable, match=words):
                    await start(backend)
        config = SandboxConfig.model_validate({"backend": "kubernetes", "kubernetes": {"kubeconfig": "/none"}})
        with pytest.raises(SandboxUnavailable, match="no Kubernetes cluster in /none"):
            await kubernetes.list_sandboxes(config)

    asyncio.run(main())
