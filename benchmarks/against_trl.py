"""Do our losses and advantages agree with those of TRL, an independent implementation, on the same tensors?

For each case the trainer of TRL computes its loss on log-probs that we draw (its forward pass is replaced by them), and
our functions compute theirs. Compared are the loss and its gradient by the log-probs. The advantages of RLOO and GRPO
come out of TRL's own scoring of given rewards. Prints one JSON object as its last line:

    losses compared        the cases
    max_abs_difference     the largest difference of any loss, gradient or advantage

Exits 0 only where every difference is at most 1e-5. Needs the extra `compare`. `--quick` draws fewer tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from deepswe.algorithms.advantages import group_mean, group_mean_std, leave_one_out
from deepswe.algorithms.losses import DENOMINATORS, clipped_policy_loss, importance_weights, kl_penalty

LOW, HIGH, BETA, LENGTH, CAP = 0.2, 0.28, 0.04, 24, 1.2
TOLERANCE = 1e-5
GRPO_FLOOR = 1e-4
"""TRL adds this to the deviation, we add 1e-6; the comparison of group_mean_std allows for it."""

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "normalisation": "sequence_mean"},
    "bnpo": {"loss_type": "bnpo", "normalisation": "token_mean"},
    "dapo": {"loss_type": "dapo", "normalisation": "token_mean"},
    "dr_grpo": {"loss_type": "dr_grpo", "normalisation": "constant"},
    "gspo": {"loss_type": "grpo", "normalisation": "sequence_mean", "level": "sequence_mean"},
    "grpo with KL": {"loss_type": "grpo", "normalisation": "sequence_mean", "beta": BETA},
    **{
        f"dapo, {kind}": {"loss_type": "dapo", "normalisation": "token_mean", "importance": kind}
        for kind in ("token_truncated", "token_masked", "sequence_truncated", "sequence_masked")
    },
    "rloo": {"loss_type": "rloo", "normalisation": "sequence_mean", "level": "sequence"},
}
TRL_NAMES = {"truncated": "truncate", "masked": "mask"}


class Drawn:
    """A batch of B completions of up to T tokens: log-probs under four policies, a mask, advantages."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.logp_BT = -draw(6, 9).abs()
        self.old_BT = self.logp_BT + draw(6, 9, scale=0.15)
        self.start_BT = self.logp_BT + draw(6, 9, scale=0.3)
        self.sampler_BT = self.old_BT + draw(6, 9, scale=0.1)
        lengths = torch.randint(2, 10, (6,), generator=generator)
        self.mask_BT = torch.arange(9)[None] < lengths[:, None]
        self.advantage_B = draw(6)


def ours(drawn: Drawn, case: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Our loss and its gradient by the log-probs (B, T)."""
    logp_BT = drawn.logp_BT.clone().requires_grad_()
    mask = drawn.mask_BT
    row_N = mask.nonzero()[:, 0]
    per_row = DENOMINATORS[case["normalisation"]](mask.sum(1).tolist(), trajectories=len(mask), length=LENGTH)
    denominator_N = torch.tensor(per_row, dtype=torch.float64)[row_N]
    old_N, logp_N = drawn.old_BT[mask], logp_BT[mask]
    weight_N = importance_weights(
        old_N, drawn.sampler_BT[mask], row_N, kind=case.get("importance", "none"), cap=CAP, floor=0.0
    )
    loss = clipped_policy_loss(
        logp_N,
        old_N,
        drawn.advantage_B[row_N],
        denominator_N,
        clip_low=LOW,
        clip_high=HIGH,
        row_N=row_N,
        level=case.get("level", "token"),
        weight_N=weight_N,
    ).loss
    if case.get("beta"):
        loss = loss + case["beta"] * (kl_penalty(logp_N, drawn.start_BT[mask], kind="k3") / denominator_N).sum()
    loss.backward()
    assert logp_BT.grad is not None
    return float(loss.detach()), logp_BT.grad


def bare(trainer: type, logp_BT: torch.Tensor, **attributes: Any) -> Any:
    """A trainer without a model: it is handed these log-probs where it would run one."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        return logp_BT, torch.zeros_like(logp_BT), None

    made = object.__new__(type("Bare", (trainer,), {"_get_per_token_logps_and_entropies": forward}))
    accelerator = SimpleNamespace(
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        reduce=lambda value, reduction: value,
        num_processes=1,
        process_index=0,
        sync_gradients=True,
        device=torch.device("cpu"),
    )
    common = {
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "accelerator": accelerator,
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "beta": 0.0,
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "args": SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            per_device_train_batch_size=64,
            gradient_checkpointing_kwargs=None,
        ),
    }
    made.__dict__.update(common | attributes)
    return made


