"""Checks of containment: what agents' code must not be able to do, tried from inside."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from pathlib import Path

from deepswe.errors import SandboxDied
from deepswe.sandbox.base import Sandbox
from deepswe.sandbox.checks import (
    WAIT_S,
    Check,
    CheckFailed,
    Ground,
    Refused,
    checks,
    expect,
    is_usable,
    need,
    python,
    sh,
    told,
)

_CALLS = """
import ctypes, errno, os, platform
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {
    "x86_64": dict(clone=56, ptrace=101, mount=165, umount2=166, pivot_root=155, chroot=161, unshare=272, setns=308,
        add_key=248, request_key=249, keyctl=250, userfaultfd=323, bpf=321, perf_event_open=298, kexec_load=246,
        init_module=175, process_vm_readv=310, open_by_handle_at=304, io_uring_setup=425, fsopen=430, open_tree=428,
        move_mount=429, reboot=169, swapon=167, sethostname=170, settimeofday=164, syslog=103, acct=163),
    "aarch64": dict(clone=220, ptrace=117, mount=40, umount2=39, pivot_root=41, chroot=51, unshare=97, setns=268,
        add_key=217, request_key=218, keyctl=219, userfaultfd=282, bpf=280, perf_event_open=241, kexec_load=104,
        init_module=105, process_vm_readv=270, open_by_handle_at=265, io_uring_setup=425, fsopen=430, open_tree=428,
        move_mount=429, reboot=142, swapon=224, sethostname=161, settimeofday=170, syslog=116, acct=89),
}[platform.machine()]
def refused(name, *arguments):
    result = libc.syscall(NUMBERS[name], *(arguments + (0,) * 6)[:6])
    code = ctypes.get_errno()
    if result >= 0 or code not in (errno.EPERM, errno.ENOSYS, errno.EACCES, errno.EOPNOTSUPP):
        print(f"{name}{arguments}: result {result}, {errno.errorcode.get(code, code) if result < 0 else 'allowed'}")
"""
"""Defines `refused`, which prints a line for a system call that was not refused."""


async def _prints_nothing(sandbox: Sandbox, program: str, timeout_s: float = WAIT_S) -> None:
    result = await python(sandbox, program, timeout_s)
    expect((result.exit_code, result.stdout, result.stderr) == (0, b"", b""), told(result))


async def a_fork_bomb_is_contained(ground: Ground, sandbox: Sandbox) -> None:
    """The number of processes is bounded, and the sandbox goes on."""
    need(sandbox, "pids")
    bomb = "bomb() { bomb | bomb & }; bomb 2>/dev/null; "
    result = await sh(sandbox, bomb + "sleep 30", timeout_s=2)
    expect(result.exit_code != 0, told(result))
    await is_usable(sandbox, "a fork bomb under a time limit")
    await sh(sandbox, bomb, timeout_s=3)  # its first process ends at once, the bomb goes on
    await asyncio.sleep(0.5)
    await sh(sandbox, "true")
    await is_usable(sandbox, "a fork bomb in the background")


async def a_memory_hog_dies_alone(ground: Ground, sandbox: Sandbox) -> None:
    """The sandbox goes on."""
    need(sandbox, "memory_mib")
    size = 4 * ground.spec.limits.memory_mib << 20
    result = await python(sandbox, f"x = bytearray({size})\nfor n in range(0, {size}, 4096): x[n] = 1\nprint('got it')")
    expect(result.exit_code != 0 and result.stdout == b"", told(result))
    await is_usable(sandbox, "a memory hog")


async def a_full_disk_is_enospc(ground: Ground, sandbox: Sandbox) -> None:
    """In every place that can be written; afterwards the sandbox goes on."""
    need(sandbox, "disk_mib")
    size = 4 * ground.spec.limits.disk_mib
    script = f"head -c {size}M /dev/zero > fill 2>/dev/null || echo refused; stat -c %s fill; rm -f fill"
    for place in ("/testbed", "/tmp", "/dev/shm"):
        result = await sh(sandbox, script, cwd=place)
        words = result.stdout.split()
        expect(words[:1] == [b"refused"], f"{place} took {size} MiB: {told(result)}")
        expect(int(words[1]) <= ground.spec.limits.disk_mib << 20, f"{place} took {words[1]!r} bytes")
    await sh(sandbox, f"head -c {size}M /dev/zero > fill 2>/dev/null")
    try:
        await sandbox.write_files({"/testbed/more": bytes(1 << 20)})
    except OSError as error:
        expect(error.errno in (28, 122), f"write_files on a full disk gives {error!r}")
    else:
        expect(False, "write_files says nothing of a full disk")
    await sh(sandbox, "rm fill")
    await is_usable(sandbox, "a full disk")


async def a_hundred_thousand_files_are_bounded_or_borne(ground: Ground, sandbox: Sandbox) -> None:
    """They end in ENOSPC, or fit; either way the sandbox goes on and can be ended quickly."""
    program = """
