"""The pool: admission, deadlines, cancellation, death of the supervisor, and what plain users get."""

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepswe.config import SandboxConfig
from deepswe.errors import SandboxDied, SandboxError, SandboxStartError, SandboxUnavailable
from deepswe.sandbox import admission, launching, pool
from deepswe.sandbox.base import Layer, Limits, SandboxSpec
from deepswe.sandbox.pool import SandboxPool


def processes(word: str) -> list[int]:
    """Live processes whose command line holds `word`."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if word.encode() in Path(f"/proc/{name}/cmdline").read_bytes() and int(name) != os.getpid():
                found.append(int(name))
        except OSError:
            continue
    return found


def groups(owner: int) -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").rglob(f"deepswe-{owner}-*") if path.is_dir()]


def eventually(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


def test_64_sandboxes_are_alive_at_once():
    async def main():
        everyone, alive = asyncio.Event(), 0

        async def one(pool, number):
            nonlocal alive
            async with pool.open(SandboxSpec()) as sandbox:
                alive += 1
                if alive == 64:
                    everyone.set()
                async with asyncio.timeout(60):
                    await everyone.wait()
                await sandbox.write_files({"/testbed/n": b"%d" % number})
                result = await sandbox.exec(["cat", "n"], timeout_s=60)
                return result.stdout == b"%d" % number

        async with SandboxPool(SandboxConfig(concurrency=64), "many") as pool:
            assert all(await asyncio.gather(*(one(pool, number) for number in range(64))))
            directory = pool._directory
        assert not directory.exists()
        assert not processes(str(directory))

    asyncio.run(main())
    assert not groups(os.getpid())


def test_admission_holds_the_number_alive_to_the_limit():
    async def main():
        alive, most = 0, 0

        async def one(pool):
            nonlocal alive, most
            async with pool.open(SandboxSpec()):
                alive += 1
                most = max(most, alive)
                await asyncio.sleep(0.2)
                alive -= 1

        async with SandboxPool(SandboxConfig(concurrency=3), "few") as pool:
            await asyncio.gather(*(one(pool) for _ in range(10)))
        assert most == 3

    asyncio.run(main())


def test_concurrency_is_chosen_from_cores_and_memory():
    config = SandboxConfig(memory_mib=1024)
    assert admission.choose_concurrency(config, cores=2, available_mib=24_000) == 128
    assert admission.choose_concurrency(config, cores=64, available_mib=24_000) == 187
    assert admission.choose_concurrency(config, cores=2, available_mib=100) == 1
    assert admission.choose_concurrency(SandboxConfig(concurrency=5), cores=2, available_mib=100) == 5


def test_cancellation_at_any_moment_leaves_nothing():
    async def main():
        random.seed(7)
        async with SandboxPool(SandboxConfig(concurrency=4), "cancel") as pool:

            async def life():
                async with pool.open(SandboxSpec()) as sandbox:
                    await sandbox.exec(["sleep", "0.05"], timeout_s=10)

            for _ in range(6):
                tasks = [asyncio.ensure_future(life()) for _ in range(5)]
                for task in tasks:
                    await asyncio.sleep(random.uniform(0, 0.06))
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            async with asyncio.timeout(20):
                while pool._backend._lives:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            for mark in (f"{pool._directory}/server.pyc", f"deepswe-sandbox-server {pool._directory}"):
                assert not processes(mark)
            async with asyncio.timeout(20):
                await asyncio.gather(*(life() for _ in range(8)))
            directory = pool._directory
        assert not directory.exists()

    asyncio.run(main())
    assert not groups(os.getpid())


def test_closing_the_pool_ends_open_sandboxes():
    async def main():
        pool = SandboxPool(SandboxConfig(), "closed")
        waiting = asyncio.Event()

        async def hold():
            async with pool.open(SandboxSpec()) as sandbox:
                waiting.set()
                await sandbox.exec(["sleep", "100"], timeout_s=200)

        task = asyncio.ensure_future(hold())
        await waiting.wait()
        await asyncio.sleep(0.05)
        await pool.close()
        await pool.close()
        with pytest.raises(SandboxDied):
            await task
        with pytest.raises(SandboxError, match="is closed"):
            async with pool.open(SandboxSpec()):
                pass
        assert not processes(str(pool._directory))

    asyncio.run(main())
    assert not groups(os.getpid())


def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path):
    async def main():
        async with SandboxPool(SandboxConfig(start_timeout_s=20), "fails") as pool:
            for spec, words in [
                (SandboxSpec(layers=(Layer(tmp_path / "none", "/testbed"),)), "none for /testbed is no directory"),
                (SandboxSpec(workdir="relative"), "'relative' cannot be a directory"),
                (SandboxSpec(workdir="/proc/x"), "'/proc/x' cannot be a directory"),
                (
                    SandboxSpec(layers=(Layer(tmp_path, "/usr/no/such"),)),
                    "cannot make /usr/no in the sandbox",
                ),
            ]:
                with pytest.raises(SandboxStartError, match=words):
                    async with pool.open(spec):
                        pass
            assert not pool._backend._lives
            await pool.check()
        late = SandboxPool(SandboxConfig(start_timeout_s=0.0001), "late")
        async with late:
            late._backend._launcher._process.send_signal(signal.SIGSTOP)
            opening = asyncio.ensure_future(late.check())
            await asyncio.sleep(3)
            late._backend._launcher._process.send_signal(signal.SIGCONT)
            with pytest.raises(SandboxUnavailable, match=r"did not start within 0\.0001 s"):
                await opening

    asyncio.run(main())
    assert not groups(os.getpid())


def test_a_killed_launcher_is_an_error_and_leaves_no_process():
    async def main():
        async with SandboxPool(SandboxConfig(), "killed") as pool:
            async with pool.open(SandboxSpec()) as sandbox:
                pool._backend._launcher._process.kill()
                with pytest.raises(SandboxDied):
                    await sandbox.exec(["sleep", "50"], timeout_s=60)
            with pytest.raises(SandboxStartError, match="launcher is gone"):
                async with pool.open(SandboxSpec()):
                    pass
            assert eventually(lambda: not processes(str(pool._directory)))

    asyncio.run(main())
    assert not groups(os.getpid())


HOLDER = """
import asyncio
from deepswe.config import SandboxConfig
from deepswe.sandbox.base import SandboxSpec
from deepswe.sandbox.pool import SandboxPool

