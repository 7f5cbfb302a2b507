"""Real vLLM servers on this machine, for the contract and for the round trip."""

from __future__ import annotations

import asyncio
import copy
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from deepswe.config import Recipe, build_recipe
from deepswe.policy.models import untie
from deepswe.session.serve import running_server, server_arguments, server_environment
from deepswe.training.weights_file import safetensors_writer, tied_names, with_copies

VARIABLE = "DEEPSWE_VLLM_PYTHON"
"""Names the interpreter of an environment with vLLM, such as `benchmarks/vllm_cpu_env.sh` makes."""
VOCABULARY = 512
SMALL_CPU = ("--enforce-eager", "--max-num-seqs", "16", "--block-size", "32", "--skip-tokenizer-init")
CACHE_GIB = "1"


def make_model(seed: int = 0) -> Any:
    """A small Qwen3 with random weights, wide enough for the log-probs to differ."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.1,
        architectures=["Qwen3ForCausalLM"],
    )
    return Qwen3ForCausalLM(config).eval()


def save_untied(model: Any, directory: Path) -> None:
    """The model as `engine.vllm.untied` serves it."""
    served = copy.deepcopy(model)
    untie(served)
    served.save_pretrained(directory)


def save_weights(model: Any, directory: Path) -> Path:
    """Only the weights, as a change of them is written."""
    directory.mkdir(parents=True, exist_ok=True)
    safetensors_writer(with_copies(model.named_parameters, tied_names(model)))(directory)
    return directory


def recipe(python: str) -> Recipe:
    """How the servers are started: as `deepswe serve` does it."""
    return build_recipe(
        {
            "run": {"name": "served"},
            "tasks": {"kind": "micro"},
            "rollout": {"max_tokens": 4096, "max_turn_tokens": 2048},
            "engine": {"backend": "vllm", "vllm": {"python": python, "arguments": SMALL_CPU}},
        },
        origin="real",
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@asynccontextmanager
async def real_servers(
    python: str, model: Path, count: int, logs: Path, *, start_s: float = 600.0
) -> AsyncIterator[list[tuple[str, asyncio.subprocess.Process]]]:
    """Servers of the model in that directory, once they answer: (address, process) of each."""
    async with AsyncExitStack() as stack:
        started = []
        for number in range(count):
            port = free_port()
            command = server_arguments(recipe(python), str(model), host="127.0.0.1", port=port)
            environment = {**server_environment(number, 0, "file"), "VLLM_CPU_KVCACHE_SPACE": CACHE_GIB}
            process = await stack.enter_async_context(
                running_server(command, environment, logs / f"server-{number}.log")
            )
            started.append((f"http://127.0.0.1:{port}", process))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with asyncio.timeout(start_s):
            for number, (address, process) in enumerate(started):
                while not await _answers(session, address):
                    if process.returncode is not None:
                        raise AssertionError((logs / f"server-{number}.log").read_text()[-3000:])
                    await asyncio.sleep(0.5)
        yield started


async def _answers(session: aiohttp.ClientSession, address: str) -> bool:
    try:
        async with session.get(f"{address}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False