import os
try:
    for n in range(100_000):
        if n % 1000 == 0: os.mkdir(f"d{n}")
        open(f"d{n - n % 1000}/{n}", "w").close()
except OSError as error:
    print(error.errno)
"""
    result = await python(sandbox, program, 4 * WAIT_S)
    expect(result.stdout.strip() in (b"", b"28", b"122", b"12") and result.stderr == b"", told(result))
    await is_usable(sandbox, "100,000 files")
    started = time.monotonic()
    await ground.pool.end(sandbox)
    expect(time.monotonic() - started < 30, f"ending it took {time.monotonic() - started:.0f} s")


async def _flood(sandbox: Sandbox, size: int, kept: int) -> None:
    result = await sh(sandbox, f"head -c {size} /dev/zero", timeout_s=5 * WAIT_S)
    total = len(result.stdout) + result.stdout_dropped
    expect(result.timed_out or total == size, f"{total} of {size} bytes are accounted for")
    expect(len(result.stdout) <= kept, f"{len(result.stdout)} bytes are kept of at most {kept}")
    await is_usable(sandbox, f"{size} bytes of output")


async def endless_output_is_bounded(ground: Ground, sandbox: Sandbox) -> None:
    """300 MB, more than the sandbox's memory, and a stream without an end."""
    await _flood(sandbox, 300_000_000, ground.spec.limits.output_bytes)
    result = await sh(sandbox, "yes >&2 & yes", timeout_s=2)
    expect(result.timed_out, told(result))
    expect(
        max(len(result.stdout), len(result.stderr)) <= ground.spec.limits.output_bytes, "more is kept than the limit"
    )
    await is_usable(sandbox, "endless output")


async def ten_gigabytes_of_output_are_bounded(ground: Ground, sandbox: Sandbox) -> None:
    """All of it counted, or ended by its time limit."""
    await _flood(sandbox, 10 << 30, ground.spec.limits.output_bytes)


async def a_daemon_that_forked_twice_ends_with_its_command(ground: Ground, sandbox: Sandbox) -> None:
    """A classic daemon: fork, setsid, fork, other directory, closed descriptors."""
    program = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/"); os.closerange(0, 9)
        os.execve("/bin/sleep", ["sleep", "4201"], {})
    os._exit(0)
time.sleep(600)
"""
    result = await python(sandbox, program, 2)
    expect(result.timed_out, told(result))
    left = await sh(sandbox, "grep -l 420[1] /proc/[0-9]*/cmdline 2>/dev/null; true")
    expect(left.stdout == b"", f"left: {left.stdout!r}")


async def a_process_that_ignores_everything_ends(ground: Ground, sandbox: Sandbox) -> None:
    """All signals ignored and blocked, children that start each other anew."""
    program = """
import os, signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
os.setsid() if os.getpid() != os.getsid(0) else None
for turn in range(3):
    if os.fork() == 0: os.setsid()
deadline = time.monotonic() + 600
while time.monotonic() < deadline:
    try:
        if os.fork() == 0: time.sleep(0.05)
        time.sleep(0.05)
    except OSError: pass
"""
    started = time.monotonic()
    result = await python(sandbox, program, 2)
    ended = result.timed_out or b"the limit on processes was reached" in result.stderr
    expect(ended and time.monotonic() - started < 30, f"{told(result)} in {time.monotonic() - started:.0f} s")
    left = await sh(sandbox, "grep -l pthread_sigmas[k] /proc/[0-9]*/cmdline 2>/dev/null; true")
    expect(left.stdout == b"", f"left: {left.stdout!r}")
    await is_usable(sandbox, "a process that ignores everything")


async def killing_everything_inside_does_not_kill_the_sandbox(ground: Ground, sandbox: Sandbox) -> None:
    """`kill -9 -1`, and each signal to process 1."""
    await sh(sandbox, "kill -9 -1; true")
    await is_usable(sandbox, "kill -9 -1")
    await sh(sandbox, "for s in KILL STOP TERM INT SEGV HUP; do kill -$s 1; done 2>/dev/null; true")
    await is_usable(sandbox, "signals to process 1")


async def process_1_keeps_its_limits(ground: Ground, sandbox: Sandbox) -> None:
    """It is of the same user as what it runs, whom the kernel lets change its limits and its share of the processor."""
    program = """