def theirs(drawn: Drawn, case: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """TRL's loss and its gradient by the log-probs (B, T)."""
    logp_BT = drawn.logp_BT.clone().requires_grad_()
    mask_BT = drawn.mask_BT.long()
    inputs: dict[str, Any] = {
        "prompt_ids": torch.zeros(6, 1, dtype=torch.long),
        "prompt_mask": torch.ones(6, 1, dtype=torch.long),
        "completion_ids": torch.zeros(6, 9, dtype=torch.long),
        "completion_mask": mask_BT,
        "advantages": drawn.advantage_B,
        "old_per_token_logps": drawn.old_BT,
        "old_logps": (drawn.old_BT * mask_BT).sum(1),
        "ref_per_token_logps": drawn.start_BT,
        "num_items_in_batch": mask_BT.sum(),
    }
    if case["loss_type"] == "rloo":
        loss = bare(RLOOTrainer, logp_BT)._compute_loss(None, inputs)
    else:
        importance = case.get("importance", "none")
        if importance != "none":
            inputs["importance_sampling_ratio"] = _trl_weights(drawn, importance)
        trainer = bare(
            GRPOTrainer,
            logp_BT,
            loss_type=case["loss_type"],
            importance_sampling_level="sequence" if case.get("level") == "sequence_mean" else "token",
            beta=case.get("beta", 0.0),
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_vllm=importance != "none",
            vllm_importance_sampling_correction=True,
            max_completion_length=LENGTH,
            _entropy_bonus_enabled=False,
        )
        loss = trainer._compute_loss(None, inputs)
    loss.backward()
    assert logp_BT.grad is not None
    return float(loss.detach()), logp_BT.grad


def _trl_weights(drawn: Drawn, kind: str) -> torch.Tensor:
    """The weights as TRL's trainer defines them, written out here: it computes them amid its sampling."""
    level, _, form = kind.partition("_")
    difference = (drawn.old_BT - drawn.sampler_BT) * drawn.mask_BT
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    return ratio.clamp(max=CAP) if form == "truncated" else ratio.masked_fill(ratio > CAP, 0.0)


def trl_advantages(trainer: type, rewards_BG: torch.Tensor, **attributes: Any) -> torch.Tensor:
    """The advantages that a trainer of TRL gives to these rewards, (B, G)."""
    groups, size = rewards_BG.shape
    count = groups * size
    rollout: dict[type, Callable[[list[Any]], tuple[Any, ...]]] = {
        RLOOTrainer: lambda prompts: ([[1]] * count, [[2, 3]] * count, ["x"] * count),
        GRPOTrainer: lambda prompts: ([[1]] * count, [[2, 3]] * count, None, ["x"] * count, None, {}, None, None),
    }
    made = bare(
        trainer,
        torch.zeros(count, 2, dtype=torch.float64),
        _generate=rollout[trainer],
        _calculate_rewards=lambda *args: rewards_BG.reshape(-1, 1),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        num_generations=size,
        num_iterations=1,
        reward_weights=torch.ones(1, dtype=torch.float64),
        reward_clip_range=None,
        reward_func_names=["reward"],
        reward_funcs=[None],
        normalize_advantages=False,
        multi_objective_aggregation="sum_then_normalize",
        environment_factories=None,
        environments=None,
        tools=None,
        use_vllm=False,
        log_multimodal=False,
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs=defaultdict(list),
        _pending_metrics=defaultdict(list),
        processing_class=SimpleNamespace(batch_decode=lambda *args, **kwargs: ["x"] * count),
        **attributes,
    )
    inputs = [{"prompt": "p"} for _ in range(count)]
    found: torch.Tensor = made._generate_and_score_completions(inputs)["advantages"]
    return found.reshape(groups, size)


def advantage_differences(seed: int) -> dict[str, float]:
    """Largest difference of each advantage that both have."""
    generator = torch.Generator().manual_seed(seed)
    rewards_BG = torch.rand(4, 5, generator=generator, dtype=torch.float64)
    deviation_B1 = rewards_BG.std(1, keepdim=True)
    scaled_BG = trl_advantages(GRPOTrainer, rewards_BG, scale_rewards="group") * (deviation_B1 + GRPO_FLOOR)
    pairs = {
        "leave_one_out": (leave_one_out, trl_advantages(RLOOTrainer, rewards_BG)),
        "group_mean": (group_mean, trl_advantages(GRPOTrainer, rewards_BG, scale_rewards="none")),
        "group_mean_std": (group_mean_std, scaled_BG / (deviation_B1 + 1e-6)),
    }
    differences = {}
    for name, (function, wanted_BG) in pairs.items():
        made_BG = torch.tensor([function(row) for row in rewards_BG.tolist()], dtype=torch.float64)
        differences[f"advantage {name}"] = float((made_BG - wanted_BG).abs().max())
    return differences


def differences(draws: int) -> dict[str, float]:
    """Largest difference of loss, gradient or advantage, by case."""
    largest: dict[str, float] = defaultdict(float)
    for seed in range(draws):
        drawn = Drawn(seed)
        for name, case in CASES.items():
            (loss, gradient), (wanted, wanted_gradient) = ours(drawn, case), theirs(drawn, case)
            apart = max(abs(loss - wanted), float((gradient - wanted_gradient).abs().max()))
            largest[name] = max(largest[name], apart)
        for name, apart in advantage_differences(seed).items():
            largest[name] = max(largest[name], apart)
    return dict(largest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three draws instead of fifty")
    arguments = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):
        found = differences(3 if arguments.quick else 50)
    worst = max(found.values())
    print(json.dumps({"losses compared": list(found), "max_abs_difference": worst, "by_case": found}))
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