async def hold(pool, ready):
    async with pool.open(SandboxSpec()) as sandbox:
        task = asyncio.ensure_future(sandbox.exec(["bash", "-c", "setsid sleep 777 & sleep 778"], timeout_s=900))
        await asyncio.sleep(0.1)
        ready.append(1)
        if len(ready) == 4:
            print(pool._directory, flush=True)
        await task

async def main():
    pool, ready = SandboxPool(SandboxConfig(), "holder"), []
    await asyncio.gather(*(hold(pool, ready) for _ in range(4)))

asyncio.run(main())
"""


def test_a_killed_supervisor_leaves_no_process_or_mount_and_the_next_pool_reaps_the_rest():
    mounts = Path("/proc/self/mounts").read_text()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    with holder:
        try:
            assert holder.stdout is not None
            directory = Path(holder.stdout.readline().strip())
            assert directory.is_dir()
            assert len(processes(str(directory))) >= 4
        finally:
            holder.kill()
    assert eventually(lambda: not processes(str(directory)))
    assert Path("/proc/self/mounts").read_text() == mounts
    assert eventually(lambda: not processes("sleep\x00777"))

    async def next_pool():
        async with SandboxPool(SandboxConfig(), "next"):
            assert str(holder.pid) not in str(os.listdir(directory.parent))
            assert not groups(holder.pid)

    asyncio.run(next_pool())


def test_commands_keep_their_time_while_the_event_loop_stands_still():
    async def main():
        async with SandboxPool(SandboxConfig(), "stalled") as pool, pool.open(SandboxSpec()) as sandbox:
            task = asyncio.ensure_future(sandbox.exec(["sleep", "0.1"], timeout_s=2))
            await asyncio.sleep(0)
            time.sleep(2.5)  # noqa: ASYNC251
            result = await task
            assert (result.exit_code, result.timed_out) == (0, False)

    asyncio.run(main())


def test_opening_does_not_stall_the_event_loop():
    async def main():
        gaps, last, done = [], time.monotonic(), False

        async def watch():
            nonlocal last
            while not done:
                await asyncio.sleep(0)
                gaps.append(time.thread_time())

        async with SandboxPool(SandboxConfig(), "smooth") as pool:
            await pool.check()
            watcher = asyncio.ensure_future(watch())
            async with pool.open(SandboxSpec()) as sandbox:
                await sandbox.exec(["true"], timeout_s=10)
            done = True
            await watcher
        steps = [after - before for before, after in itertools.pairwise(gaps)]
        assert max(steps) < 0.02  # seconds of this thread's own time between two turns of the loop

    asyncio.run(main())


@pytest.mark.parametrize(
    ("setting", "forbidding", "mend"),
    [
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("user/max_user_namespaces", "0", "user.max_user_namespaces="),
    ],
)
def test_a_refusal_names_the_setting(tmp_path, setting, forbidding, mend):
    (tmp_path / setting).parent.mkdir()
    (tmp_path / setting).write_text(forbidding + "\n")
    text = launching.explain_refusal("Operation not permitted", tmp_path)
    assert mend in text
    assert "another backend" in text
    assert "another sandbox backend" in launching.explain_refusal("no", tmp_path / "nothing")


PLAIN = """
import asyncio, json, os, pathlib, sys
from deepswe.config import SandboxConfig
from deepswe.sandbox.base import Layer, SandboxSpec
from deepswe.sandbox.pool import SandboxPool

