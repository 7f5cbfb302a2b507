"""Training by 2 and 4 processes with sharded weights (FSDP2 over gloo) against the same training in one.

Each process is a real one, joined as torchrun joins them; the first has the weights, and the others get their shards
from it. Weights are float32, embeddings tied, micro-batches many and ragged, packed into rows. Then 4 processes stop
half-way and 2 go on from their checkpoint, and 2 stop and 1 goes on.
Prints one JSON object as its last line:

- `processes`: those that were compared with one
- `max_rel_difference`: the largest relative difference of a loss or a gradient norm, over all steps. A policy's loss is
  a sum of terms of both signs, which is near 0 at some steps whatever the terms are; so its differences are relative to
  the mean size of the losses, and those of a norm to that norm
- `resharded_difference`: the same of the steps after a checkpoint that another number of processes wrote
- `max_loss_difference`: the largest absolute difference of a loss, resharded or not
- `export_difference`: of the exported weights, the largest absolute difference to those of one process that trains, as
  shards do, by the model's modules
- `pass_difference`: of the weights of one process after the same steps in float64, the largest absolute difference
  between the learner's own pass (`deepswe.training.forward_family`) and the modules, whose norms, which round to
  float32, are exchanged for such as do not
- `pass_difference_float32`: the same in float32, for which no bound is set

Losses and norms are compared with one process as it trains by itself, which goes by its own pass; weights with one that
goes by the modules. For Adam's first steps are the learning rate x g / (|g| + 1e-8): where a gradient is as small as
1e-8, a rounding of it moves the weight by a share of the learning rate, which is 1e-3 here, and the two passes round
otherwise. That they compute the same shows in float64.

Exits 0 only where each is at most 1e-5, and `pass_difference` at most 1e-12. `--quick` takes 4 steps in place of 20,
and no 4 processes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import rms_norm
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from deepswe.config import AlgorithmConfig, TrainingConfig
from deepswe.training.checkpoint import latest
from deepswe.training.checkpoint_export import export_model
from deepswe.training.checkpoint_sharded import load_sharded, save_sharded
from deepswe.training.learner import Learner
from deepswe.training.sharded import Shards, open_shards
from deepswe.types import Ending, Graded, TokenSpan, Trajectory

TOLERANCE, EXACT_TOLERANCE = 1e-5, 1e-12
VOCABULARY = 256
DEADLINE_S = 300.0


def make_model() -> Qwen3ForCausalLM:
    """The same one in every process."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    return Qwen3ForCausalLM(config)


def make_groups(step: int, *, groups: int = 4, size: int = 4) -> list[list[Trajectory]]:
    """Ragged two-turn trajectories of one step; their sampler is a little off the policy."""
    generator = torch.Generator().manual_seed(step)

    def span(sampled: bool) -> TokenSpan:
        count = int(torch.randint(3, 40, (1,), generator=generator))
        tokens = tuple(torch.randint(0, VOCABULARY, (count,), generator=generator).tolist())
        logprobs = (-5.5 + 0.3 * torch.randn(count, generator=generator)).tolist() if sampled else ()
        return TokenSpan(tokens, sampled, tuple(logprobs))

    def attempt(task: int, number: int) -> Trajectory:
        spans = tuple(span(sampled) for sampled in (False, True, False, True))
        reward = Graded(float(torch.rand(1, generator=generator)))
        return Trajectory(f"task-{task}", number, "train", step, spans, (), Ending.SUBMITTED, reward)

    return [[attempt(task, number) for number in range(size)] for task in range(groups)]


def make_learner(
    shards: Shards | None = None, *, own_pass: bool | None = None, dtype: torch.dtype = torch.float32
) -> Learner:
    """Of several processes only the first has the weights; the others get their shards from it."""
    training = TrainingConfig(learning_rate=1e-3, tokens_per_microbatch=256, packing="packed", grad_clip=0.5)
    leads = shards is None or shards.rank == 0
    with torch.device("cpu" if leads else "meta"):
        model = make_model().to(dtype)
    if dtype == torch.float64:
        widen_norms(model)
    full = dict(model.state_dict()) if shards is not None and leads else None
    algorithm = AlgorithmConfig(kl_coefficient=0.01)
    return Learner(model, training, algorithm, max_tokens=160, shards=shards, full=full, own_pass=own_pass)


def widen_norms(model: Qwen3ForCausalLM) -> None:
    """Norms in the model's own type, in place: those of `transformers` round to float32."""
    for module in model.modules():
        if isinstance(module, Qwen3RMSNorm):
            size, epsilon = module.weight.shape, module.variance_epsilon
            module.forward = partial(rms_norm, normalized_shape=size, weight=module.weight, eps=epsilon)


