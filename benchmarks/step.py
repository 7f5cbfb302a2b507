"""A whole step of several turns on FrozenLake, 64 attempts and one update: ours against TRL's GRPOTrainer.

Both have the same model from scratch, the same maps, the same rendering and the same limits, and train on every sampled
token of all 64 attempts. Ours is a step of `deepswe train`: scheduler, engine, store, learner. TRL's environment hook,
`rollout_func`, plays the maps with `generate`: at each turn all attempts that go on are one batch, padded on the left.
The two take turns, one step each. Two ways to play: `words`, the recipe's relational text with one token a turn, and
`talk`, the map as text with up to 24 tokens a turn; up to ten turns in both. Prints one JSON object as its last line:

- `ours`, `peer`: median seconds of CPU of a step, on one thread; `ratio`; `repeats`
- `rollout_share`: share of ours that is rollout; `sampled`: tokens sampled a step, of each side

Exits 0 only where both ratios are at least 3. Needs the extra `compare`. `--quick`: `words` alone, one repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from deepswe.config import Recipe, load_recipe
from deepswe.envs.frozenlake import FrozenLakeEnv, FrozenLakeSuite, LakeTask
from deepswe.envs.suites import OpenSuite, open_suite
from deepswe.own_thread import OwnThread
from deepswe.policy.render import Renderer
from deepswe.progress import Silent
from deepswe.rollout.group import form_groups
from deepswe.rollout.scheduler import Batch
from deepswe.rollout.store import TrajectoryStore
from deepswe.session.parts import Parts
from deepswe.session.sharded import learner_options
from deepswe.training.learner import Learner

RECIPE = Path(__file__).parents[1] / "recipes" / "frozenlake.toml"
TASKS, SIZE, MICRO, WANTED = 4, 16, 16, 3.0
SHARED = (
    *(f"rollout.tasks_per_step={TASKS}", f"rollout.group_size={SIZE}", "rollout.max_tokens=1024"),
    *("algorithm.drop_uniform_groups=false", "algorithm.entropy_coefficient=0.0", "algorithm.kl_start_every=0"),
    *("training.learning_rate=1e-6", "training.weight_decay=0.0", "tasks.no_move='explain'"),
)
WAYS = {"words": (), "talk": ("tasks.observation='grid'", "rollout.max_turn_tokens=24")}


class Ours:
    """Steps of `deepswe train`, as its loop takes them."""

    def __init__(self, recipe: Recipe, opened: OpenSuite, folder: Path) -> None:
        self._recipe = recipe
        self._parts = Parts(recipe, opened, TrajectoryStore(folder), Silent())
        torch.set_num_threads(1)
        loaded = self._parts.load_model()
        self.model, self.renderer = loaded.model, self._parts.renderer(loaded)
        self._learner = Learner(self.model, **learner_options(recipe))
        self._engine = self._parts.engine(loaded)
        self._thread = OwnThread("learner")
        self.sampled: list[int] = []
        self.rollouts: list[float] = []

    def step(self, step: int, tasks: tuple[LakeTask, ...]) -> None:
        """One step."""
        asyncio.run(self._step(step, tasks))

    async def _step(self, step: int, tasks: tuple[LakeTask, ...]) -> None:
        begun = time.process_time()
        rollout = self._recipe.rollout
        batch = Batch("train", step, tasks, rollout.group_size, rollout.temperature, frozenset())
        scheduler = self._parts.scheduler(self._engine, self.renderer)
        groups = form_groups(await self._parts.collect(scheduler, batch, ""))
        self.rollouts.append(time.process_time() - begun)
        async with self._engine.updating():
            row = await self._thread(self._learner.update, [group.trajectories for group in groups])
            await self._engine.publish(self._learner.version)
        sampled = sum(t.sampled_length for group in groups for t in group.trajectories)
        assert row["trained_tokens"] == sampled
        self.sampled.append(sampled)

    def close(self) -> None:
        """End the threads."""
        self._engine.close()
        self._thread.close()


class Attempt:
    """One attempt on TRL's side: what the trainer is given of it."""

    def __init__(self, env: FrozenLakeEnv, opening: tuple[int, ...]) -> None:
        self.env = env
        self.prompt, self.rest, self.mask = list(opening), list[int](), list[int]()
        self.over = False

    @property
    def stream(self) -> list[int]:
        """All tokens so far."""
        return [*self.prompt, *self.rest]

    def add(self, tokens: tuple[int, ...], sampled: int) -> None:
        """More tokens, sampled (1) or observed (0)."""
        self.rest += tokens
        self.mask += [sampled] * len(tokens)


