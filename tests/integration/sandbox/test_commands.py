"""Commands and files in a live sandbox, as the protocol promises."""

import asyncio
import errno
import os
import sys
import time

import pytest

from deepswe.errors import SandboxDied, SandboxError
from deepswe.sandbox.base import Layer, Limits, SandboxSpec


async def sh(sandbox, script, **options):
    return await sandbox.exec(["bash", "-c", script], **{"timeout_s": 20, **options})


def test_streams_exit_code_and_directory_come_back(in_sandbox):
    async def scenario(sandbox):
        result = await sh(sandbox, "pwd; echo err >&2; exit 7")
        assert (result.exit_code, result.stdout, result.stderr) == (7, b"/testbed\n", b"err\n")
        assert not result.timed_out
        assert 0 < result.wall_s < 20
        assert (await sh(sandbox, "kill -SEGV $$")).exit_code == 139
        assert (await sh(sandbox, "pwd", cwd="/tmp")).stdout == b"/tmp\n"

    in_sandbox(scenario)


def test_missing_program_directory_and_permission_have_their_codes(in_sandbox):
    async def scenario(sandbox):
        await sandbox.write_files({"/testbed/plain": b"no program", "/testbed/x/y": b""})
        for argv, cwd, code, words in [
            (["no-such-program"], None, 127, b"command not found"),
            (["/no/such"], None, 127, b"No such file"),
            (["/testbed/plain"], None, 126, b"Permission denied"),
            (["/testbed/x"], None, 126, b"Permission denied"),
            (["true"], "/missing", 126, b"No such file"),
            (["true"], "/testbed/plain", 126, b"Not a directory"),
            (["echo", "x" * (1 << 18)], None, 126, b"Argument list too long"),
        ]:
            result = await sandbox.exec(argv, timeout_s=5, cwd=cwd)
            assert result.exit_code == code, argv[0]
            assert words in result.stderr
        with pytest.raises(SandboxError, match="NUL"):
            await sandbox.exec(["echo", "a\0b"], timeout_s=5)
        with pytest.raises(SandboxError, match="give a program"):
            await sandbox.exec([], timeout_s=5)

    in_sandbox(scenario)


def test_stdin_environment_and_binary_output_are_exact(in_sandbox):
    async def scenario(sandbox):
        blob = bytes(range(256)) * 5000
        assert (await sandbox.exec(["cat"], timeout_s=20, stdin=blob)).stdout[:1000] == blob[:1000]
        result = await sandbox.exec(["sha256sum"], timeout_s=20, stdin=blob)
        assert result.stdout.split()[0].decode() == __import__("hashlib").sha256(blob).hexdigest()
        result = await sh(sandbox, 'printf %s "$A|$B|$HOME"', env={"B": "x y\n\u00e9"})
        assert result.stdout.decode() == "spec|x y\n\u00e9|/home/agent"
        result = await sandbox.exec(["printf", "%s|", "", " ", "\udcff", "$x"], timeout_s=5)
        assert result.stdout == b"| |\xff|$x|"
        names = (await sh(sandbox, "env")).stdout.decode()
        assert {line.split("=")[0] for line in names.splitlines()} == {
            *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TERM", "A", "PWD", "SHLVL", "_", "SANDBOX_CALL"),
            "OMP_NUM_THREADS",
        }

    in_sandbox(scenario, SandboxSpec(env={"A": "spec"}))


def test_the_channel_is_apart_from_the_output_and_only_there_when_asked(in_sandbox):
    async def scenario(sandbox):
        report = "head -c 3000000 /dev/zero >&3; echo out"
        result = await sh(sandbox, report, channel=True)
        assert (result.channel, result.stdout) == (bytes(3_000_000), b"out\n")
        result = await sh(sandbox, "echo x >&3")
        assert result.exit_code != 0
        assert b"Bad file descriptor" in result.stderr
        assert (await sh(sandbox, "ls /proc/self/fd | wc -l")).stdout == b"4\n"

    in_sandbox(scenario)


