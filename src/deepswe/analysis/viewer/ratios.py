"""Ratios of a checkpoint to the samplers of a run: for each sampled token, how much likelier it is now."""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepswe.analysis.record import RunRecord
from deepswe.analysis.viewer.data import Ratios
from deepswe.errors import RunError, boundary
from deepswe.optional import optional_module
from deepswe.policy.checkpoints import EXPORT, damage
from deepswe.shapes import misfit
from deepswe.types import Trajectory


def ratios_of(run: RunRecord) -> Ratios:
    """What computes the ratios with the newest checkpoint of a run: p(token | checkpoint) / p(token | its sampler).

    One forward pass an attempt; small models only, on the CPU. The temperature is that of training, or of evaluation,
    as the recipe has it.

    Raises:
        RunError: the run has no checkpoint with a model, or it cannot be loaded.
    """
    found = sorted(run.directory.glob("checkpoints/*/step-*/model/config.json"), key=lambda path: path.parts[-3])
    if not found:
        raise RunError(f"{run.directory} has no checkpoint with a model, so there are no ratios to it; leave them out")
    if wrong := damage(found[-1].parents[1], EXPORT):
        raise RunError(f"{found[-1].parents[1]} is damaged: {wrong}; remove it to take an older one")
    torch = optional_module("torch", "train", "compute ratios")
    transformers = optional_module("transformers", "train", "compute ratios")
    with boundary("analysis.ratios", RunError):
        model = transformers.AutoModelForCausalLM.from_pretrained(found[-1].parent, dtype=torch.float32).eval()
    temperatures = {True: _temperature(run, "rollout"), False: _temperature(run, "evaluation")}

    def logprobs(tokens: Sequence[int], temperature: float) -> list[float]:
        """log p of each token but the first, given those before it."""
        with boundary("analysis.ratios", RunError), torch.inference_mode():
            ids = torch.tensor([tokens])
            scores = torch.log_softmax(model(ids).logits[0, :-1].float() / temperature, dim=-1)
            values: list[float] = scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return values

    def ratios(trajectory: Trajectory) -> list[list[float]]:
        temperature = temperatures[trajectory.phase.startswith("train")]
        rows: list[list[float]] = []
        for spans in trajectory.sequences:
            tokens = [token for span in spans for token in span.tokens]
            now = [0.0, *logprobs(tokens, temperature)] if len(tokens) > 1 else [0.0] * len(tokens)
            at = 0
            for span in spans:
                here = now[at : at + len(span.tokens)]
                at += len(span.tokens)
                rows.append([math.exp(min(50.0, new - old)) for new, old in zip(here, span.logprobs, strict=False)])
        return rows

    return ratios


def _temperature(run: RunRecord, section: str) -> float:
    given = run.recipe.get(section, {}).get("temperature", 1.0)
    if wrong := misfit(given, float, f"{section}.temperature"):
        raise RunError(f"the recipe of {run.directory} has no temperature of its attempts: {wrong}; restore it")
    return float(given)
