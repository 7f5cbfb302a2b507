"""A real vLLM on the CPU keeps the contract that the stand-in keeps."""

import asyncio
import os
from pathlib import Path

import pytest

from tests.vllm_server.contract import CHECKS, Subject
from tests.vllm_server.real import VARIABLE, make_model, real_servers, save_untied, save_weights

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no interpreter with vLLM"),
]


def test_a_real_server_keeps_the_contract(tmp_path: Path) -> None:
    first = make_model(0)
    save_untied(first, tmp_path / "model")
    weights = save_weights(first, tmp_path / "first"), save_weights(make_model(1), tmp_path / "second")

    async def run() -> None:
        async with real_servers(os.environ[VARIABLE], tmp_path / "model", 1, tmp_path) as started:
            for check in CHECKS:
                await check(Subject(started[0][0], weights, 0.05))

    asyncio.run(run())
