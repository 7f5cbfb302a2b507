"""A real vLLM on the CPU: ids there and back, log-probs against the learner's, new weights in place, a server killed.

    benchmarks/vllm_cpu_env.sh /tmp/vllm                       # once; its own environment, 3.4 GB
    python benchmarks/vllm_roundtrip.py --python /tmp/vllm/bin/python

The model is a small Qwen3 with random weights, made here. Two servers are started as `deepswe serve` starts them.
Prints one JSON object as its last line: `ids_identical` (of all requests, as the server says it read them),
`mismatch_max` (largest difference of a log-prob between server and learner, in nats, over two versions of the
weights), `reload_changed` (the log-probs follow the learner's new weights) and `survived_kill` (a server is killed in
mid-request, and every turn ends on the other one). Exits 0 only where all hold and the mismatch is below 0.1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.vllm_server.real import VARIABLE, VOCABULARY, make_model, real_servers, save_untied

from deepswe.config import VllmConfig
from deepswe.policy.base import Completion, Sampling
from deepswe.policy.vllm import VllmPolicy
from deepswe.training.weights import FileTransfer, VllmWeights, mismatch
from deepswe.training.weights_file import safetensors_writer, scorer, tied_names, with_copies

BOUND = 0.1


async def sample(policy: VllmPolicy, prompts: Sequence[list[int]], tokens: int) -> list[Completion]:
    return list(
        await asyncio.gather(
            *(
                policy.generate(f"t{n}", prompt, Sampling(tokens, 1.0, frozenset(), n), timeout_s=600)
                for n, prompt in enumerate(prompts)
            )
        )
    )


def worst(score: Any, prompts: Sequence[list[int]], done: Sequence[Completion]) -> float:
    """Largest difference between the learner's log-probs and the sampler's, over what was sampled."""
    most = 0.0
    for prompt, completion in zip(prompts, done, strict=True):
        ours = score([*prompt, *completion.tokens])[len(prompt) - 1 :]
        most = max(most, mismatch(ours, completion.logprobs).most)
    return most


async def measure(python: str, scratch: Path, count: int, tokens: int) -> dict[str, Any]:
    chance = random.Random(0)
    prompts = [[chance.randrange(VOCABULARY) for _ in range(chance.randrange(8, 64))] for _ in range(count)]
    model = make_model()
    save_untied(model, scratch / "model")
    score = scorer(model, bfloat16=False)
    async with real_servers(python, scratch / "model", 2, scratch) as started:
        # `echo` raises where the server read other ids than were sent.
        config = VllmConfig(servers=tuple(address for address, _ in started), echo=True, directory=scratch)
        async with VllmPolicy(config) as policy:
            weights_of = with_copies(model.named_parameters, tied_names(model))
            transfer = FileTransfer(safetensors_writer(weights_of), scratch, timeout_s=120.0)
            async with VllmWeights(policy, transfer, score) as weights:
                first = await sample(policy, prompts, tokens)
                apart = worst(score, prompts, first)
                before = await policy.servers[0].score(prompts[0])
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.02 * torch.randn_like(parameter))
                published = await weights.publish(1)
                after = await policy.servers[0].score(prompts[0])
                second = await sample(policy, prompts, tokens)
                apart = max(apart, worst(score, prompts, second), published["mismatch_max"])
                turns = asyncio.create_task(sample(policy, prompts, 10 * tokens))
                await asyncio.sleep(1.0)
                flying = len(policy._flying)
                os.killpg(started[0][1].pid, signal.SIGKILL)
                killed = await turns
    return {
        "ids_identical": all(len(done.tokens) == tokens for done in [*first, *second]),
        "mismatch_max": round(apart, 5),
        "reload_changed": mismatch(before, after).most > 0.01 and all(done.version == 1 for done in second),
        "survived_kill": flying > 0 and all(len(done.tokens) == 10 * tokens for done in killed),
        "requests": 3 * count,
        "in_flight_at_kill": flying,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=os.environ.get(VARIABLE, ""), help="interpreter with vLLM")
    parser.add_argument("--quick", action="store_true", help="4 prompts instead of 16")
    arguments = parser.parse_args()
    if not arguments.python:
        sys.exit("give --python, the interpreter of an environment that benchmarks/vllm_cpu_env.sh has made")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="vllm-roundtrip-") as scratch:
        count, tokens = (4, 16) if arguments.quick else (16, 48)
        result = asyncio.run(measure(arguments.python, Path(scratch), count, tokens))
    print(json.dumps(result))
    held = result["ids_identical"] and result["reload_changed"] and result["survived_kill"]
    return 0 if held and result["mismatch_max"] < BOUND else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    sys.exit(main())
