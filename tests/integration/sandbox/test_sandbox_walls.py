"""The two ways to start a sandbox, and what a command sees of its walls in each."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepswe.config import SandboxConfig
from deepswe.errors import SandboxDied, SandboxError, SandboxStartError
from deepswe.sandbox.base import Layer, Limits, SandboxSpec
from deepswe.sandbox.bench import descendants
from deepswe.sandbox.pool import SandboxPool

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
LOOK = """
import json, os, resource, sys
def status(name):
    lines = open(f"/proc/{name}/status").read().splitlines()
    return dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
def reach(path):
    try:
        return os.listdir(path) if path.endswith("/") else open(path, "rb").read(64).hex()
    except OSError as error:
        return error.strerror
kept = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Groups", "Uid", "Gid", "PPid",
        "Umask", "SigIgn", "SigBlk", "NSpid")
out = {
    "self": {key: status("self")[key].strip() for key in kept},
    "server": {key: status(1)[key].strip() for key in kept},
    "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in sys.argv[1:]},
    "descriptors": {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                    if os.path.exists(f"/proc/self/fd/{name}")},
    "environment": dict(os.environ),
    "closed": {path: reach(f"/proc/1/{path}") for path in (*(f"fd/{n}" for n in range(6)),
               *(f"fd/{n}/" for n in range(6)), "root/", "cwd/", "exe", "maps", "mem", "environ",
               "task/1/root/", "map_files/", "ns/mnt", "stack", "syscall", "auxv", "pagemap")},
    "processes": sorted(name for name in os.listdir("/proc") if name.isdigit()),
    "parents": [status(name)["PPid"] for name in os.listdir("/proc") if name.isdigit()],
    "mounts": [line.split() for line in open("/proc/self/mountinfo")],
    "limits": {name: list(resource.getrlimit(getattr(resource, name))) for name in dir(resource)
               if name.startswith("RLIMIT_")},
    "tree": {path: [oct(os.lstat(path).st_mode), os.readlink(path) if os.path.islink(path) else ""]
             for path in ("/bin", "/etc", "/tmp", "/var/tmp", "/dev", "/dev/null", "/dev/tty", "/dev/fd", "/dev/ptmx",
                          "/dev/pts/ptmx", "/dev/shm", "/home/agent", "/testbed", "/usr", "/etc/passwd", "/dev/core")},
    "top": sorted(os.listdir("/")),
    "host": os.uname().nodename,
    "session": os.getsid(1),
}
print(json.dumps(out))
"""


def open_pool(walls):
    return SandboxPool(SandboxConfig(walls=walls), run="tests")


async def look(sandbox):
    result = await sandbox.exec(["python3", "-I", "-S", "-c", LOOK, *NAMESPACES], timeout_s=30)
    assert result.stderr == b""
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def seen():
    """What is seen in a sandbox of each way, side by side."""

    async def main():
        found = {}
        for walls in ("auto", "bubblewrap"):
            async with open_pool(walls) as pool, pool.open(SandboxSpec()) as sandbox:
                found[walls] = {**await look(sandbox), "enforced": dict(sandbox.enforced)}
                server = [pid for pid in descendants(os.getpid()) if is_process_one(pid)]
                found[walls]["outside"] = [read(pid, "cgroup").decode() for pid in server]
                found[walls]["files"] = [os.listdir(f"/proc/{pid}/fd") for pid in server]
        return found

    return asyncio.run(main())


def is_process_one(pid):
    words = Path(f"/proc/{pid}/status").read_text().split("NSpid:\t")[1].splitlines()[0].split()
    return len(words) == 2 and words[1] == "1"


def read(pid, name):
    """A file of a process, seen from outside; nothing once it is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def wait_for_ends(pids):
    deadline = time.monotonic() + 10
    while any(read(pid, "stat") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(read(pid, "stat") for pid in pids)


def test_a_clone_of_the_launcher_is_the_default_and_the_way_is_reported(seen):
    assert seen["auto"]["enforced"]["walls"] == "forked"
    assert seen["bubblewrap"]["enforced"]["walls"] == "bubblewrap (sandbox.walls asks for it)"


@pytest.mark.parametrize("walls", ["auto", "bubblewrap"])
def test_a_command_and_its_server_have_no_right_left(seen, walls):
    for process in (seen[walls]["self"], seen[walls]["server"]):
        sets = {name: int(process[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
        assert set(sets.values()) == {0}, sets
        assert (process["NoNewPrivs"], process["Seccomp"]) == ("1", "2")
        assert set(process["Uid"].split()) == set(process["Gid"].split()) == {"1000"}
        assert process["Umask"] == "0022"
    ignored = int(seen[walls]["self"]["SigIgn"], 16)
    assert not [name for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if ignored & 1 << name - 1]


@pytest.mark.parametrize("walls", ["auto", "bubblewrap"])
def test_every_namespace_is_another_than_the_hosts(seen, walls):
    host = {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
    assert not set(host.values()) & set(seen[walls]["namespaces"].values())
    assert seen[walls]["host"] == "sandbox"


@pytest.mark.parametrize("walls", ["auto", "bubblewrap"])
def test_nothing_outside_can_be_reached_through_process_one(seen, walls):
    refusals = ("Permission denied", "Operation not permitted")
    assert {path: what for path, what in seen[walls]["closed"].items() if what not in refusals} == {}
    assert seen[walls]["processes"][0] == "1"
    assert len(seen[walls]["processes"]) == 2  # the server and the command
    assert set(seen[walls]["parents"]) == {"0", "1"}
    assert seen[walls]["session"] == 1
    assert set(seen[walls]["descriptors"]) <= {"0", "1", "2"}


@pytest.mark.parametrize("walls", ["auto", "bubblewrap"])
def test_the_server_holds_its_wire_and_pipes_alone(seen, walls):
    [descriptors] = seen[walls]["files"]
    assert set(descriptors) == {"0", "1", "2", "3", "4", "5"}  # null, the wire, the pipe that signals write to


@pytest.mark.parametrize("walls", ["auto", "bubblewrap"])
def test_the_environment_is_the_sandboxs_own(seen, walls):
    names = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TERM", "SANDBOX_CALL", "OMP_NUM_THREADS"}
    assert set(seen[walls]["environment"]) - {"LC_CTYPE"} == names


LATE = """
import asyncio, json, os, sys
from deepswe.config import SandboxConfig
from deepswe.sandbox import seccomp, syscalls
from deepswe.sandbox.base import SandboxSpec
from deepswe.sandbox.pool import SandboxPool
rules = seccomp._instruction(0x20, 0)
for name in sys.argv[1:]:
    rules += seccomp._refuse({"mount_setattr": 442, "close_range": 436}[name], 38)
if sys.argv[1:]:
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.filter_calls(rules + seccomp._instruction(0x06, 0x7FFF0000))
async def main():
    async with SandboxPool(SandboxConfig(), run="tests") as pool, pool.open(SandboxSpec()) as sandbox:
        script = "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status | cut -f 2 | sort -u; ls /proc/1/root/"
        result = await sandbox.exec(["sh", "-c", script], timeout_s=20)
        print(json.dumps([sandbox.enforced["walls"], result.stdout.decode().split(), os.getuid()]))
asyncio.run(main())
"""


@pytest.mark.parametrize("lacking", ["mount_setattr", "close_range"])
def test_bubblewrap_starts_the_sandbox_where_a_call_of_the_kernel_is_missing(lacking):
    command = [sys.executable, "-c", LATE, lacking]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    walls, seen, _ = json.loads(done.stdout)
    assert walls.startswith("bubblewrap (")
    assert "Function not implemented" in walls
    assert seen[:3] == ["0000000000000000", "1", "2"]


def test_a_plain_user_gets_the_same_walls(plain_user):
    command, _ = plain_user
    done = subprocess.run([*command, "-c", LATE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    walls, seen, uid = json.loads(done.stdout)
    assert walls == "forked"
    assert seen == ["0000000000000000", "1", "2"]
    assert uid != 0


def test_both_ways_show_the_same_view(seen):
    ours, theirs = seen["auto"], seen["bubblewrap"]
    assert ours["tree"] == theirs["tree"]
    assert set(theirs["top"]) - set(ours["top"]) == {"run"}  # where bubblewrap shows the server's file
    for key in ("limits", "environment", "self"):
        assert ours[key] == theirs[key], key

    def mounts(side):
        shown = {row[4]: (row[5], row[row.index("-") + 1]) for row in side["mounts"]}
        return {place: row for place, row in shown.items() if not place.startswith(("/run", "/proc/"))}

    assert mounts(ours) == mounts(theirs)


def test_the_control_groups_limits_are_in_force(seen):
    if not seen["auto"]["enforced"]["memory_mib"].startswith("cgroup"):
        pytest.skip("no control groups on this machine")
    for side in seen.values():
        [groups] = side["outside"]
        assert groups.count("/deepswe-") >= 1
        assert "/deepswe-" not in Path("/proc/self/cgroup").read_text()

    async def main():
        spec = SandboxSpec(limits=Limits(pids=20, memory_mib=96))
        async with open_pool("auto") as pool, pool.open(spec) as sandbox:
            script = "for n in $(seq 40); do sleep 0.3 & done 2>&1 | grep -c -i resource; true"
            assert (await sandbox.exec(["bash", "-c", script], timeout_s=20)).stdout.strip() != b"0"
            hog = await sandbox.exec(["python3", "-c", "x = bytearray(300 << 20)"], timeout_s=20)
            assert hog.exit_code in (1, 137)

    asyncio.run(main())


@pytest.mark.parametrize("walls", ["auto", "bubblewrap"])
def test_signals_do_to_a_command_what_they_do_outside(walls):
    async def main():
        async with open_pool(walls) as pool, pool.open(SandboxSpec()) as sandbox:
            result = await sandbox.exec(["bash", "-c", "sleep 20 & kill $!; wait $!; echo $?"], timeout_s=15)
            assert result.stdout == b"143\n"
            assert (await sandbox.exec(["bash", "-c", "kill -9 -1; echo on"], timeout_s=15)).stdout == b"on\n"

    asyncio.run(main())


@pytest.mark.parametrize("walls", ["auto", "bubblewrap"])
def test_layers_are_shown_read_only_or_with_a_private_copy(walls, tmp_path):
    base, extra = tmp_path / "a,b:c\\d", tmp_path / "extra"
    for place in (base, extra):
        place.mkdir()
        (place / "file").write_text(place.name)
    (base / "link").symlink_to("/etc")

    async def main():
        layers = (Layer(base, "/testbed", writable=True), Layer(extra, "/opt/deep/extra"))
        async with open_pool(walls) as pool, pool.open(SandboxSpec(layers=layers)) as sandbox:
            script = "echo more >>file; echo new >new; cat file /opt/deep/extra/file; touch /opt/deep/extra/x || true"
            result = await sandbox.exec(["sh", "-c", script], timeout_s=20)
            assert result.stdout == b"a,b:c\\dmore\nextra"
            assert b"Read-only file system" in result.stderr

    asyncio.run(main())
    assert (base / "file").read_text() == "a,b:c\\d"
    assert sorted(path.name for path in base.iterdir()) == ["file", "link"]


def test_a_layer_cannot_be_put_outside_by_a_link_of_another_layer(tmp_path):
    base, extra, outside = (tmp_path / name for name in ("base", "extra", "outside"))
    for place in (base, extra, outside):
        place.mkdir()
    (base / "out").symlink_to(outside)
    (base / "up").symlink_to("../../../../../../../.." + str(outside))

    async def main():
        async with open_pool("auto") as pool:
            for name in ("out", "up"):
                layers = (Layer(base, "/testbed", writable=True), Layer(extra, f"/testbed/{name}/new"))
                with pytest.raises(SandboxStartError):
                    async with pool.open(SandboxSpec(layers=layers)):
                        pass
            async with pool.open(SandboxSpec()) as sandbox:
                assert (await sandbox.exec(["true"], timeout_s=10)).exit_code == 0

    asyncio.run(main())
    assert list(outside.iterdir()) == []


def test_a_dead_launcher_takes_its_sandboxes_along_and_a_new_pool_starts(tmp_path):
    async def main():
        async with open_pool("auto") as pool:
            async with pool.open(SandboxSpec()) as sandbox:
                launcher = pool._backend._launcher._process
                below = descendants(launcher.pid)
                await sandbox.exec(["sh", "-c", "setsid sleep 4177 >/dev/null 2>&1 & sleep 0.1"], timeout_s=10)
                launcher.send_signal(signal.SIGKILL)
                with pytest.raises(SandboxDied):
                    await sandbox.exec(["sleep", "20"], timeout_s=30)
                assert below
                assert wait_for_ends(below)
            with pytest.raises(SandboxError, match="launcher is gone"):
                async with pool.open(SandboxSpec()):
                    pass
        async with open_pool("auto") as pool, pool.open(SandboxSpec()) as sandbox:
            assert (await sandbox.exec(["true"], timeout_s=10)).exit_code == 0

    asyncio.run(main())


def test_a_dead_server_is_found_dead_and_leaves_nothing():
    async def main():
        async with open_pool("auto") as pool, pool.open(SandboxSpec()) as sandbox:
            [server] = [pid for pid in descendants(os.getpid()) if is_process_one(pid)]
            await sandbox.exec(["sh", "-c", "setsid sleep 4178 >/dev/null 2>&1 & true"], timeout_s=10)
            os.kill(server, signal.SIGKILL)
            with pytest.raises(SandboxDied):
                await sandbox.exec(["true"], timeout_s=10)
        assert not read(server, "stat")
        assert not [pid for pid in filter(str.isdigit, os.listdir("/proc")) if b"sleep\x004178" in read(pid, "cmdline")]

    asyncio.run(main())
