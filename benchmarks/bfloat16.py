"""Whether bfloat16 pays on this CPU: an update and a turn of the engine in float32 and under autocast to bfloat16.

Three shapes: the model of the quickstart, a wider one, and six of the thirty layers of SmolLM2-135M, which are
alike. The sides take turns. Prints one JSON object as its last line:

- `ours`, `peer`: median seconds of CPU, on one thread, in bfloat16 and in float32, of an update with padded rows, of
  one on prefix trees (`training.packing`), and of the engine
- `ratio`: float32 over bfloat16, above 1 where bfloat16 is faster; `repeats`
- `difference`: mean and largest of the log-probs of the sampled tokens between the two, in nats
- `instructions`: those for bfloat16 that the processor has

Exits 0 always: it decides nothing, and recipes for a CPU are in float32 unless they say otherwise (`model.dtype`, and
`engine.dtype` for the engine alone).
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from deepswe.algorithms.packing import collate, make_samples
from deepswe.config import AlgorithmConfig, TrainingConfig
from deepswe.policy.base import Sampling
from deepswe.policy.embedded import EmbeddedPolicy
from deepswe.training.forward import TokenScorer
from deepswe.training.learner import Learner
from deepswe.types import Ending, Graded, TokenSpan, Trajectory

SHAPES = {
    "quickstart": {"width": 128, "inner": 256, "layers": 2, "heads": 4, "kv": 4, "size": 32, "vocabulary": 520},
    "small": {"width": 256, "inner": 768, "layers": 4, "heads": 4, "kv": 2, "size": 64, "vocabulary": 4096},
    "smol": {"width": 576, "inner": 1536, "layers": 6, "heads": 9, "kv": 3, "size": 64, "vocabulary": 49_152},
}
ATTEMPTS, PROMPT, OWN, ROWS, TURN = 8, 128, 384, 16, 32


def make_model(shape: dict[str, int]) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=shape["vocabulary"],
            hidden_size=shape["width"],
            intermediate_size=shape["inner"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv"],
            head_dim=shape["size"],
            tie_word_embeddings=True,
        )
    )


def make_group(vocabulary: int, scale: int) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, vocabulary, (count,), generator=generator).tolist())

    opening = TokenSpan(draw(PROMPT // scale), False)
    group = []
    for number in range(ATTEMPTS):
        own = draw(OWN // scale)
        spans = (opening, TokenSpan(own, True, (-7.0,) * len(own)))
        group.append(Trajectory("t", number, "train", 0, spans, (), Ending.SUBMITTED, Graded(float(number % 2))))
    return group


def updates(
    model: Qwen3ForCausalLM, group: list[Trajectory], bfloat16: bool, packing: Literal["padded", "tree"]
) -> Callable[[], object]:
    algorithm = AlgorithmConfig(drop_uniform_groups=False, kl_start_every=0)
    training = TrainingConfig(learning_rate=1e-6, tokens_per_microbatch=8192, packing=packing)
    learner = Learner(copy.deepcopy(model), training, algorithm, max_tokens=1024, bfloat16=bfloat16)
    return lambda: learner.update([group])


def turns(policy: EmbeddedPolicy, group: list[Trajectory], scale: int) -> Callable[[], object]:
    stream = list(group[0].spans[0].tokens)

    async def together() -> None:
        async def one(row: int) -> None:
            sampling = Sampling(TURN // scale, 1.0, frozenset(), seed=row)
            await policy.generate(f"row-{row}", stream, sampling, timeout_s=3600.0)
            await policy.release(f"row-{row}")

        await asyncio.gather(*(one(row) for row in range(ROWS)))

    return lambda: asyncio.run(together())


@torch.no_grad()
def difference(model: Qwen3ForCausalLM, group: list[Trajectory]) -> dict[str, float]:
    batch = collate([sample for trajectory in group for sample in make_samples(trajectory, [1.0])])
    narrow_N, wide_N = (TokenScorer(model, bfloat16=bfloat16)(batch).logp_N for bfloat16 in (True, False))
    gap_N = (narrow_N - wide_N).abs()
    return {"mean": float(gap_N.mean()), "most": float(gap_N.max())}


def compare(shape: dict[str, int], repeats: int, scale: int) -> dict[str, Any]:
    model = make_model(shape).eval()
    group = make_group(shape["vocabulary"], scale)
    row: dict[str, Any] = {"difference": difference(model, group)}
    with EmbeddedPolicy(model, threads=1, autocast=torch.bfloat16) as slim, EmbeddedPolicy(model, threads=1) as wide:
        sides = {
            "update": {narrow: updates(model, group, narrow, "padded") for narrow in (True, False)},
            "tree": {narrow: updates(model, group, narrow, "tree") for narrow in (True, False)},
            "engine": {True: turns(slim, group, scale), False: turns(wide, group, scale)},
        }
        for part, ways in sides.items():
            times: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(1 + repeats):
                for bfloat16, work in ways.items():
                    begun = time.process_time()
                    work()
                    times[bfloat16].append(time.process_time() - begun)
            medians = {bfloat16: statistics.median(found[1:]) for bfloat16, found in times.items()}
            row[part] = {"ours": medians[True], "peer": medians[False], "ratio": medians[False] / medians[True]}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small shapes, shorter, one repeat")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names, repeats, scale = (["quickstart"], 1, 4) if arguments.quick else (list(SHAPES), arguments.repeats, 1)
    found = {name: compare(SHAPES[name], repeats, scale) for name in names}
    keys = ("ours", "peer", "ratio")
    parts = ("update", "tree", "engine")
    result = {key: {name: {part: made[part][key] for part in parts} for name, made in found.items()} for key in keys}
    flags = set(re.findall(r"\b(?:avx512_bf16|amx_bf16|avx_ne_convert)\b", Path("/proc/cpuinfo").read_text()))
    print(
        json.dumps(
            {
                **result,
                "repeats": repeats,
                "difference": {name: made["difference"] for name, made in found.items()},
                "instructions": sorted(flags),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