def test_endless_output_is_capped_while_it_runs(in_sandbox):
    async def scenario(sandbox):
        result = await sh(sandbox, "echo first; yes >&2 & cat /dev/zero", timeout_s=2)
        assert result.timed_out
        assert len(result.stdout) == len(result.stderr) == 1000
        assert result.stdout.startswith(b"first\n")
        assert result.stderr_dropped > 1_000_000
        result = await sh(sandbox, "echo first; head -c 50000000 /dev/zero; echo last")
        assert result.stdout.startswith(b"first\n\0")
        assert result.stdout.endswith(b"\0last\n")
        assert result.stdout_dropped == 50_000_011 - 1000

    in_sandbox(scenario, SandboxSpec(limits=Limits(memory_mib=64, output_bytes=1000)))


def test_timeout_kills_daemons_and_trapped_processes_and_leaves_the_sandbox_usable(in_sandbox):
    script = """
    trap '' TERM INT HUP
    (setsid bash -c 'trap "" TERM; exec -a daemon sleep 1000' &)
    setsid setsid bash -c 'sleep 1001 & disown; sleep 1002' &
    env -i sleep 1003 &
    sleep 1004
    """

    async def scenario(sandbox):
        started = time.monotonic()
        result = await sh(sandbox, script, timeout_s=0.5)
        assert time.monotonic() - started < 5
        assert (result.exit_code, result.timed_out) == (137, True)
        left = await sh(sandbox, "ls /proc | grep -c '^[0-9]*$'; pgrep -l sleep; echo usable")
        assert b"sleep" not in left.stdout
        assert left.stdout.endswith(b"usable\n")

    in_sandbox(scenario)


def test_timeout_of_one_command_spares_another_and_its_children(in_sandbox):
    async def scenario(sandbox):
        other = asyncio.ensure_future(sh(sandbox, "(setsid sleep 1.5; echo child) & wait; echo other"))
        await asyncio.sleep(0.2)
        late = await sh(sandbox, "(setsid env -i sleep 500 &); setsid sleep 501 & sleep 502", timeout_s=0.5)
        assert late.timed_out
        assert b"50" not in (await sh(sandbox, "ps ax -o args | grep 'sleep [5]0'; true")).stdout
        result = await other
        assert (result.exit_code, result.stdout) == (0, b"child\nother\n")

    in_sandbox(scenario)


def test_background_children_live_on_and_do_not_hold_the_command(in_sandbox):
    async def scenario(sandbox):
        started = time.monotonic()
        result = await sh(sandbox, "(while sleep 0.05; do echo tick; echo tick >> log; done) & echo started")
        assert time.monotonic() - started < 5
        assert result.stdout.startswith(b"started")
        first = (await sh(sandbox, "until test -s log; do sleep 0.05; done; wc -l < log")).stdout
        result = await sh(sandbox, f"until test $(wc -l < log) -gt {int(first) + 2}; do sleep 0.05; done; echo on")
        assert result.stdout == b"on\n"

    in_sandbox(scenario)


def test_commands_overlap(in_sandbox):
    async def scenario(sandbox):
        await sh(sandbox, "mkfifo a b")
        one, two = await asyncio.gather(sh(sandbox, "echo 1 > a; cat b"), sh(sandbox, "cat a; echo 2 > b"))
        assert (one.stdout, two.stdout) == (b"2\n", b"1\n")
        results = await asyncio.gather(*(sh(sandbox, f"sleep 0.1; echo {n}") for n in range(20)))
        assert [result.stdout for result in results] == [b"%d\n" % n for n in range(20)]

    in_sandbox(scenario)