import os, resource
def attempt(change, *arguments):
    try: change(1, *arguments)
    except PermissionError: return
    print("allowed:", change.__name__, *arguments)
for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_AS):
    attempt(resource.prlimit, limit, (0, 0))
attempt(os.sched_setaffinity, {0})
attempt(os.sched_setscheduler, os.SCHED_IDLE, os.sched_param(0))
resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE, (99, 99))
"""
    result = await python(sandbox, program, 10)
    expect(result.exit_code == 0 and not result.stdout, told(result))
    await is_usable(sandbox, "limits set on process 1")


async def there_is_no_network(ground: Ground, sandbox: Sandbox) -> None:
    """No route, no name, no interface but loopback; refused where there is one and the backend says who closes it."""
    try:
        await _nothing_is_reached(sandbox)
    except CheckFailed as error:
        if "network" in sandbox.enforced:
            raise Refused(f"closed by: {sandbox.enforced['network']} ({error})") from error
        raise


async def _nothing_is_reached(sandbox: Sandbox) -> None:
    program = """
import socket
for family, address in ((socket.AF_INET, ("1.1.1.1", 53)), (socket.AF_INET, ("169.254.169.254", 80)),
        (socket.AF_INET6, ("2606:4700::1", 53))):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as s:
                s.settimeout(3); s.connect(address)
            print("connected", address, kind)
        except OSError: pass
"""
    await _prints_nothing(sandbox, program)
    names = await sh(sandbox, "ls /sys/class/net 2>/dev/null || tail -n +3 /proc/net/dev | cut -d: -f1")
    expect(set(names.stdout.split()) <= {b"lo", b"tunl0", b"sit0", b"ip6tnl0"}, f"interfaces: {names.stdout!r}")


async def the_loopback_works(ground: Ground, sandbox: Sandbox) -> None:
    """Tests of servers need it."""
    program = """
import socket
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
client.sendall(b"x")
assert server.accept()[0].recv(1) == b"x"
"""
    await _prints_nothing(sandbox, program)


async def sockets_to_the_host_are_closed(ground: Ground, sandbox: Sandbox) -> None:
    """AF_VSOCK, packet sockets and the like cannot be made."""
    program = """
import socket
for family, kind in ((40, socket.SOCK_STREAM), (40, socket.SOCK_DGRAM), (17, socket.SOCK_RAW), (2, socket.SOCK_RAW)):
    try:
        socket.socket(family, kind)
        print("family", family, "kind", kind)
    except OSError: pass
"""
    await _prints_nothing(sandbox, program)


async def nothing_of_this_machine_is_seen(ground: Ground, sandbox: Sandbox) -> None:
    """Files of the home directory and of /tmp, the environment and the processes of the program outside."""
    for path in ground.secret_files:
        result = await sandbox.exec(["cat", str(path)], timeout_s=WAIT_S)
        expect(ground.secret.encode() not in result.stdout, f"{path} can be read")
        result = await sandbox.exec(["ls", "-d", str(path.parent)], timeout_s=WAIT_S)
        expect(result.exit_code != 0, f"{path.parent} is seen")
    script = "for p in /proc/[0-9]*; do cat $p/environ $p/cmdline | tr '\\0' '\\n'; done 2>/dev/null; env"
    seen = (await sh(sandbox, script)).stdout
    expect(ground.secret.encode() not in seen, "the environment of the program outside can be read")
    for name in ("/etc/shadow", "/root/.bash_history", "/etc/machine-id", "/etc/ssh/sshd_config"):
        own = _read_here(name)
        result = await sh(sandbox, f"cat {name} 2>/dev/null; true")
        expect(not own or result.stdout != own, f"{name} of this machine can be read")
    count = (await sh(sandbox, "ls -d /proc/[0-9]* | wc -l")).stdout
    expect(int(count) < 20, f"{count!r} processes are seen in a fresh sandbox")


def _read_here(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


async def the_server_cannot_be_traced_or_read(ground: Ground, sandbox: Sandbox) -> None:
    """ptrace, process_vm_readv, /proc/1/mem and its descriptors."""
    program = (
        _CALLS
        + """
