"""Docker and Podman, on real engines that `tests/engines/engines.sh` starts. Skipped where none runs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("aiodocker")

from deepswe.config import AgentConfig, MicroTasks, SandboxConfig
from deepswe.envs.base import Verdict
from deepswe.envs.swe import SweSuite
from deepswe.errors import SandboxStartError, SandboxUnavailable, SandboxUnsupported
from deepswe.grading.tree import Workshop
from deepswe.sandbox import container
from deepswe.sandbox.base import Layer, Sandbox, SandboxSpec
from deepswe.sandbox.container_engine import ImageUnavailable, find_engine
from deepswe.sandbox.pool import SandboxPool, limits_of
from deepswe.tasks.synth.micro.making import micro_task_set
from deepswe.tasks.synth.micro.solver import micro_solver
from deepswe.tasks.task import HiddenTests, Task
from deepswe.types import Graded, ToolCall

ENGINES = Path(os.environ.get("DEEPSWE_ENGINES") or Path(tempfile.gettempdir()) / "deepswe-engines")
IMAGE = "localhost/deepswe-test:1"
R2E, SWEBENCH, NO_PYTHON = (f"localhost/deepswe-test-{name}:1" for name in ("r2e", "swebench", "nopython"))


def settings(engine: str, **section: object) -> SandboxConfig:
    address = f"unix://{ENGINES}/{engine}/engine.sock"
    own = {"host": address, "pull": "never", **section}
    return SandboxConfig.model_validate({"backend": engine, "image": IMAGE, "memory_mib": 512, engine: own})


@pytest.fixture(
    params=[pytest.param("docker", marks=pytest.mark.docker), pytest.param("podman", marks=pytest.mark.podman)]
)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a running engine, on which the test leaves nothing."""
    name: str = request.param
    if not (ENGINES / name / "engine.sock").exists():
        pytest.skip(f"no {name} of tests/engines runs; start it by `tests/engines/engines.sh start {name}`")
    try:
        find_engine(name, container.section(settings(name), name))  # type: ignore[arg-type]
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield name
    assert wait_for_none(name) == []


def wait_for_none(engine: str, patience_s: float = 30.0) -> list[str]:
    """What is on the engine of ours once nothing more goes away by itself."""
    deadline = time.monotonic() + patience_s
    while (left := asyncio.run(container.list_sandboxes(settings(engine)))) and time.monotonic() < deadline:
        time.sleep(0.5)
    return [record.name for record in left]


async def said(sandbox: Sandbox, script: str) -> str:
    result = await sandbox.exec(["sh", "-c", script], timeout_s=60)
    return (result.stdout + result.stderr).decode()


def run_in(config: SandboxConfig, spec: SandboxSpec, script: str) -> str:
    async def main() -> str:
        async with SandboxPool(config, "tests") as pool, pool.open(spec) as sandbox:
            return await said(sandbox, script)

    return asyncio.run(main())


def test_a_command_in_a_live_container_is_a_frame_and_not_an_exec_of_the_engine(engine: str) -> None:
    async def main() -> tuple[float, str]:
        async with SandboxPool(settings(engine), "tests") as pool, pool.open(SandboxSpec()) as sandbox:
            times = []
            for _ in range(50):
                started = time.perf_counter()
                await sandbox.exec(["true"], timeout_s=60)
                times.append(time.perf_counter() - started)
            return sorted(times)[5], await said(sandbox, "id -u; cat /proc/1/comm; touch /x")

    fast, words = asyncio.run(main())
    assert fast < 0.08, "an exec through the engine takes 84 ms and more"
    assert words.startswith("1000\npython3\n")
    assert "Read-only file system" in words


@pytest.mark.parametrize("layers", ["mount", "copy"])
def test_layers_are_mounted_or_copied_and_never_written(engine: str, layers: str, tmp_path: Path) -> None:
    library, code = tmp_path / "lib", tmp_path / "code"
    for directory, name in ((library, "deep/b.py"), (code, "a.py")):
        (directory / name).parent.mkdir(parents=True)
        (directory / name).write_text("value = 41\n")
    (library / "link").symlink_to("deep/b.py")
    spec = SandboxSpec((Layer(code, "/testbed", writable=True), Layer(library, "/opt/lib")))
    script = (
        "cat a.py /opt/lib/link; echo > a.py; for f in x deep/b.py; do echo > /opt/lib/$f || echo no; done 2>/dev/null"
    )
    assert run_in(settings(engine, layers=layers), spec, script) == "value = 41\n" * 2 + "no\n" * 2
    assert (code / "a.py").read_text() == "value = 41\n"


def test_an_environment_brings_its_interpreter_without_the_packages_there(engine: str, tmp_path: Path) -> None:
    environment, code = tmp_path / "env", tmp_path / "code"
    venv.EnvBuilder(symlinks=True, with_pip=False).create(environment)
    code.mkdir()
    (code / "a.py").write_text("value = 41\n")
    spec = SandboxSpec((Layer(code, "/testbed", writable=True), Layer(environment, "/opt/env")))
    script = """cat > b.py <<'E'
import a, sys; print(a.value + 1, sys.prefix, len([p for p in sys.path if 'base' in p]))
E
/opt/env/bin/python b.py; (echo > /opt/env/x) 2>/dev/null || echo refused"""
    said = run_in(settings(engine), spec, script)
    assert said.splitlines() == ["42 /opt/env 0", "refused"]
    assert not (code / "b.py").exists()