def test_a_cancelled_command_is_killed(in_sandbox):
    async def scenario(sandbox):
        task = asyncio.ensure_future(sh(sandbox, "sleep 600"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.2)
        assert (await sh(sandbox, "pgrep sleep; true")).stdout == b""

    in_sandbox(scenario)


def test_files_of_any_size_and_name_come_back_exactly(in_sandbox):
    async def scenario(sandbox):
        files = {
            "/testbed/big.bin": os.urandom(5_000_000),
            "/testbed/a b/\u00e9\U0001f600/'\"$x\\": b"odd",
            "/testbed/new\nline": b"",
            "/testbed/\udcff": b"not utf-8",
            "/testbed/-rf": b"dash",
            "/tmp/t": b"tmp",
            "/home/agent/.x/y": b"home",
        }
        await sandbox.write_files(files)
        for path, data in files.items():
            assert await sandbox.read_file(path) == data
        assert (await sh(sandbox, "sha256sum < big.bin; stat -c %a a* big.bin")).stdout.split()[2:] == [b"755", b"644"]
        await sandbox.write_files({"/testbed/run": b"#!/bin/sh\necho ran"}, executable=True)
        assert (await sandbox.exec(["./run"], timeout_s=5)).stdout == b"ran\n"
        await sh(sandbox, "ln -s big.bin link")
        await sandbox.write_files({"/testbed/link": b"through"})
        assert await sandbox.read_file("/testbed/big.bin") == b"through"
        many = {f"/testbed/many/{n}": b"%d" % n for n in range(2000)}
        await sandbox.write_files(many)
        assert (await sh(sandbox, "ls many | wc -l")).stdout == b"2000\n"

    in_sandbox(scenario)


def test_file_errors_are_the_kernels(in_sandbox):
    async def scenario(sandbox):
        await sh(sandbox, "mkfifo fifo; touch secret; chmod 0 secret; ln -s loop loop; head -c 100 /dev/zero > hundred")
        for path, kind in [
            ("/testbed/none", FileNotFoundError),
            ("/testbed", IsADirectoryError),
            ("/testbed/secret", PermissionError),
            ("/testbed/fifo", ValueError),
            ("/dev/zero", ValueError),
            ("relative", ValueError),
        ]:
            with pytest.raises(kind, match=r"." if path == "relative" else path.rsplit("/", 1)[1]):
                await sandbox.read_file(path)
        with pytest.raises(OSError, match="loop") as loop:
            await sandbox.read_file("/testbed/loop")
        assert loop.value.errno == errno.ELOOP
        with pytest.raises(ValueError, match="100 bytes, more than the 99"):
            await sandbox.read_file("/testbed/hundred", max_bytes=99)
        assert len(await sandbox.read_file("/testbed/hundred", max_bytes=100)) == 100
        for path, code in [
            ("/usr/x", errno.EROFS),
            ("/x/y", errno.EROFS),
            ("/testbed/hundred/x", errno.ENOTDIR),
            ("/testbed", errno.EISDIR),
        ]:
            with pytest.raises(OSError, match=path) as refused:
                await sandbox.write_files({path: b"x"})
            assert refused.value.errno == code

    in_sandbox(scenario)


def test_layers_are_shown_and_never_written(in_sandbox, tmp_path):
    repository, environment = tmp_path / "a,b:c d", tmp_path / "env"
    (repository / "sub").mkdir(parents=True)
    environment.mkdir()
    (repository / "sub/code.py").write_text("original\n")
    (environment / "lib.py").write_text("library\n")
    spec = SandboxSpec(layers=(Layer(repository, "/testbed", writable=True), Layer(environment, "/opt/env")))

    async def scenario(sandbox):
        result = await sh(sandbox, "cat sub/code.py /opt/env/lib.py; echo new > sub/code.py; rm -r sub; touch added")
        assert result.stdout == b"original\nlibrary\n"
        assert result.exit_code == 0
        assert (await sh(sandbox, "touch /opt/env/x")).exit_code == 1
        assert (await sh(sandbox, "ls")).stdout == b"added\n"

    in_sandbox(scenario, spec)
    assert (repository / "sub/code.py").read_text() == "original\n"
    assert sorted(path.name for path in repository.iterdir()) == ["sub"]


def test_python_runs_with_no_installed_package(in_sandbox):
    async def scenario(sandbox):
        version = ".".join(map(str, sys.version_info[:3]))
        result = await sandbox.exec(
            [f"python{sys.version_info[0]}", "-c", "import sys; print(sys.version)"], timeout_s=20
        )
        assert result.stdout.decode().startswith(version)
        find = "find / -path /proc -prune -o -path '*-packages/*' -print 2>/dev/null | head -3"
        assert (await sh(sandbox, find)).stdout == b""
        for name in ("pytest", "pip", "numpy"):
            result = await sandbox.exec(["python3", "-c", f"import {name}"], timeout_s=20)
            assert b"ModuleNotFoundError" in result.stderr

    in_sandbox(scenario)


def test_a_dead_sandbox_is_an_error_and_not_output(in_sandbox):
    async def scenario(sandbox):
        waiting = asyncio.ensure_future(sh(sandbox, "sleep 60"))
        await asyncio.sleep(0.1)
        sandbox._launcher.kill(sandbox.id)
        with pytest.raises(SandboxDied, match="has ended"):
            await waiting
        with pytest.raises(SandboxDied):
            await sandbox.read_file("/etc/passwd")

    in_sandbox(scenario)
