from pathlib import Path

import pytest

from deepswe.config import ContainerConfig
from deepswe.errors import SandboxUnavailable

pytest.importorskip("aiodocker", reason="the docker extra is not installed")
from deepswe.sandbox.container_engine import find_engine, in_thread


def test_a_machine_without_any_engine_gets_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "CONTAINER_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setattr("aiodocker.docker._sock_search_paths", [])
    with pytest.raises(
        SandboxUnavailable, match=r"no docker engine answers .*no socket in the usual places.*DOCKER_HOST"
    ):
        find_engine("docker", ContainerConfig())


def test_what_a_coroutine_raises_in_its_thread_comes_back() -> None:
    async def fails() -> None:
        raise KeyError("which")

    with pytest.raises(KeyError, match="which"):
        in_thread(fails)
