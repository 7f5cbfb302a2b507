"""Weights from GPU to GPU: vLLM's own trainer half in this process, its servers' half over HTTP.

Written from vLLM's documentation of weight transfer (0.32). Not run on a GPU by this project yet; without one, or with
servers that lack the endpoints, it is refused before anything is sent.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from deepswe.errors import ConfigError, PolicyError, boundary
from deepswe.optional import optional_module
from deepswe.policy.vllm_server import ServerFailed, VllmServer
from deepswe.training.weights_file import NamedWeights

_MODULE = "vllm.distributed.weight_transfer"


class NativeTransfer:
    """`Transfer` by NCCL broadcast (other GPUs) or CUDA IPC (the same GPU); one server after another."""

    def __init__(self, weights: NamedWeights, backend: str, *, timeout_s: float) -> None:
        """Args:
        weights: gives each weight, whole.
        backend: "nccl" or "ipc".
        timeout_s: of each request to a server.

        Raises:
            ConfigError: there is no GPU, or vLLM is not installed in this environment.
        """
        if not torch.cuda.is_available():
            raise ConfigError(
                f"engine.vllm.transfer is {backend!r}, which sends from GPU to GPU, and this process has none; use file"
            )
        self._weights, self._backend, self._timeout_s = weights, backend, timeout_s
        self._vllm = optional_module(_MODULE, "vllm", f"send weights by {backend} (transfer file does without)")
        self._engine = optional_module(f"{_MODULE}.{backend}_engine", "vllm", f"send weights by {backend}")
        self._senders: dict[str, Any] = {}

    async def prepare(self, version: int) -> None:
        """Nothing can be done ahead."""

    async def send(self, servers: Sequence[VllmServer]) -> list[ServerFailed | None]:
        """Pause each server, send, and let it go on.

        Raises:
            PolicyError: a server lacks the endpoints, or was not started with --weight-transfer-config.
        """
        return [await self._send_one(server) for server in servers]

    async def _send_one(self, server: VllmServer) -> ServerFailed | None:
        try:
            await server.post("/pause?mode=abort", timeout_s=self._timeout_s)
            try:
                if server.address not in self._senders:
                    world = await server.get("/get_world_size")
                    self._senders[server.address] = await self._call(self._open, server, int(world["world_size"]))
                await self._call(self._senders[server.address].send_weights)
                await server.post("/reset_prefix_cache")
            finally:
                await server.post("/resume")
        except ServerFailed as failure:
            self._senders.pop(server.address, None)
            return failure
        return None

    async def _call(self, function: Any, *arguments: Any) -> Any:
        with boundary(f"engine.vllm.transfer {self._backend}", PolicyError):
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.to_thread(function, *arguments)

    def _open(self, server: VllmServer, workers: int) -> Any:
        vllm = self._vllm
        if self._backend == "nccl":
            host, port = _own_address(server.address)
            init = self._engine.NCCLTrainerInitInfo(
                master_address=host, master_port=port, world_size=workers + 1, rank=0, packed=True
            )
        else:
            init = self._engine.IPCTrainerInitInfo(rank=0, packed=True)
        client = vllm.HTTPVLLMWeightSyncClient(server.address, timeout=self._timeout_s)
        return vllm.WeightTransferTrainerFactory.trainer_init(init_info=init, client=client, source=self._source())

    def _source(self) -> Any:
        """The learner's weights as vLLM iterates over them, on this process's GPU."""
        weights, vllm = self._weights, self._vllm

        class Source(vllm.WeightSource):  # type: ignore[misc, name-defined]
            def metadata(self) -> list[Any]:
                return [vllm.ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in weights()]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                for name, weight in weights():
                    yield name, weight.detach().to("cuda").contiguous()

        return Source()

    def close(self) -> None:
        """End the connections."""
        for sender in self._senders.values():
            sender.shutdown()


def _own_address(server: str) -> tuple[str, int]:
    """An address of this machine that the server can reach, and a free port on it."""
    target = urlsplit(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname or "127.0.0.1", target.port or 80))
        host = probe.getsockname()[0]
    with socket.socket() as listener:
        listener.bind((host, 0))
        return host, listener.getsockname()[1]