refused("ptrace", 16, 1); refused("ptrace", 0x4206, 1)
iov = (ctypes.c_uint64 * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)
refused("process_vm_readv", 1, ctypes.byref(iov), 1, ctypes.byref(iov), 1)
for path in ("mem", "maps", "environ", *(f"fd/{n}" for n in range(3, 20))):
    try:
        if open(f"/proc/1/{path}", "rb").read(1): print("read", path)
    except OSError: pass
"""
    )
    await _prints_nothing(sandbox, program)
    listing = await sh(sandbox, "ls /proc/self/fd | wc -l")
    expect(listing.stdout.strip() == b"4", f"a command has descriptors of others: {told(listing)}")


async def mounting_and_namespaces_are_closed(ground: Ground, sandbox: Sandbox) -> None:
    """mount and its new forms, pivot_root, unshare, setns, clone with namespaces."""
    program = (
        _CALLS
        + """
refused("mount", b"none", b"/tmp", b"tmpfs"); refused("umount2", b"/proc", 2); refused("pivot_root", b"/tmp", b"/tmp")
refused("fsopen", b"tmpfs"); refused("open_tree", -100, b"/", 1); refused("move_mount", -1, b"", -1, b"", 4)
for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000): refused("unshare", flag)
refused("clone", 0x10000000 | 17)
for name in ("user", "mnt", "pid", "net"):
    try: refused("setns", os.open(f"/proc/1/ns/{name}", os.O_RDONLY), 0)
    except OSError: pass
"""
    )
    await _prints_nothing(sandbox, program)


async def the_kernels_keys_are_closed(ground: Ground, sandbox: Sandbox) -> None:
    """keyctl, add_key, request_key: keyrings are shared beyond namespaces."""
    program = _CALLS + 'refused("keyctl", 0, -3, 1); refused("add_key", b"user", b"x", b"y", 1, -3)'
    await _prints_nothing(sandbox, program + '; refused("request_key", b"user", b"x")')


async def userfaultfd_is_closed(ground: Ground, sandbox: Sandbox) -> None:
    """It widens races in the kernel."""
    await _prints_nothing(sandbox, _CALLS + 'refused("userfaultfd", 1); refused("userfaultfd", 0)')


async def io_uring_is_closed(ground: Ground, sandbox: Sandbox) -> None:
    """It passes by system call filters."""
    program = 'refused("io_uring_setup", 8, ctypes.create_string_buffer(256))'
    await _prints_nothing(sandbox, _CALLS + program)


async def the_rest_of_the_kernel_is_closed(ground: Ground, sandbox: Sandbox) -> None:
    """bpf, perf, modules, kexec, handles, clocks, swap, the log."""
    program = (
        _CALLS
        + """
refused("bpf", 0, ctypes.create_string_buffer(128), 128); refused("kexec_load"); refused("init_module")
refused("perf_event_open", ctypes.create_string_buffer(b"\\0\\0\\0\\0\\x80", 128), 0, -1, -1, 0)
refused("open_by_handle_at", -100, ctypes.create_string_buffer(128), 0); refused("reboot", 0xFEE1DEAD, 672274793, 0)
refused("swapon", b"/tmp/x"); refused("settimeofday", ctypes.create_string_buffer(16)); refused("acct", b"/tmp/x")
refused("syslog", 3, ctypes.create_string_buffer(64), 64)
"""
    )
    await _prints_nothing(sandbox, program)


async def proc_and_sys_cannot_be_used_against_the_host(ground: Ground, sandbox: Sandbox) -> None:
    """No setting can be written, no memory of the kernel read, no trigger pulled."""
    program = """
import os
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches",
        "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger", "/proc/irq/default_smp_affinity",
        "/sys/kernel/uevent_helper", "/sys/power/state", "/proc/1/oom_score_adj"):
    try:
        descriptor = os.open(path, os.O_WRONLY)
        os.close(descriptor)
        print("can be written:", path)
    except OSError: pass
try:  # anybody may open it; only a write says whether it takes one
    descriptor = os.open("/proc/1/attr/current", os.O_WRONLY)
    os.write(descriptor, b"exec unconfined"); print("the server's label can be written")
except OSError: pass
for path in ("/proc/kcore", "/proc/kmsg", "/dev/mem", "/dev/kmem", "/dev/kmsg", "/dev/vda", "/dev/sda", "/dev/loop0",
        "/dev/fuse", "/dev/kvm", "/dev/net/tun"):
    try:
        with open(path, "rb") as file:
            if file.read(1): print("can be read:", path)
    except OSError: pass
