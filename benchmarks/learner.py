"""One update on 64 ragged attempts of several turns: ours against TRL's GRPOTrainer and against a bare padded loop.

All three have the same model, weights, attempts, loss (Dr. GRPO: group mean, a constant length, clip 0.2 / 0.28) and
optimiser. TRL is handed the recorded attempts by its `rollout_func`, with the observations masked by `env_mask`; its
time is that from the beginning to the end of a step. The bare loop pads micro-batches of eight in the order in which
attempts come and takes the log-softmax of all logits. The three take turns. Prints one JSON object as its last line:

- `ours`: median seconds of CPU of an update, on one thread; `peer`: of TRL's and of the bare loop's
- `ratio`: of each peer over ours; `repeats`
- `loss_difference`, `grad_norm_difference`: the largest of the first update, relative for the norm

Exits 0 only where ours has at least 2x TRL's speed and 1.5x the bare loop's, and the first losses and norms agree to
1e-4.
`--shape smol` takes the shape of SmolLM2-135M. Needs the extra `compare`. `--quick`: a smaller model, one repeat.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from deepswe.config import AlgorithmConfig, TrainingConfig
from deepswe.training.learner import Learner
from deepswe.types import Ending, Graded, TokenSpan, Trajectory

GROUPS, SIZE, MICRO, RATE = 8, 8, 8, 1e-5
WANTED = {"trl": 2.0, "bare": 1.5}
TOLERANCE = 1e-4
SHAPES = {
    "small": {"hidden_size": 256, "layers": 4, "inner": 768, "heads": 4, "kv": 2, "vocabulary": 4096},
    "smol": {"hidden_size": 576, "layers": 30, "inner": 1536, "heads": 9, "kv": 3, "vocabulary": 49_152},
    "quick": {"hidden_size": 64, "layers": 2, "inner": 128, "heads": 2, "kv": 1, "vocabulary": 512},
}


def make_model(shape: dict[str, int]) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape["vocabulary"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=64,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def make_groups(vocabulary: int, scale: float) -> list[list[Trajectory]]:
    """Attempts of a heavy-tailed number of turns after a prompt that each group shares; rewards of 0 and 1."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, vocabulary, (count,), generator=generator).tolist())

    def size(low: int, high: int) -> int:
        return max(2, int(scale * int(torch.randint(low, high, (1,), generator=generator))))

    groups = []
    for task in range(GROUPS):
        opening = draw(size(150, 400))
        group = []
        for number in range(SIZE):
            turns = 1 + min(19, int(-4 * torch.log(torch.rand(1, generator=generator)).item()))
            spans = [TokenSpan(opening, False)]
            for turn in range(turns):
                said = draw(size(20, 60))
                spans.append(TokenSpan(said, True, (0.0,) * len(said)))
                if turn < turns - 1:
                    spans.append(TokenSpan(draw(size(20, 120)), False))
            grade = Graded(float(number % 2))
            group.append(Trajectory(f"task-{task}", number, "train", 0, tuple(spans), (), Ending.SUBMITTED, grade))
        groups.append(group)
    return groups


def tokens_of(trajectory: Trajectory) -> list[int]:
    return [token for span in trajectory.spans for token in span.tokens]


def mask_of(trajectory: Trajectory) -> list[int]:
    return [int(span.sampled) for span in trajectory.spans for _ in span.tokens]


Update = Callable[[], tuple[float, float]]
"""Makes one update; (loss, norm of the gradient)."""


def ours(shape: dict[str, int], groups: Sequence[Sequence[Trajectory]], length: int, packing: str) -> Update:
    algorithm = AlgorithmConfig(
        advantage="group_mean", length=length, old_logprobs="learner", kl_start_every=0, drop_uniform_groups=False
    )
    training = TrainingConfig(
        learning_rate=RATE, weight_decay=0.0, betas=(0.9, 0.999), packing=packing, tokens_per_microbatch=8192
    )
    learner = Learner(make_model(shape), training, algorithm, max_tokens=length)

    def update() -> tuple[float, float]:
        row = learner.update(groups)
        return row["loss"], row["grad_norm"]

    return update


def bare(shape: dict[str, int], groups: Sequence[Sequence[Trajectory]], length: int) -> Update:
    """What one writes without a library: padded micro-batches, all logits."""
    model = make_model(shape).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    flat = [t for group in groups for t in group]
    means = [sum(float(t.reward or 0) for t in group) / len(group) for group in groups for _ in group]
    advantages = [float(t.reward or 0) - mean for t, mean in zip(flat, means, strict=True)]

    def update() -> tuple[float, float]:
        total = 0.0
        for first in range(0, len(flat), MICRO):
            part = range(first, first + MICRO)
            rows = [torch.tensor(tokens_of(flat[index])) for index in part]
            tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            masks = [torch.tensor(mask_of(flat[index])) for index in part]
            mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)[:, 1:]
            seen = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            logits = model(input_ids=tokens, attention_mask=seen, use_cache=False).logits[:, :-1]
            logp = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
            worth = torch.tensor([advantages[index] for index in part])[:, None]
            ratio = (logp - logp.detach()).exp()
            loss = -(torch.minimum(ratio * worth, ratio.clamp(0.8, 1.28) * worth) * mask).sum() / (len(flat) * length)
            loss.backward()
            total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimiser.step()
        optimiser.zero_grad()
        return total, norm

    return update


