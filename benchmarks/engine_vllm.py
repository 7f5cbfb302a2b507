"""The loads of `benchmarks/engine.py` through vLLM on the CPU; run by the interpreter of its environment.

    benchmarks/vllm_cpu_env.sh /tmp/vllm                       # once; its own environment, 3.4 GB
    .venv/bin/python benchmarks/engine.py --vllm /tmp/vllm/bin/python

Reads one JSON object from standard input (`model`: a directory; `loads`: for each name the scripts, each an opening and
turns of how many tokens to sample and which to see then; `repeats`; `dtype`), and prints one as its last line: sampled
tokens a second of CPU of each load, the median. The engine runs in this process, on one thread, with its prefix cache;
the next turn of an attempt is asked for as soon as the one before it is over.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def rate(engine: Any, sampling: Any, scripts: list[dict[str, Any]], name: str) -> float:
    """Sampled tokens a second of CPU."""
    streams = [list(script["opening"]) for script in scripts]
    turns = [0] * len(scripts)
    made = 0

    def ask(number: int) -> None:
        count = scripts[number]["turns"][turns[number]][0]
        parameters = sampling(
            max_tokens=count, min_tokens=count, temperature=1.0, seed=number, ignore_eos=True, detokenize=False
        )
        prompt = {"prompt_token_ids": list(streams[number])}
        engine.add_request(f"{name}-{number}-{turns[number]}", prompt, parameters)

    begun = time.process_time()
    for number in range(len(scripts)):
        ask(number)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if not output.finished:
                continue
            number = int(output.request_id.split("-")[-2])
            tokens = list(output.outputs[0].token_ids)
            made += len(tokens)
            streams[number] += [*tokens, *scripts[number]["turns"][turns[number]][1]]
            turns[number] += 1
            if turns[number] < len(scripts[number]["turns"]):
                ask(number)
    return made / (time.process_time() - begun)


def main() -> int:
    asked = json.load(sys.stdin)
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    llm = LLM(
        asked["model"],
        skip_tokenizer_init=True,
        dtype=asked["dtype"],
        max_model_len=4096,
        max_num_seqs=64,
        block_size=32,
        seed=0,
    )
    engine = llm.llm_engine
    found: dict[str, float] = {}
    for load, scripts in asked["loads"].items():
        short = [{"opening": scripts[0]["opening"], "turns": [[2, []]]}]
        rate(engine, SamplingParams, short, f"{load}-warm")
        rates = []
        for repeat in range(asked["repeats"]):
            engine.reset_prefix_cache()
            rates.append(rate(engine, SamplingParams, scripts, f"{load}-{repeat}"))
            print(f"{load}: {rates[-1]:.0f} tokens a second of CPU", file=sys.stderr, flush=True)
        found[load] = statistics.median(rates)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
