"""vLLM servers of a recipe, as processes of this one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from deepswe.config import Recipe
from deepswe.envs.suites import open_suite
from deepswe.errors import PolicyError
from deepswe.optional import optional_module
from deepswe.policy.model_path import with_model_directory
from deepswe.policy.models import LoadedModel, load_policy_model, untie
from deepswe.progress import Progress
from deepswe.session.interrupt import run_to_end

START_S = 1800.0
"""A large model takes minutes to load and to compile."""
STOP_S = 20.0
LOOK_S = 0.5
_ERROR = re.compile(r"\b[A-Za-z]+(Error|Exception): .+")


def server_arguments(recipe: Recipe, model: str, *, host: str, port: int) -> tuple[str, ...]:
    """The command of one server.

    Args:
        recipe: its engine section, and the limit on tokens.
        model: a directory or a name on the hub.
        host, port: where it listens.
    """
    config = recipe.engine.vllm
    native = (
        (f'--weight-transfer-config={{"backend": "{config.transfer}"}}',) if config.transfer in ("nccl", "ipc") else ()
    )
    return (
        *(config.python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--host", host, "--port", str(port)),
        *("--served-model-name", config.model or "policy", "--max-model-len", str(recipe.rollout.max_tokens)),
        *("--dtype", recipe.model.dtype, "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        "--enable-prefix-caching",
        *native,
        *config.arguments,
    )


def server_environment(number: int, gpus: int, transfer: str) -> dict[str, str]:
    """The environment of one server: developer mode, which has the endpoints for weights, and its GPUs.

    CUDA IPC handles come to it pickled, which it takes from nobody unless it is told to.
    """
    names = ",".join(str(number * gpus + place) for place in range(gpus))
    developer = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1" if transfer == "ipc" else "0"}
    return {**os.environ, **developer, **({"CUDA_VISIBLE_DEVICES": names} if gpus else {})}


@asynccontextmanager
async def running_server(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """One server's process for the length of the block, and whatever it starts; its words go to `log`.

    Raises:
        PolicyError: it cannot be started.
    """
    with log.open("ab") as words:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, env=dict(environment), stdout=words, stderr=words, start_new_session=True
            )
        except OSError as error:
            raise PolicyError(
                f"{command[0]} cannot be started: {error.strerror}; set engine.vllm.python to the interpreter of "
                "vLLM's environment"
            ) from error
    try:
        yield process
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()


def serve_recipe(
    recipe: Recipe,
    *,
    servers: int,
    gpus: int,
    host: str,
    port: int,
    progress: Progress,
    on_ready: Callable[[str], None],
) -> None:
    """Start the servers, say when they answer, and keep them until an interrupt.

    Args:
        recipe: whose model they serve; one from scratch is written to a directory first.
        servers: how many.
        gpus: of each; 0 leaves the choice to vLLM.
        host, port: where the first one listens; the others take the next ports.
        progress: is told what happens.
        on_ready: gets the setting that names them, quoted for a shell, once all answer.

    Raises:
        ConfigError: `model.path` is neither a directory nor a run, and can be no name of the hub.
        PolicyError: one did not start, or ended; quotes its last words.
    """
    recipe = recipe.model_copy(update={"model": with_model_directory(recipe.model)})
    run_to_end(_serve(recipe, servers, gpus, host, port, progress, on_ready))


async def _serve(
    recipe: Recipe, servers: int, gpus: int, host: str, port: int, progress: Progress, on_ready: Callable[[str], None]
) -> None:
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deepswe-serve-")))
        model = await _served_model(recipe, scratch / "model", progress)
        aiohttp = optional_module("aiohttp", "vllm", "talk to vLLM servers")
        session = await stack.enter_async_context(aiohttp.ClientSession())
        started = []
        for number in range(servers):
            log = scratch / f"server-{number}.log"
            command = server_arguments(recipe, model, host=host, port=port + number)
            process = await stack.enter_async_context(
                running_server(command, server_environment(number, gpus, recipe.engine.vllm.transfer), log)
            )
            started.append((f"http://{host}:{port + number}", process, log))
        progress.say(f"starting {servers} vLLM server(s) for {model}; their logs are in {scratch}")
        for address, process, log in started:
            await _until_healthy(session, address, process, log)
        names = ", ".join(f'"{address}"' for address, _, _ in started)
        on_ready(f"'engine.vllm.servers=[{names}]'")
        while True:
            await asyncio.sleep(LOOK_S)
            for address, process, log in started:
                _check_alive(address, process, log)


async def _served_model(recipe: Recipe, directory: Path, progress: Progress) -> str:
    """The path or name of what the recipe has as its model; written to `directory` where nobody else has it as such."""
    if recipe.model.path and not recipe.engine.vllm.untied:
        return recipe.model.path
    loaded = await _load(recipe, progress)
    if recipe.engine.vllm.untied:
        untie(loaded.model)
    loaded.model.save_pretrained(directory)
    loaded.tokenizer.save_pretrained(directory)
    return str(directory)


async def _load(recipe: Recipe, progress: Progress) -> LoadedModel:
    """The model that a run of this recipe begins with."""
    if recipe.model.path:
        return load_policy_model(recipe.model, corpus=(), seed=recipe.run.seed)
    async with open_suite(recipe, progress) as opened:
        return load_policy_model(recipe.model, corpus=opened.suite.corpus(), seed=recipe.run.seed)


async def _until_healthy(session: Any, address: str, process: asyncio.subprocess.Process, log: Path) -> None:
    try:
        async with asyncio.timeout(START_S):
            while not await _is_healthy(session, address):
                _check_alive(address, process, log)
                await asyncio.sleep(LOOK_S)
    except TimeoutError as error:
        raise PolicyError(f"{address} does not answer {START_S:.0f} s after its start; {_last_words(log)}") from error


async def _is_healthy(session: Any, address: str) -> bool:
    aiohttp = optional_module("aiohttp", "vllm", "talk to vLLM servers")
    limit = aiohttp.ClientTimeout(total=5)
    try:
        async with session.get(f"{address}/health", timeout=limit, allow_redirects=False) as response:
            return bool(response.status == 200)
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def _check_alive(address: str, process: asyncio.subprocess.Process, log: Path) -> None:
    if process.returncode is not None:
        raise PolicyError(f"the server at {address} has ended with exit code {process.returncode}; {_last_words(log)}")


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    # The process that answers only says that another one failed; what failed was said before.
    errors = list(dict.fromkeys(found[0] for line in lines if (found := _ERROR.search(line))))
    return "its last words: " + " | ".join(errors[:2] or lines[-4:])[:600]