@pytest.mark.parametrize(
    ("layout", "image", "python"),
    [
        ("r2e", R2E, "/testbed/.venv/bin/python"),
        ("swebench", SWEBENCH, "/opt/miniconda3/envs/testbed/bin/python"),
        ("swesmith", SWEBENCH, "/opt/miniconda3/envs/testbed/bin/python"),
    ],
)
def test_a_layout_puts_the_images_own_environment_first(engine: str, layout: str, image: str, python: str) -> None:
    said = run_in(settings(engine, layout=layout), SandboxSpec(image=image), "command -v python; id -u; cat code.py")
    assert said.split() == [python, "0", "value", "=", "1"]


def test_the_r2e_layout_takes_tests_away_but_for_grading(engine: str) -> None:
    script = "ls -d /r2e_tests /testbed/r2e_tests run_tests.sh 2>/dev/null | wc -l"
    config = settings(engine, layout="r2e")
    assert run_in(config, SandboxSpec(image=R2E, labels={"purpose": "attempt"}), script).strip() == "0"
    assert run_in(config, SandboxSpec(image=R2E, labels={"purpose": "grade"}), script).strip() == "3"


def test_an_image_without_python_is_refused_and_runs_with_an_interpreter_that_is_given(engine: str) -> None:
    spec = SandboxSpec(image=NO_PYTHON)
    with pytest.raises(SandboxStartError, match=rf"sandbox\.{engine}\.interpreter"):
        run_in(settings(engine), spec, "true")
    prefix = os.path.realpath(sys.base_prefix)
    if prefix == "/usr":
        pytest.skip("the interpreter of this machine is the system's, not one in a directory of its own")
    config = settings(engine, interpreter=prefix)
    assert run_in(config, replace(spec, workdir="/tmp"), "command -v python3 || echo none") == "none\n"


def test_a_missing_image_is_a_typed_failure(engine: str) -> None:
    with pytest.raises(ImageUnavailable) as caught:
        run_in(settings(engine), SandboxSpec(image="localhost/no-such:1"), "true")
    assert caught.value.cause == "never"
    with pytest.raises(ImageUnavailable) as caught:
        run_in(settings(engine, pull="missing", pull_retries=0), SandboxSpec(image="localhost:1/no-such:1"), "true")
    assert caught.value.cause == "unreachable"


def test_a_layer_that_is_no_directory_and_an_impossible_target_are_refused(engine: str, tmp_path: Path) -> None:
    for layer in (Layer(tmp_path / "none", "/testbed"), Layer(tmp_path, "/proc/x")):
        with pytest.raises(SandboxUnsupported):
            run_in(settings(engine), SandboxSpec((layer,)), "true")


_HOLDER = """
import asyncio, sys
from tests.integration.sandbox.test_container import settings
from deepswe.sandbox.base import SandboxSpec
from deepswe.sandbox.pool import SandboxPool
async def main():
    async with SandboxPool(settings(sys.argv[1]), "victim") as pool:
        async with pool.open(SandboxSpec()) as one, pool.open(SandboxSpec()) as two:
            await one.exec(["sh", "-c", "(setsid sleep 4301 &)"], timeout_s=60)
            print("ready", flush=True)
            await two.exec(["sleep", "4302"], timeout_s=600)
asyncio.run(main())
"""


def test_a_killed_client_leaves_no_container_after_a_reap(engine: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, engine], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    )
    assert process.stdout is not None
    with process.stdout as words:
        assert words.readline() == "ready\n"
        held = asyncio.run(container.list_sandboxes(settings(engine)))
        assert [record.run for record in held] == ["victim", "victim"]
        assert asyncio.run(container.reap(settings(engine))) == [], "the owner is alive"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    asyncio.run(container.reap(settings(engine)))
    assert wait_for_none(engine) == []
    found = subprocess.run(["pgrep", "-f", "sleep 430[12]"], capture_output=True, text=True, check=False)
    assert found.stdout == ""


def test_micro_tasks_are_solved_and_graded_in_containers(engine: str) -> None:
    config = settings(engine)

    async def attempt(suite: SweSuite, position: int, solve: bool) -> Verdict:
        task = suite.split("train")[position]
        environment = suite.open(task, seed=0)
        try:
            await environment.start()
            turns = suite.reference(task, seed=0) if solve else None
            if isinstance(turns, Generator):
                completion = next(turns)
                while not (outcome := await environment.act(completion, timeout_s=60)).done:
                    completion = turns.send(outcome.observation)
            return await environment.finish()
        finally:
            await environment.close()

    def solver(task: Task, hidden: HiddenTests, seed: int) -> Generator[ToolCall, str, None]:
        return micro_solver(task, hidden, seed=seed, mistakes=0.0)

    async def main() -> list[float]:
        async with SandboxPool(config, "micro") as pool:
            workshop = Workshop(pool.open, Path, limits_of(config))
            tasks = micro_task_set(MicroTasks(train=2, heldout=0, unseen=0))
            suite = SweSuite(tasks, workshop, AgentConfig(), solver=solver)
            verdicts = await asyncio.gather(*(attempt(suite, n, solve) for n in range(2) for solve in (True, False)))
            grades = [verdict.grade for verdict in verdicts]
            assert all(isinstance(grade, Graded) for grade in grades), grades
            return [grade.reward for grade in grades if isinstance(grade, Graded)]

    assert asyncio.run(main()) == [1.0, 0.0, 1.0, 0.0]