def work(directory: Path, *, first: int, last: int, save: bool) -> None:
    """One process: steps from `first` to `last`, from the checkpoint in the directory where `first` is not 0."""
    torch.set_num_threads(1)
    rows = []
    with open_shards(deadline_s=DEADLINE_S) as shards:
        learner = make_learner(shards)
        learner.set_start()
        if first:
            checkpoint = latest(directory)
            assert checkpoint is not None
            load_sharded(checkpoint, learner=learner, shards=shards)
        for step in range(first, last):
            row = learner.update(make_groups(step))
            rows.append([row["loss"], row["grad_norm"], row["entropy"], row["kl_start"]])
        if save:
            save_sharded(directory, last, learner=learner, shards=shards, state={}, keep=1)
        export_model(learner.model, None, directory / f"export-{shards.size}", writes=shards.rank == 0)
        if shards.rank == 0:
            (directory / f"rows-{shards.size}-{first}.json").write_text(json.dumps(rows))


def run(directory: Path, processes: int, *, first: int, last: int, save: bool = False) -> list[list[float]]:
    """The rows of so many processes; they are all ended where one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [str(directory), str(first), str(last), *(["--save"] if save else [])]
    command = [sys.executable, __file__, "--worker", *arguments]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    team = [
        subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)}, stdout=sys.stderr)
        for rank in range(processes)
    ]
    try:
        deadline = time.monotonic() + DEADLINE_S
        while any(process.poll() is None for process in team):
            if any(process.poll() for process in team) or time.monotonic() > deadline:
                raise SystemExit(f"a process of {processes} failed or is late")
            time.sleep(0.05)
    finally:
        for process in team:
            process.kill()
            process.wait()
    found: list[list[float]] = json.loads((directory / f"rows-{processes}-{first}.json").read_text())
    return found


def alone(learner: Learner, steps: int) -> list[list[float]]:
    """The rows of one process that knows nothing of shards."""
    rows = [learner.update(make_groups(step)) for step in range(steps)]
    return [[row["loss"], row["grad_norm"], row["entropy"], row["kl_start"]] for row in rows]


def pass_difference(one: Learner, other: Learner) -> float:
    """The largest absolute difference of a weight."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return max(float((weight - right).detach().abs().max()) for weight, right in pairs)


def difference(rows: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]], *, size: float) -> float:
    """The largest relative difference: of a loss to the `size` of the run's losses, of a gradient norm to that norm."""
    norms = max(abs(row[1] - right[1]) / right[1] for row, right in zip(rows, wanted, strict=True))
    return max(norms, loss_difference(rows, wanted) / size)


def loss_difference(rows: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> float:
    """The largest absolute difference of a loss."""
    return max(abs(row[0] - right[0]) for row, right in zip(rows, wanted, strict=True))


def export_difference(directory: Path, processes: int) -> float:
    """Of the exported weights to those of one process that goes by the modules; the names must be the same."""
    one = load_file(directory / "export-0" / "model.safetensors")
    many = load_file(directory / f"export-{processes}" / "model.safetensors")
    assert one.keys() == many.keys()
    return max(float((one[name] - many[name]).abs().max()) for name in one)


def measure(directory: Path, *, steps: int, teams: Sequence[int]) -> dict[str, Any]:
    """All figures."""
    own, modules = make_learner(), make_learner(own_pass=False)
    wanted = alone(own, steps)
    alone(modules, steps)
    export_model(modules.model, None, directory / "export-0")
    wide = [make_learner(own_pass=way, dtype=torch.float64) for way in (True, False)]
    for learner in wide:
        alone(learner, steps)
    whole = {team: run(directory, team, first=0, last=steps) for team in teams}
    exported = max(export_difference(directory, team) for team in teams)
    size = sum(abs(row[0]) for row in wanted) / steps
    half, resharded = steps // 2, {}
    for before, after in zip([*teams[::-1]], [*teams[::-1][1:], 1], strict=True):
        place = directory / f"from-{before}"
        place.mkdir()
        run(place, before, first=0, last=half, save=True)
        resharded[f"{before} to {after}"] = run(place, after, first=half, last=steps)
    apart = {team: difference(rows, wanted, size=size) for team, rows in whole.items()}
    after_half = {name: difference(rows, wanted[half:], size=size) for name, rows in resharded.items()}
    return {
        "processes": list(teams),
        "max_rel_difference": max(apart.values()),
        "resharded_difference": max(after_half.values()),
        "max_loss_difference": max(
            *(loss_difference(rows, wanted) for rows in whole.values()),
            *(loss_difference(rows, wanted[half:]) for rows in resharded.values()),
        ),
        "export_difference": exported,
        "pass_difference": pass_difference(*wide),
        "pass_difference_float32": pass_difference(own, modules),
        "steps": steps,
        "by_processes": apart,
        "by_resharding": after_half,
        "losses": [wanted[0][0], wanted[-1][0]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 steps, and 2 processes only")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        directory, first, last = arguments.worker
        work(Path(directory), first=int(first), last=int(last), save=arguments.save)
        return 0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sharded-") as scratch:
        result = measure(Path(scratch), steps=4 if arguments.quick else 20, teams=(2,) if arguments.quick else (2, 4))
    print(json.dumps(result))
    names = ("max_rel_difference", "resharded_difference", "export_difference")
    held = all(result[name] <= TOLERANCE for name in names) and result["pass_difference"] <= EXACT_TOLERANCE
    return 0 if held else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    sys.exit(main())