async def main(layer):
    async with SandboxPool(SandboxConfig(pids=40), "plain") as pool:
        await pool.check()
        spec = SandboxSpec(layers=(Layer(layer, "/testbed", writable=True),), limits=__import__(
            "deepswe.sandbox.pool", fromlist=["x"]).limits_of(pool.config))
        async with pool.open(spec) as sandbox:
            async def sh(text, timeout_s=20):
                return await sandbox.exec(["bash", "-c", text], timeout_s=timeout_s)
            edited = await sh("id -u; cat a; echo new > a; cat a; ls /root /home; touch /etc/x; cat /proc/1/mem")
            late = await sh("trap '' TERM; setsid sleep 99 & sleep 100", 0.5)
            full = await sh("head -c 900M /dev/zero > fill")
            hog = await sh("python3 -S -c 'x = bytearray(3 << 30)'")
            bomb = await sh("b() { b | b & }; b 2>/dev/null; sleep 20", 1)
            usable = await sh("echo usable")
            print(json.dumps({
                "uid": os.getuid(), "enforced": dict(sandbox.enforced), "edited": edited.stdout.decode(),
                "errors": edited.stderr.decode(), "late": late.timed_out, "full": full.stderr.decode(),
                "hog": hog.exit_code, "bomb": bomb.exit_code, "usable": usable.stdout.decode(),
            }))

if __name__ == "__main__":
    asyncio.run(main(pathlib.Path(sys.argv[1])))
"""


def test_a_plain_user_gets_the_same_sandbox(plain_user):
    command, home = plain_user
    layer = home / "layer"
    layer.mkdir()
    (layer / "a").write_text("old\n")
    if os.geteuid() == 0:
        for path in (layer, layer / "a"):
            os.chown(path, 54321, 54321)
    done = subprocess.run([*command, "-c", PLAIN, str(layer)], capture_output=True, text=True, timeout=100, check=False)
    assert not done.stderr, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["uid"] != 0
    assert result["edited"].splitlines()[:3] == ["1000", "old", "new"]
    assert (layer / "a").read_text() == "old\n"
    assert "/etc/x" in result["errors"]
    assert "/proc/1/mem: Permission denied" in result["errors"]
    assert result["late"]
    assert "No space left" in result["full"]
    assert result["hog"] != 0
    assert result["bomb"] != 0
    assert result["usable"] == "usable\n"
    assert result["enforced"]["disk_mib"] == "tmpfs of 256 MiB"
    assert result["enforced"]["pids"] in ("rlimit", "cgroup v1", "cgroup v2")


def test_limits_of_a_recipe_reach_the_sandbox():
    config = SandboxConfig(memory_mib=5, disk_mib=6, pids=7, cpus=0.5, output_bytes=8)
    assert pool.limits_of(config) == Limits(memory_mib=5, disk_mib=6, pids=7, cpus=0.5, output_bytes=8)
