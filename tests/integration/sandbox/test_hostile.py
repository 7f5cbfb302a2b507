"""What code in a sandbox must not be able to do, tried."""

import asyncio
import os
import time

import pytest

from deepswe.errors import SandboxDied
from deepswe.sandbox.base import Limits, SandboxSpec

SMALL = SandboxSpec(limits=Limits(memory_mib=96, disk_mib=16, pids=40))


async def sh(sandbox, script, timeout_s=20.0, **options):
    return await sandbox.exec(["bash", "-c", script], timeout_s=timeout_s, **options)


async def python(sandbox, program, timeout_s=20.0):
    return await sandbox.exec(["python3", "-I", "-S", "-c", program], timeout_s=timeout_s)


def is_grouped(sandbox):
    return sandbox.enforced["memory_mib"].startswith("cgroup")


def test_fork_bomb_is_contained_and_the_sandbox_goes_on(in_sandbox):
    async def scenario(sandbox):
        bomb = "bomb() { bomb | bomb & }; bomb 2>/dev/null; "
        result = await sh(sandbox, bomb + "sleep 30", timeout_s=1)
        assert result.exit_code != 0
        assert (await sh(sandbox, "echo usable")).stdout == b"usable\n"
        await sh(sandbox, bomb, timeout_s=2)  # its first process ends at once, the bomb goes on
        await asyncio.sleep(0.3)
        result = await sh(sandbox, "echo usable")
        if b"process or memory limit was reached" in result.stderr:
            assert result.stdout == b"usable\n"
        assert (await sandbox.exec(["true"], timeout_s=5)).exit_code == 0

    in_sandbox(scenario, SMALL)


def test_memory_hog_is_killed_alone(in_sandbox):
    async def scenario(sandbox):
        result = await python(sandbox, "x = bytearray(500 << 20); print(len(x))")
        assert result.exit_code in (137, 1)
        assert result.stdout == b""
        assert (await sh(sandbox, "echo usable")).stdout == b"usable\n"

    in_sandbox(scenario, SMALL)


def test_full_disk_is_enospc_in_every_writable_place_and_nothing_else_fails(in_sandbox):
    async def scenario(sandbox):
        for place in ("/testbed", "/tmp", "/home/agent", "/dev/shm"):
            result = await sh(
                sandbox, f"head -c 100M /dev/zero > {place}/fill; stat -c %s {place}/fill; rm {place}/fill"
            )
            assert b"No space left on device" in result.stderr
            assert int(result.stdout) <= 16 << 20
        result = await python(sandbox, "import os\nfor n in range(9999): print(n, flush=True); os.mkdir(f'd{n}')")
        assert b"No space left on device" in result.stderr
        assert 1000 < int(result.stdout.split()[-1]) <= 16 * 256
        await sh(sandbox, "rm -r d*")
        await sh(sandbox, "head -c 100M /dev/zero > fill")
        with pytest.raises(OSError, match="/testbed/more") as full:
            await sandbox.write_files({"/testbed/more": b"x" * 100_000})
        assert full.value.errno == 28
        for place in ("/", "/usr", "/etc", "/opt", "/dev", "/run", "/var", "/root", "/home", "/proc/sys/kernel"):
            assert (await sh(sandbox, f"touch {place}/x")).exit_code == 1, place

    in_sandbox(scenario, SMALL)


def test_network_is_the_loopback_alone(in_sandbox):
    program = """
import socket
names = [name for _, name in socket.if_nameindex()]
assert names == ["lo"], names
for family, address in ((socket.AF_INET, ("1.1.1.1", 53)), (socket.AF_INET6, ("2606:4700::1", 53))):
    try:
        socket.socket(family).connect(address)
        raise SystemExit("connected")
    except OSError as error:
        assert error.errno in (101, 99, 113), error
for family in (40, 38, 17, 31):  # vsock, alg, packet, bluetooth
    try:
        socket.socket(family, socket.SOCK_STREAM)
        raise SystemExit(f"family {family}")
    except OSError as error:
        assert error.errno in (97, 1), error
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
client.sendall(b"x")
print(server.accept()[0].recv(1))
"""

    async def scenario(sandbox):
        result = await python(sandbox, program)
        assert (result.stdout, result.stderr) == (b"b'x'\n", b"")

    in_sandbox(scenario)


def test_nothing_of_the_host_is_seen(in_sandbox, tmp_path, monkeypatch):
    (tmp_path / "host-secret").write_text("host secret")
    monkeypatch.setenv("SUPERVISOR_SECRET", "hunter2")

    async def scenario(sandbox):
        seen = await sh(sandbox, "cat /proc/*/environ | tr '\\0' '\\n'; env; hostname; cat /proc/*/cmdline")
        assert b"hunter2" not in seen.stdout
        assert b"sandbox\n" in seen.stdout
        assert str(os.getpid()) not in (await sh(sandbox, "ls /proc")).stdout.decode().split() or os.getpid() < 10
        for path in (tmp_path, "/etc/shadow", "/root/.ssh", "/root/.bashrc", "/root/.cache", "/sys", "/mnt", "/work"):
            assert (await sh(sandbox, f"ls -d {path}")).exit_code == 2, path
        assert (await sh(sandbox, "ls -A /home /home/agent /tmp /testbed")).stdout.split() == [
            *(b"/home:", b"agent", b"/home/agent:", b"/testbed:", b"/tmp:")
        ]
        assert (await sh(sandbox, "cat /etc/passwd")).stdout.count(b"\n") == 2
        assert (await sh(sandbox, "find / -name host-secret -not -path '/proc/*' 2>/dev/null | head")).stdout == b""

    in_sandbox(scenario)