class Hook:
    """TRL's `rollout_func`: prompts are the ids of maps, each as often as it is to be attempted."""

    def __init__(self, recipe: Recipe, suite: FrozenLakeSuite, renderer: Renderer) -> None:
        self._recipe, self._suite, self._renderer = recipe, suite, renderer
        self._tasks = {task.id: task for task in suite.split("train")[:1000]}
        self._stops = sorted(renderer.stop_tokens)
        self._settings = GenerationConfig(
            max_new_tokens=recipe.rollout.max_turn_tokens,
            do_sample=True,
            temperature=recipe.rollout.temperature,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            eos_token_id=self._stops,
        )
        self.sampled: list[int] = []

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        return asyncio.run(self._play(prompts, trainer.model))

    async def _play(self, prompts: list[str], model: Any) -> dict[str, list[Any]]:
        attempts = []
        for number, prompt in enumerate(prompts):
            env = self._suite.open(self._tasks[prompt], seed=number)
            attempts.append(Attempt(env, self._renderer.opening(await env.start())))
        for turn in range(self._recipe.rollout.max_steps):
            live = [attempt for attempt in attempts if not attempt.over]
            if not live:
                break
            for attempt, tokens in zip(live, self._generate(model, live), strict=True):
                await self._act(attempt, tokens, last=turn == self._recipe.rollout.max_steps - 1)
        verdicts: list[Any] = [(await attempt.env.finish()).grade for attempt in attempts]
        self.sampled.append(sum(sum(attempt.mask) for attempt in attempts))
        return {
            "prompt_ids": [attempt.prompt for attempt in attempts],
            "completion_ids": [attempt.rest for attempt in attempts],
            "logprobs": [[0.0] * len(attempt.rest) for attempt in attempts],
            "env_mask": [attempt.mask for attempt in attempts],
            "worth": [float(verdict.reward) for verdict in verdicts],
        }

    async def _act(self, attempt: Attempt, tokens: list[int], *, last: bool) -> None:
        attempt.add(tuple(tokens), 1)
        outcome = await attempt.env.act(self._renderer.decode(tokens), timeout_s=10.0)
        attempt.over = outcome.done or last
        if not attempt.over:
            cut = tokens[-1] not in self._stops
            attempt.add(self._renderer.observation(outcome.observation, truncated=cut), 0)
            attempt.over = len(attempt.stream) >= self._recipe.rollout.max_tokens

    @torch.inference_mode()
    def _generate(self, model: Any, live: list[Attempt]) -> list[list[int]]:
        model.eval()
        streams = [attempt.stream for attempt in live]
        wide = max(map(len, streams))
        made = model.generate(
            torch.tensor([[0] * (wide - len(stream)) + stream for stream in streams]),
            attention_mask=torch.tensor([[0] * (wide - len(stream)) + [1] * len(stream) for stream in streams]),
            generation_config=self._settings,
        )[:, wide:].tolist()
        model.train()
        return [self._until_stop(row) for row in made]

    def _until_stop(self, row: list[int]) -> list[int]:
        ends = [place for place, token in enumerate(row) if token in self._stops]
        return row[: ends[0] + 1] if ends else row


class Turns(TrainerCallback):
    """After each step of TRL's, ours takes one on the same maps; the times are kept."""

    def __init__(self, step: Callable[[int], None]) -> None:
        self._step = step
        self.times: dict[str, list[float]] = {"ours": [], "peer": []}
        self._begun = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        between = time.process_time()
        self.times["peer"].append(between - self._begun)
        self._step(len(self.times["ours"]))
        self.times["ours"].append(time.process_time() - between)
        took = {side: round(times[-1], 2) for side, times in self.times.items()}
        print(f"step {len(self.times['ours'])}: seconds of CPU {took}", file=sys.stderr, flush=True)


async def measure(way: str, repeats: int, folder: str) -> dict[str, Any]:
    """A warm-up and the repeats of one way to play."""
    recipe = load_recipe(RECIPE, [*SHARED, *WAYS[way]])
    async with open_suite(recipe, Silent()) as opened:
        return await asyncio.to_thread(trained, recipe, opened, 1 + repeats, Path(folder) / way)


def trained(recipe: Recipe, opened: OpenSuite, steps: int, folder: Path) -> dict[str, Any]:
    suite: Any = opened.suite
    tasks = tuple(suite.split("train")[: TASKS * steps])
    side = Ours(recipe, opened, folder / "ours")
    hook = Hook(recipe, suite, side.renderer)
    turns = Turns(lambda step: side.step(step, tasks[TASKS * step : TASKS * (step + 1)]))
    parts = Parts(recipe, opened, TrajectoryStore(folder / "unused"), Silent())
    torch.set_num_threads(1)
    loaded = parts.load_model()
    trainer = GRPOTrainer(
        model=loaded.model,
        reward_funcs=[lambda completions, worth, **kwargs: worth],
        args=settings(recipe, steps, str(folder / "trl")),
        train_dataset=Dataset.from_dict({"prompt": [task.id for task in tasks]}),
        processing_class=loaded.tokenizer,
        rollout_func=hook,
        callbacks=[turns],
    )
    trainer.train()
    side.close()
    medians = {name: statistics.median(times[1:]) for name, times in turns.times.items()}
    return {
        **medians,
        "ratio": medians["peer"] / medians["ours"],
        "rollout_share": statistics.median(side.rollouts[1:]) / medians["ours"],
        "sampled": {"ours": statistics.mean(side.sampled[1:]), "peer": statistics.mean(hook.sampled[1:])},
    }


def settings(recipe: Recipe, steps: int, folder: str) -> GRPOConfig:
    """TRL's, for the same update."""
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=TASKS * SIZE // MICRO,
        num_generations=SIZE,
        max_completion_length=recipe.rollout.max_tokens,
        max_steps=steps,
        learning_rate=recipe.training.learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="dr_grpo",
        scale_rewards="none",
        epsilon=recipe.algorithm.clip_low,
        epsilon_high=recipe.algorithm.clip_high,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        shuffle_dataset=False,
        logging_steps=100,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="`words` alone, one repeat")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    ways, repeats = (["words"], 1) if arguments.quick else (list(WAYS), arguments.repeats)
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        found = {way: asyncio.run(measure(way, repeats, folder)) for way in ways}
    keys = ("ours", "peer", "ratio", "rollout_share", "sampled")
    result = {key: {way: made[key] for way, made in found.items()} for key in keys}
    print(json.dumps({**result, "repeats": repeats}))
    return 0 if all(made["ratio"] >= WANTED for made in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
