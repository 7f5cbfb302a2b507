"""One update of the learner on a GPU against plain code for the same model and tokens, each in a process of its own.

Cases: Qwen3-0.6B with all weights and Qwen3-8B with LoRA, each at 8,192 and 32,768 tokens a trajectory; random weights.
Plain code is what one writes with transformers alone: the model's own logits of a whole trajectory, log-softmax,
gradient checkpointing, AdamW. Prints one JSON object: for each case and side tokens_per_s, mfu and peak_gib, or why
there is none (out of memory, no time left), and the difference of the two losses where both ran.

`--tiny` runs the same code on small models on the CPU: it shows that the script works, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepswe.config import AlgorithmConfig, LoraAdapters, ModelConfig, TrainingConfig
from deepswe.session.plan import FAMILY, model_configuration
from deepswe.training.learner import Learner
from deepswe.training.lora import add_lora
from deepswe.training.plan import GPUS, flops_per_token
from deepswe.training.plan_trace import model_facts
from deepswe.types import Ending, Graded, TokenSpan, Trajectory

WARM, REPEATS = 1, 3
TOLERANCE = 0.02
"""Of the two losses, both under bfloat16."""


@dataclass(frozen=True)
class Case:
    name: str
    length: int
    lora: int
    trajectories: int = 2


CASES = (
    Case("Qwen/Qwen3-0.6B", 8192, 0, 8),
    Case("Qwen/Qwen3-0.6B", 32768, 0),
    Case("Qwen/Qwen3-8B", 8192, 32, 4),
    Case("Qwen/Qwen3-8B", 32768, 32),
)
TINY = (Case("tiny", 96, 0, 3), Case("tiny", 64, 4, 2))


def make_model(case: Case, device: str) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    if case.name == "tiny":
        config = Qwen3Config(
            vocab_size=512,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            tie_word_embeddings=True,
        )
    else:
        assert case.name in FAMILY
        config = model_configuration(ModelConfig(path=case.name))
    torch.manual_seed(0)
    kind = torch.bfloat16 if case.lora and device == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=kind)
    if case.lora:
        add_lora(model, LoraAdapters(rank=case.lora), seed=0)
        model.to(device)
    return model


def make_group(case: Case, vocabulary: int) -> list[Trajectory]:
    """Attempts of several turns: a prompt, then turns of sampled tokens and observations."""
    generator = torch.Generator().manual_seed(1)
    group = []
    for number in range(case.trajectories):
        spans, left, sampled = [], case.length, False
        while left > 0:
            count = min(left, max(8, case.length // 16))
            tokens = tuple(torch.randint(0, vocabulary, (count,), generator=generator).tolist())
            spans.append(TokenSpan(tokens, sampled, (-11.9,) * count if sampled else ()))
            left, sampled = left - count, not sampled
        group.append(Trajectory("task", number, "train", 0, tuple(spans), (), Ending.SUBMITTED, Graded(number % 2)))
    return group


def ours(case: Case, model: Any, device: str) -> Callable[[], float]:
    training = TrainingConfig(
        learning_rate=1e-6, tokens_per_microbatch=case.length, activation_checkpointing=True, grad_clip=1.0
    )
    algorithm = AlgorithmConfig(kl_start_every=0, old_logprobs="learner")
    learner = Learner(model, training, algorithm, max_tokens=case.length, bfloat16=device == "cuda")
    group = make_group(case, model.config.vocab_size)
    return lambda: learner.update([group])["loss"]


def plain(case: Case, model: Any, device: str) -> Callable[[], float]:
    """The same loss as one would write it with transformers alone, one trajectory at a time."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    if case.lora:
        model.enable_input_require_grads()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-6, weight_decay=0.01, betas=(0.9, 0.95), fused=True)
    group = make_group(case, model.config.vocab_size)
    rewards = [float(t.reward or 0.0) for t in group]
    rows = []
    for trajectory in group:
        tokens = torch.tensor([t for span in trajectory.spans for t in span.tokens], device=device)
        mask = torch.tensor([span.sampled for span in trajectory.spans for _ in span.tokens], device=device)
        rows.append((tokens[None], mask[None, 1:]))

    def update() -> float:
        total = 0.0
        for number, (tokens, mask) in enumerate(rows):
            others = [reward for other, reward in enumerate(rewards) if other != number]
            advantage = rewards[number] - sum(others) / len(others)
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
            logp: Tensor = logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
            ratio = (logp - logp.detach()).exp()
            loss = -(ratio * advantage * mask).sum() / (len(group) * case.length)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return total

    return update


SIDES = {"ours": ours, "plain": plain}


def measure(case: Case, side: str, device: str) -> dict[str, Any]:
    """One side of one case; in a process of its own."""
    cuda = device == "cuda"
    model = make_model(case, device)
    update = SIDES[side](case, model, device)
    losses, times = [], []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(WARM + REPEATS):
            begun = time.perf_counter()
            losses.append(update())
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
    except torch.OutOfMemoryError as error:
        return {"none": f"out of memory: {str(error).splitlines()[0]}"}
    seconds = statistics.median(times[WARM:])
    tokens = case.length * case.trajectories
    kind = torch.cuda.get_device_name().lower() if cuda else "cpu"
    gpu = next((figures for name, figures in GPUS.items() if name in kind), None)
    per_token = flops_per_token(model_facts(model.config), case.length)
    return {
        "loss": losses[0],
        "tokens_per_s": tokens / seconds,
        "mfu": tokens / seconds * per_token / (gpu.tflops * 1e12) if gpu else None,
        "peak_gib": torch.cuda.max_memory_allocated() / (1 << 30) if cuda else None,
        "seconds": times,
    }


def spawned(number: int, side: str, tiny: bool, limit_s: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", str(number), side, *(["--tiny"] if tiny else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"none": f"not over after {limit_s:.0f} s"}
    if done.returncode:
        return {"none": f"failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}"}
    made: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models, on the CPU")
    parser.add_argument("--out", type=Path, help="where the result is written, too")
    parser.add_argument("--budget-s", type=float, default=540.0, help="no case begins after this")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases, device = (TINY, "cpu") if arguments.tiny else (CASES, "cuda")
    if arguments.one:
        print(json.dumps(measure(cases[int(arguments.one[0])], arguments.one[1], device)))
        return 0
    if device == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"none": "no GPU here"}))
        return 1
    begun, result = time.monotonic(), {}
    for number, case in enumerate(cases):
        found: dict[str, Any] = {}
        for side in SIDES:
            left = arguments.budget_s - (time.monotonic() - begun)
            found[side] = spawned(number, side, arguments.tiny, left) if left > 20 else {"none": "no time left"}
        if all("loss" in made for made in found.values()):
            found["loss_difference"] = abs(found["ours"]["loss"] - found["plain"]["loss"])
        result[f"{case.name}{f' LoRA {case.lora}' if case.lora else ''} at {case.length}"] = found
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    ran = [found for found in result.values() if "loss_difference" in found]
    wrong = [f for f in ran if f["loss_difference"] > TOLERANCE * max(1e-3, abs(f["plain"]["loss"]))]
    return 0 if all("loss" in found["ours"] for found in result.values()) and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
