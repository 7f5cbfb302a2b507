"""From the learner's weights to vLLM servers, after each step.

By `file`, each version is written once to a directory that the servers can read (the memory of this machine, or a
shared disk), and each server loads it in place. By `nccl` or `ipc` they go from GPU to GPU (`weights_native.py`).
Either way no request is in flight meanwhile, a server that failed gets the present weights before it is used again, and
the servers' log-probs of a stretch of recent tokens are compared with the learner's: that they have the new weights is
measured, not believed.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from deepswe.errors import PolicyError, TrainingError, boundary
from deepswe.policy.vllm import VllmPolicy
from deepswe.policy.vllm_server import ServerFailed, VllmServer
from deepswe.sandbox.owner import PREFIX, is_abandoned, this_process

PROBE_TOKENS = 128

Write = Callable[[Path], None]
"""Writes the learner's present weights into a directory; called in a thread."""
Scorer = Callable[[Sequence[int]], Sequence[float]]
"""The learner's log-probs of all tokens but the first, each after those before it."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far two engines are apart on the same tokens.

    Attributes:
        tokens: compared.
        mean, most: absolute difference of their log-probs, in nats.
    """

    tokens: int
    mean: float
    most: float


def mismatch(ours: Sequence[float], theirs: Sequence[float]) -> Mismatch:
    """Compare the log-probs of the same tokens; they have one length, at least 1."""
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return Mismatch(len(differences), sum(differences) / len(differences), max(differences))


class Transfer(Protocol):
    """One way of weights to servers."""

    async def prepare(self, version: int) -> None:
        """What can be done while the servers still sample."""
        ...

    async def send(self, servers: Sequence[VllmServer]) -> list[ServerFailed | None]:
        """Give these servers the weights that were prepared; nothing is in flight.

        Returns:
            the failure of each, or None where it took them.

        Raises:
            PolicyError: they cannot take weights this way.
        """
        ...

    def close(self) -> None:
        """Remove what it made."""
        ...


class FileTransfer:
    """Through a directory; each server loads it by `reload_weights`. `Transfer`."""

    def __init__(self, write: Write, directory: Path, *, timeout_s: float) -> None:
        """Args:
        write: the weights.
        directory: where; a directory in it is made, and removed by `close`.
        timeout_s: of one server's loading.

        Raises:
            TrainingError: the directory cannot be written.
        """
        self._write, self._timeout_s = write, timeout_s
        with boundary("training.weights", TrainingError):
            for left in directory.glob(f"{PREFIX}*-weights-*"):
                if is_abandoned(left.name):  # its process was killed
                    shutil.rmtree(left, ignore_errors=True)
            prefix = f"{PREFIX}{this_process().tag}-weights-"
            self._directory = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
            self._directory.chmod(0o755)
        self._current: Path | None = None

    async def prepare(self, version: int) -> None:
        """Write the weights of this version; those of the one before are removed."""
        path = self._directory / f"v{version:08d}"
        with boundary("training.weights", TrainingError):
            path.mkdir(exist_ok=True)
            await asyncio.to_thread(self._write, path)
        before, self._current = self._current, path
        if before is not None and before != path:
            shutil.rmtree(before, ignore_errors=True)

    async def send(self, servers: Sequence[VllmServer]) -> list[ServerFailed | None]:
        """All load at once."""
        if self._current is None:
            raise PolicyError("no weights were written yet; publish a version first")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(self._current)}}

        async def load(server: VllmServer) -> ServerFailed | None:
            try:
                await server.post("/collective_rpc", body, timeout_s=self._timeout_s)
                await server.post("/reset_prefix_cache")
            except ServerFailed as failure:
                return failure
            return None

        return list(await asyncio.gather(*(load(server) for server in servers)))

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self._directory, ignore_errors=True)


class VllmWeights:
    """`Updatable` over vLLM servers; an async context.

    Args:
        policy: the servers.
        transfer: how weights get to them; closed with this.
        score: the learner's log-probs, to compare; None does not look.
    """

    def __init__(self, policy: VllmPolicy, transfer: Transfer, score: Scorer | None = None) -> None:
        self._policy, self._transfer, self._score = policy, transfer, score
        self._limit = policy.config.max_mismatch

    async def __aenter__(self) -> Self:
        """Servers that come back get the weights, too."""
        self._policy.refresh = self._refresh
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._policy.refresh = None
        self._transfer.close()

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """The servers have weights of their own: they go on sampling."""
        yield

    async def publish(self, version: int) -> Mapping[str, float]:
        """Give every server that answers the learner's present weights.

        Returns:
            servers (that took them), and where log-probs are compared mismatch_mean and mismatch_max.

        Raises:
            PolicyError: no server took them, or one samples from others than the learner has.
        """
        policy = self._policy
        await self._transfer.prepare(version)
        async with policy.quiet():
            failures = await self._transfer.send(policy.servers)
            for server, failure in zip(policy.servers, failures, strict=True):
                server.version = None if failure else version
            policy.version = version
            reached = [server for server in policy.servers if server.version == version]
            if not reached:
                raise PolicyError(
                    f"none of {len(policy.servers)} vLLM servers took the weights of version {version}; the first: "
                    f"{failures[0]}"
                )
            found = await self._compare(reached)
        row = {"servers": float(len(reached))}
        return row if found is None else {**row, "mismatch_mean": found.mean, "mismatch_max": found.most}

    async def _refresh(self, server: VllmServer) -> None:
        for failure in await self._transfer.send([server]):
            if failure is not None:
                raise failure

    async def _compare(self, servers: Sequence[VllmServer]) -> Mismatch | None:
        tokens = self._policy.recent[:PROBE_TOKENS]
        if self._score is None or not self._limit or len(tokens) < 2:
            return None
        ours = await asyncio.to_thread(self._score, tokens)
        worst: Mismatch | None = None
        for server in servers:
            try:
                found = mismatch(ours, await server.score(tokens))
            except ServerFailed:
                server.version = None
                continue
            if found.most > self._limit:
                raise PolicyError(
                    f"{server.address} and the learner differ by {found.most:.3f} nats on a token (mean "
                    f"{found.mean:.3f} of {found.tokens}), above engine.vllm.max_mismatch {self._limit}: it has not "
                    "the learner's weights, or another precision (vLLM on a CPU needs engine.vllm.untied for a model "
                    "that ties its output matrix)"
                )
            worst = found if worst is None or found.most > worst.most else worst
        return worst