class Turns(TrainerCallback):
    """After each step of TRL's, the others take theirs; all times are kept."""

    def __init__(self, others: dict[str, Update]) -> None:
        self.others = others
        self.times: dict[str, list[float]] = {name: [] for name in ("trl", *others)}
        self.made: dict[str, list[tuple[float, float]]] = {name: [] for name in ("trl", *others)}
        self._begun = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.times["trl"].append(time.process_time() - self._begun)
        for name, update in self.others.items():
            begun = time.process_time()
            self.made[name].append(update())
            self.times[name].append(time.process_time() - begun)
        took = {name: round(times[-1], 2) for name, times in self.times.items()}
        print(f"round {len(self.times['trl'])}: seconds of CPU {took}", file=sys.stderr, flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "grad_norm" in logs:
            self.made["trl"].append((float(logs["loss"]), float(logs["grad_norm"])))


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Words that are numbers; TRL decodes completions for its logs."""
    raw = Tokenizer(models.WordLevel({str(token): token for token in range(vocabulary)}, unk_token="0"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="0", eos_token="1", unk_token="0")


def train(
    shape: dict[str, int], groups: Sequence[Sequence[Trajectory]], length: int, turns: Turns, steps: int, folder: str
) -> None:
    """TRL's trainer over the recorded attempts."""
    by_task = {f"task-{task}": group for task, group in enumerate(groups)}

    def rollout(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        given: dict[str, int] = {}
        chosen = []
        for prompt in prompts:
            number = given.get(prompt, 0)
            chosen.append(by_task[prompt][number])
            given[prompt] = number + 1
        heads = [len(t.spans[0].tokens) for t in chosen]
        pairs = list(zip(chosen, heads, strict=True))
        return {
            "prompt_ids": [tokens_of(t)[:head] for t, head in pairs],
            "completion_ids": [tokens_of(t)[head:] for t, head in pairs],
            "logprobs": [[0.0] * (t.length - head) for t, head in pairs],
            "env_mask": [mask_of(t)[head:] for t, head in pairs],
            "worth": [float(t.reward or 0) for t in chosen],
        }

    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=GROUPS * SIZE // MICRO,
        num_generations=SIZE,
        max_completion_length=length,
        max_steps=steps,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        beta=0.0,
        loss_type="dr_grpo",
        scale_rewards="none",
        epsilon=0.2,
        epsilon_high=0.28,
        max_grad_norm=1.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=make_model(shape),
        reward_funcs=[lambda completions, worth, **kwargs: worth],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": list(by_task)}),
        processing_class=tokenizer(shape["vocabulary"]),
        rollout_func=rollout,
        callbacks=[turns],
    )
    trainer.train()


def measure(shape: dict[str, int], *, scale: float, repeats: int) -> dict[str, Any]:
    """Warm-up and repeats, the sides in turns."""
    groups = make_groups(shape["vocabulary"], scale)
    flat = [t for group in groups for t in group]
    length = max(t.length for t in flat)
    turns = Turns(
        {
            "bare": bare(shape, groups, length),
            "ours": ours(shape, groups, length, "padded"),
            "ours, trees": ours(shape, groups, length, "tree"),
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        train(shape, groups, length, turns, 1 + repeats, folder)
    medians = {name: statistics.median(times[1:]) for name, times in turns.times.items()}
    best = min(medians["ours"], medians["ours, trees"])
    loss, norm = turns.made["ours"][0]
    others = [made[0] for name, made in turns.made.items() if name != "ours" and made]
    return {
        "ours": best,
        "peer": {name: medians[name] for name in WANTED},
        "ratio": {name: medians[name] / best for name in WANTED},
        "repeats": repeats,
        "loss_difference": max(abs(other[0] - loss) for other in others),
        "grad_norm_difference": max(abs(other[1] - norm) / norm for other in others),
        "medians": medians,
        "first": {name: made[0] for name, made in turns.made.items() if made},
        "tokens": sum(t.length for t in flat),
        "lengths": [min(t.length for t in flat), statistics.median(t.length for t in flat), length],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, shorter attempts, one repeat")
    parser.add_argument("--shape", choices=("small", "smol"), default="small")
    parser.add_argument("--scale", type=float, help="lengths of all texts; 0.5, for `smol` 0.1")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        if arguments.quick:
            result = measure(SHAPES["quick"], scale=0.3, repeats=1)
        else:
            scale = arguments.scale or (0.1 if arguments.shape == "smol" else 0.5)
            result = measure(SHAPES[arguments.shape], scale=scale, repeats=arguments.repeats)
    print(json.dumps(result))
    fast = all(result["ratio"][name] >= wanted for name, wanted in WANTED.items())
    same = result["loss_difference"] <= TOLERANCE and result["grad_norm_difference"] <= TOLERANCE
    return 0 if (fast or arguments.quick) and same else 1


if __name__ == "__main__":
    sys.exit(main())
