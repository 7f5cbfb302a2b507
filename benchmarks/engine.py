"""The embedded engine against `generate` of transformers: many turns with kept keys and values, and one plain turn.

Many turns: 64 attempts at once, each an opening and several turns whose lengths are drawn once and for all (most are
short, some are long), with an observation after each. Ours runs them through `EmbeddedPolicy`. The peer is what one
writes with `generate`: at each turn all attempts that go on are padded on the left into one batch and computed whole;
each row stops at its length. One plain turn: 32 prompts of one length and one number of new tokens, so that neither
side wastes anything. Models with random weights: of the quickstart's size, and of SmolLM2-135M's shape; plain `torch`
and one type on both sides (float32, or `--dtype bfloat16`: ours over weights in float32), all probabilities sampled
from, at temperature 1. The sides take turns. Prints one JSON object as its last line:

- `ours`, `peer`: sampled tokens a second of CPU, on one thread, of each load; `ratio`; `repeats`
- `floor`: share of the machine's measured speed of products of matrices that ours reaches in each load
- `batching`: with `--batching`, the same of transformers' continuous batching on one plain turn of the small model
- `vllm`, `vllm_ratio`: with `--vllm PYTHON` (an interpreter that benchmarks/vllm_cpu_env.sh has made), the same of vLLM
  on the CPU, with its prefix cache, and ours over it

Exits 0 only where many turns have a ratio of at least 5 and one plain turn 1.3, for both models, against `generate` and
for one plain turn against vLLM too. `--quick` has the small model alone, fewer and shorter turns, which `generate`
computes anew at less cost, and one repeat, and holds many turns to 3.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from deepswe.policy.base import Sampling
from deepswe.policy.embedded import EmbeddedPolicy

WANTED = {"turns": 5.0, "plain": 1.3}
QUICK = {"turns": 3.0}


@dataclass(frozen=True)
class Turn:
    """So many tokens are sampled, then these are observed."""

    sampled: int
    observed: tuple[int, ...]


@dataclass(frozen=True)
class Script:
    """What one attempt is: its opening and its turns."""

    opening: tuple[int, ...]
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Load:
    """Sizes of scripts: from and to, both inclusive."""

    attempts: int
    turns: tuple[int, int]
    opening: int
    sampled: tuple[int, int]
    observed: tuple[int, int]

    def scripts(self, vocabulary: int) -> list[Script]:
        """Drawn once and for all. Lengths of turns are heavy-tailed between their bounds; eight attempts a task share
        their opening."""
        rng = random.Random(0)

        def drawn(count: int) -> tuple[int, ...]:
            return tuple(rng.randrange(2, vocabulary) for _ in range(count))

        def length(bounds: tuple[int, int]) -> int:
            low, high = bounds
            return min(high, round(low * rng.paretovariate(1.2)))

        openings = [drawn(self.opening) for _ in range(-(-self.attempts // 8))]
        made = []
        for number in range(self.attempts):
            count = rng.randint(*self.turns)
            turns = tuple(Turn(length(self.sampled), drawn(length(self.observed))) for _ in range(count))
            made.append(Script(openings[number // 8], turns))
        return made


SHAPES = {
    "quickstart": {"width": 128, "layers": 2, "inner": 256, "heads": 4, "kv": 4, "vocabulary": 520},
    "smol": {"width": 576, "layers": 30, "inner": 1536, "heads": 9, "kv": 3, "vocabulary": 49_152},
}
TURNS = {
    "quickstart": Load(64, (8, 16), 160, (8, 64), (16, 160)),
    "smol": Load(64, (4, 6), 64, (4, 16), (16, 64)),
    "quick": Load(64, (4, 8), 64, (8, 32), (16, 64)),
}
PLAIN = {
    "quickstart": Load(32, (1, 1), 160, (96, 96), (1, 1)),
    "smol": Load(32, (1, 1), 64, (32, 32), (1, 1)),
    "quick": Load(32, (1, 1), 64, (64, 64), (1, 1)),
}


def make_model(shape: dict[str, int]) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": shape["vocabulary"],
        "hidden_size": shape["width"],
        "intermediate_size": shape["inner"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv"],
        "head_dim": shape["width"] // shape["heads"],
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    kinds: tuple[Any, Any] = (LlamaForCausalLM, LlamaConfig) if shape["layers"] > 2 else (Qwen3ForCausalLM, Qwen3Config)
    model: PreTrainedModel = kinds[0](kinds[1](**sizes))
    model.train(False)
    return model


def ours(policy: EmbeddedPolicy, scripts: Sequence[Script]) -> int:
    """All attempts at once through the engine; the number of sampled tokens."""

    async def attempt(number: int, script: Script) -> int:
        stream, made = list(script.opening), 0
        for turn in script.turns:
            sampling = Sampling(turn.sampled, 1.0, frozenset(), seed=number)
            done = await policy.generate(f"attempt-{number:02}", stream, sampling, timeout_s=3600.0)
            stream += [*done.tokens, *turn.observed]
            made += len(done.tokens)
        await policy.release(f"attempt-{number:02}")
        return made

    async def together() -> int:
        return sum(await asyncio.gather(*(attempt(*pair) for pair in enumerate(scripts))))

    return asyncio.run(together())


class Lengths(StoppingCriteria):
    """Each row stops at a length of its own."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends_N = torch.tensor(ends)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] >= self._ends_N