try:
    os.mknod("/tmp/disk", 0o60600, os.makedev(8, 0))
    open("/tmp/disk", "rb"); print("a device can be made")
except OSError: pass
for path in ("/proc/1/root/etc/passwd", "/proc/1/cwd/etc/passwd"):
    try:
        with open(path, "rb") as file, open("/etc/passwd", "rb") as own:
            if file.read() != own.read(): print("another root:", path)
    except OSError: pass
"""
    await _prints_nothing(sandbox, program)


async def rights_cannot_be_gained(ground: Ground, sandbox: Sandbox) -> None:
    """No capability that rules the machine, and set-user-ID programs give none."""
    script = "grep -E '^(CapEff|CapBnd|NoNewPrivs):' /proc/self/status"
    fields = dict(line.split(":\t") for line in (await sh(sandbox, script)).stdout.decode().splitlines())
    ruling = sum(1 << bit for bit in (2, 12, 16, 17, 18, 19, 20, 21, 22, 25, 34, 38, 39))
    held = int(fields["CapEff"], 16) & ruling
    expect(held == 0, f"capabilities {held:x} are held")
    expect(fields["NoNewPrivs"] == "1" or int(fields["CapBnd"], 16) & ruling == 0, f"can be gained: {fields}")


async def a_link_swapped_during_a_read_leads_nowhere(ground: Ground, sandbox: Sandbox) -> None:
    """`read_file` and `write_files` while a process swaps their path between a file and a link out of the tree."""
    secret = str(ground.secret_files[0]) if ground.secret_files else "/proc/1/environ"
    await sandbox.write_files({"/testbed/own": b"own", "/testbed/target": b"own"})
    script = 'while :; do ln -sf "$0" swap; ln -sf /testbed/target swap; ln -f own swap; done 2>/dev/null'
    swapping = asyncio.ensure_future(sandbox.exec(["sh", "-c", script, secret], timeout_s=WAIT_S))
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        try:
            data = await sandbox.read_file("/testbed/swap")
            expect(data in (b"own", b"new", b""), f"it read {data[:40]!r}")
            await sandbox.write_files({"/testbed/swap": b"new"})
        except (OSError, ValueError):
            continue
    swapping.cancel()
    await asyncio.wait((swapping,), timeout=WAIT_S)
    for path in ground.secret_files:
        with open(path) as file:  # noqa: ASYNC230
            expect(file.read() == ground.secret, f"{path} of this machine was written")


async def a_sandbox_that_is_killed_under_load_is_an_error(ground: Ground) -> None:
    """Memory, processes and output at once; afterwards the pool goes on."""
    spec = replace(ground.spec, limits=replace(ground.spec.limits, memory_mib=96))
    script = "bomb() { bomb | bomb & }; (bomb) 2>/dev/null; yes & head -c 90M /dev/zero > fill; tail /dev/zero"
    async with ground.pool.open(spec) as sandbox:
        with contextlib.suppress(SandboxDied):
            await sh(sandbox, script, timeout_s=3)
    async with ground.pool.open(ground.spec) as sandbox:
        await is_usable(sandbox, "the end of another")


HOSTILE: tuple[Check, ...] = (
    *checks(
        "isolation",
        there_is_no_network,
        the_loopback_works,
        sockets_to_the_host_are_closed,
        nothing_of_this_machine_is_seen,
        the_server_cannot_be_traced_or_read,
        rights_cannot_be_gained,
    ),
    *checks("limits", a_memory_hog_dies_alone, a_full_disk_is_enospc),
    *checks("limits", a_fork_bomb_is_contained, endless_output_is_bounded, heavy=True),
    *checks(
        "hostile",
        a_daemon_that_forked_twice_ends_with_its_command,
        killing_everything_inside_does_not_kill_the_sandbox,
        process_1_keeps_its_limits,
        mounting_and_namespaces_are_closed,
        the_kernels_keys_are_closed,
        userfaultfd_is_closed,
        io_uring_is_closed,
        the_rest_of_the_kernel_is_closed,
        proc_and_sys_cannot_be_used_against_the_host,
    ),
    *checks(
        "hostile",
        a_process_that_ignores_everything_ends,
        a_link_swapped_during_a_read_leads_nowhere,
        a_hundred_thousand_files_are_bounded_or_borne,
        ten_gigabytes_of_output_are_bounded,
        heavy=True,
    ),
    Check(
        "hostile",
        "a_sandbox_that_is_killed_under_load_is_an_error",
        a_sandbox_that_is_killed_under_load_is_an_error,
        heavy=True,
    ),
)
