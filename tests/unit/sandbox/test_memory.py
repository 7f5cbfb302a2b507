import asyncio

import pytest

from deepswe.errors import SandboxError
from deepswe.sandbox.memory import MemorySandbox


def test_files_are_read_back_as_written_and_missing_ones_are_not_found():
    async def scenario() -> None:
        sandbox = MemorySandbox({"/testbed/a.py": b"a\n"})
        assert await sandbox.read_file("/testbed/a.py") == b"a\n"
        assert await sandbox.read_file("/testbed/../testbed//a.py") == b"a\n"
        await sandbox.write_files({"/testbed/new/b.bin": b"\0\xff"})
        assert await sandbox.read_file("/testbed/new/b.bin") == b"\0\xff"
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("/testbed/c.py")
        with pytest.raises(IsADirectoryError):
            await sandbox.read_file("/testbed/new")
        with pytest.raises(IsADirectoryError):
            await sandbox.write_files({"/testbed": b""})
        with pytest.raises(NotADirectoryError):
            await sandbox.write_files({"/testbed/a.py/b": b""})
        with pytest.raises(ValueError, match="more than the 1 asked for"):
            await sandbox.read_file("/testbed/a.py", max_bytes=1)
        with pytest.raises(ValueError, match="not absolute"):
            await sandbox.read_file("a.py")

    asyncio.run(scenario())


def test_commands_are_refused():
    with pytest.raises(SandboxError, match="this sandbox runs no commands"):
        asyncio.run(MemorySandbox().exec(["true"], timeout_s=1))


def test_ids_differ():
    assert MemorySandbox().id != MemorySandbox().id