@torch.inference_mode()
def generate(model: Any, scripts: Sequence[Script]) -> int:
    """Turn by turn with `generate`; the number of sampled tokens."""
    streams = [list(script.opening) for script in scripts]
    made = 0
    for number in range(max(len(script.turns) for script in scripts)):
        live = [index for index, script in enumerate(scripts) if number < len(script.turns)]
        wide = max(len(streams[index]) for index in live)
        wanted = [scripts[index].turns[number].sampled for index in live]
        rows = [[0] * (wide - len(streams[index])) + streams[index] for index in live]
        seen = [[0] * (wide - len(streams[index])) + [1] * len(streams[index]) for index in live]
        output = model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(seen),
            generation_config=settings(max(wanted)),
            stopping_criteria=StoppingCriteriaList([Lengths([wide + count for count in wanted])]),
        )
        for row, (index, count) in enumerate(zip(live, wanted, strict=True)):
            streams[index] += [*output[row, wide : wide + count].tolist(), *scripts[index].turns[number].observed]
            made += count
    return made


def settings(tokens: int) -> GenerationConfig:
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=None
    )


def batching(model: Any, scripts: Sequence[Script]) -> int:
    """One plain turn with transformers' continuous batching; the number of sampled tokens."""
    made = model.generate_batch(
        [list(script.opening) for script in scripts], generation_config=settings(scripts[0].turns[0].sampled)
    )
    return sum(len(output.generated_tokens) for output in made.values())