def test_the_server_cannot_be_read_traced_signalled_or_impersonated(in_sandbox):
    program = """
import ctypes, os, signal
for path in ("mem", "environ", "maps", "task/1/mem", *(f"fd/{n}" for n in range(20)), "cwd/x", "root/etc/passwd"):
    try:
        open(f"/proc/1/{path}", "rb").read(1)
        raise SystemExit(path)
    except (PermissionError, FileNotFoundError) as error:
        assert isinstance(error, PermissionError) or path.startswith("fd"), path
for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGSEGV, signal.SIGINT):
    os.kill(1, number)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(16, 1, 0, 0) == -1 and ctypes.get_errno() == 1
print(sorted(os.listdir("/proc/self/fd")))
"""

    async def scenario(sandbox):
        result = await sandbox.exec(["python3", "-I", "-S", "-c", program], timeout_s=20)
        assert (result.stdout, result.stderr) == (b"['0', '1', '2', '3']\n", b"")  # 3 is the listing itself
        assert (await sh(sandbox, "kill -9 -1; echo on")).stdout == b"on\n"
        assert (await sh(sandbox, "echo usable")).stdout == b"usable\n"

    in_sandbox(scenario)


def test_kernel_surfaces_are_closed(in_sandbox):
    program = """
import ctypes, errno, platform
libc = ctypes.CDLL(None, use_errno=True)
numbers = {
    "x86_64": dict(ptrace=101, mount=165, umount2=166, pivot_root=155, setns=308, unshare=272, bpf=321, keyctl=250,
        userfaultfd=323, perf_event_open=298, kexec_load=246, init_module=175, open_by_handle_at=304,
        process_vm_readv=310, process_vm_writev=311, io_uring_setup=425, clone3=435, fsopen=430, open_tree=428,
        move_mount=429, mount_setattr=442, pidfd_getfd=438, chroot=161, sethostname=170),
    "aarch64": dict(ptrace=117, mount=40, umount2=39, pivot_root=41, setns=268, unshare=97, bpf=280, keyctl=219,
        userfaultfd=282, perf_event_open=241, kexec_load=104, init_module=105, open_by_handle_at=265,
        process_vm_readv=270, process_vm_writev=271, io_uring_setup=425, clone3=435, fsopen=430, open_tree=428,
        move_mount=429, mount_setattr=442, pidfd_getfd=438, chroot=51, sethostname=161),
}[platform.machine()]
for name, number in numbers.items():
    result = libc.syscall(number, 0x10000000, 0, 0, 0, 0, 0)
    code = ctypes.get_errno()
    assert result == -1 and code in (errno.EPERM, errno.ENOSYS), (name, result, code)
clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
assert libc.syscall(clone, 0x10000000 | 17, 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM
"""

    async def scenario(sandbox):
        result = await sandbox.exec(["python3", "-I", "-S", "-c", program], timeout_s=20)
        assert (result.exit_code, result.stderr) == (0, b"")
        status = (await sh(sandbox, "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status")).stdout.decode()
        fields = dict(line.split(":\t") for line in status.splitlines())
        assert {name: int(value, 16) for name, value in fields.items()} == {
            "CapInh": 0, "CapPrm": 0, "CapEff": 0, "CapBnd": 0, "CapAmb": 0, "NoNewPrivs": 1, "Seccomp": 2,
        }  # fmt: skip
        assert (await sh(sandbox, "id -u; unshare -U true; mount -t tmpfs x /tmp")).exit_code != 0
        others = "-not -path '/proc/[0-9]*' -not -path '/proc/self/*' -not -path '/proc/thread-self/*'"
        result = await sh(sandbox, f"find /proc /sys -maxdepth 3 -writable -type f {others} 2>/dev/null")
        assert result.stdout == b""

    in_sandbox(scenario)


def test_a_sandbox_over_its_memory_with_files_dies_as_an_error_or_lives(in_sandbox):
    # Files may take three quarters of the memory at most, so that the server still has room.
    spec = SandboxSpec(limits=Limits(memory_mib=64, disk_mib=1000, pids=40))

    async def scenario(sandbox):
        assert sandbox.enforced["disk_mib"] == "tmpfs of 48 MiB"
        result = await sh(sandbox, "head -c 1G /dev/zero > fill; true")
        assert b"No space left" in result.stderr
        await python(sandbox, "x = bytearray(500 << 20)")
        assert (await sh(sandbox, "rm fill; echo usable")).stdout == b"usable\n"

    in_sandbox(scenario, spec)


def test_processor_time_is_bounded(in_sandbox):
    spec = SandboxSpec(limits=Limits(cpus=0.2))

    async def scenario(sandbox):
        if sandbox.enforced["cpus"] == "none":
            pytest.skip("no cpu control group on this machine")
        result = await sh(sandbox, "timeout -s INT 1.5 sh -c 'while :; do :; done'; times | tail -1")
        seconds = float(result.stdout.split()[0].split(b"m")[1].rstrip(b"s"))
        assert seconds < 0.8

    in_sandbox(scenario, spec)


def test_the_sandbox_is_gone_when_its_block_ends(pool):
    async def main():
        async with pool.open(SandboxSpec()) as sandbox:
            await sh(sandbox, "setsid sleep 4242 & disown")
        started = time.monotonic()
        with pytest.raises(SandboxDied):
            await sandbox.exec(["true"], timeout_s=1)
        assert time.monotonic() - started < 1

    asyncio.run(main())
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                assert b"4242" not in file.read()
        except (FileNotFoundError, ProcessLookupError):
            continue