def vllm(python: str, model: PreTrainedModel, loads: dict[str, Load], repeats: int, dtype: str) -> dict[str, float]:
    """Sampled tokens a second of CPU of each load, by vLLM in its own environment."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        asked = {
            "model": folder,
            "repeats": repeats,
            "dtype": dtype,
            "loads": {
                name: [
                    {"opening": script.opening, "turns": [(turn.sampled, turn.observed) for turn in script.turns]}
                    for script in load.scripts(model.config.vocab_size)
                ]
                for name, load in loads.items()
            },
        }
        command = [python, str(Path(__file__).with_name("engine_vllm.py"))]
        done = subprocess.run(
            command, input=json.dumps(asked), text=True, stdout=subprocess.PIPE, check=True, cwd=folder
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rate(side: Callable[[Any, Sequence[Script]], int], model: Any, scripts: Sequence[Script]) -> float:
    """Sampled tokens a second of CPU."""
    begun = time.process_time()
    made = side(model, scripts)
    return made / (time.process_time() - begun)


def compare(model: PreTrainedModel, load: Load, repeats: int, dtype: torch.dtype) -> dict[str, float]:
    """Medians of interleaved repeats, after a short warm-up; an engine is opened once, as in a run."""
    scripts = load.scripts(model.config.vocab_size)
    rates: dict[str, list[float]] = {"ours": [], "peer": []}
    short = [Script(script.opening, (Turn(2, ()),)) for script in scripts[:8]]
    narrow: Any = model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)
    with EmbeddedPolicy(model, threads=1, autocast=None if dtype == torch.float32 else dtype) as policy:
        ours(policy, short)
        generate(narrow, short)
        for _ in range(repeats):
            rates["ours"].append(rate(ours, policy, scripts))
            rates["peer"].append(rate(generate, narrow, scripts))
    medians = {side: statistics.median(found) for side, found in rates.items()}
    sampled = sum(turn.sampled for script in scripts for turn in script.turns)
    observed = sum(len(turn.observed) for script in scripts for turn in script.turns[:-1])
    # Openings are counted once a task: the engine shares them.
    openings = sum(len(opening) for opening in {script.opening for script in scripts})
    return {
        **medians,
        "ratio": medians["ours"] / medians["peer"],
        "computed": (sampled + observed + openings) / sampled,
    }


def products_a_second(dtype: torch.dtype) -> float:
    """Floating-point operations a second of one thread in a product of matrices of 1,024 x 1,024, the best of ten."""
    left, right = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    best = 0.0
    for _ in range(10):
        begun = time.process_time()
        left @ right
        best = max(best, 2 * 1024**3 / (time.process_time() - begun))
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small model alone, fewer turns, one repeat")
    parser.add_argument("--models", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--loads", nargs="+", choices=tuple(WANTED), default=list(WANTED))
    parser.add_argument("--batching", action="store_true", help="also transformers' continuous batching")
    parser.add_argument("--vllm", metavar="PYTHON", help="also vLLM on the CPU, by this interpreter")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the passes")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.vllm and not os.access(arguments.vllm, os.X_OK):
        parser.error(f"--vllm {arguments.vllm} is no interpreter; benchmarks/vllm_cpu_env.sh DIRECTORY makes one")
    torch.set_num_threads(1)
    names, repeats = (["quickstart"], 1) if arguments.quick else (arguments.models, arguments.repeats)
    found: dict[str, dict[str, dict[str, float]]] = {}
    batched: dict[str, float] = {}
    by_vllm: dict[str, dict[str, float]] = {}
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    peak = products_a_second(dtype)
    for name in names:
        model = make_model(SHAPES[name])
        size = "quick" if arguments.quick else name
        both = {"turns": TURNS[size], "plain": PLAIN[size]}
        loads = {load: both[load] for load in arguments.loads}
        found[name] = {load: compare(model, sizes, repeats, dtype) for load, sizes in loads.items()}
        for made in found[name].values():
            operations = 2 * sum(p.numel() for p in model.parameters()) * made["computed"]
            made["floor"] = made["ours"] * operations / peak
        if arguments.vllm:
            by_vllm[name] = vllm(arguments.vllm, model, loads, repeats, arguments.dtype)
        if arguments.batching and name == "quickstart":
            batched[name] = rate(batching, model, PLAIN[size].scripts(model.config.vocab_size))
    result: dict[str, Any] = {
        key: {name: {load: made[key] for load, made in of.items()} for name, of in found.items()}
        for key in ("ours", "peer", "ratio", "floor")
    }
    over_vllm = {
        name: {load: found[name][load]["ours"] / speed for load, speed in of.items()} for name, of in by_vllm.items()
    }
    result |= {"vllm": by_vllm, "vllm_ratio": over_vllm}
    result |= {"repeats": repeats, "dtype": arguments.dtype, "batching": batched, "peak_gflops": peak / 1e9}
    print(json.dumps(result))
    wanted = QUICK if arguments.quick else WANTED
    bounds = {load: wanted[load] for load in arguments.loads if load in wanted}
    fast = all(of[load]["ratio"] >= least for of in found.values() for load, least in bounds.items())
    return 0 if fast and all(of.get("plain", WANTED["plain"]) >= WANTED["plain"] for of in over_vllm.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
