"""Shared prefixes computed once (`training.packing = "tree"`) against every sequence whole (`"padded"`).

Two batches on layers of Qwen3-0.6B's shape, the smallest of its family: 8 attempts at one task with a prompt of 2,048
tokens and 2,048 of their own; and 2 attempts of 20 turns whose thinking is stripped from the history, so that each
turn's sequence begins with all turns before it. On both sides the first layer of a model maps each different token once
before its attention, and the last computes little but what predicts; so an update is timed with two layers and with
three, interleaved, and each further layer takes as long as the third. Prints one JSON object as its last line:

- `ours`, `peer`: seconds of CPU of the two batches with as many layers as the model has, on one thread, out of the
  medians with two and three; `ratio`: of each; `repeats`; `layers`
- `measured`: the medians of each side with two and three layers
- `max_gradient_difference`: the largest, relative to the largest gradient, in float32
- `max_gradient_difference_float64`: absolute, on a smaller batch in float64

The narrower a model, the more of its time goes into attention, of which less is shared than of the rest: `--shape
narrow` has width 512. Exits 0 only where the ratios are at least 1.5 and 4, and the differences at most
1e-5 and 1e-10. `--quick` has shorter texts and one repeat, and holds the differences alone to their bounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import Qwen3Config, Qwen3ForCausalLM

from deepswe.algorithms.packing import TrainingSample, collate, make_samples, split_by_tokens
from deepswe.algorithms.prefix import collate_tree
from deepswe.training.forward import TokenScorer
from deepswe.training.forward_rows import attend_along
from deepswe.types import Ending, Graded, TokenSpan, Trajectory

VOCABULARY = 2048
WANTED = {"group": 1.5, "stripped": 4.0}
MEASURED = (2, 3)
"""Layers: the first and the last do less than those between them."""

SHAPES = {
    "qwen3": {"width": 1024, "inner": 3072, "layers": 28, "heads": 16, "kv": 8, "size": 128},
    "narrow": {"width": 512, "inner": 1536, "layers": 28, "heads": 8, "kv": 4, "size": 64},
    "quick": {"width": 128, "inner": 384, "layers": 28, "heads": 2, "kv": 1, "size": 64},
    "exact": {"width": 64, "inner": 192, "layers": 2, "heads": 1, "kv": 1, "size": 64},
}


def make_model(shape: dict[str, int], *, layers: int, wide: bool = False) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=shape["width"],
        intermediate_size=shape["inner"],
        num_hidden_layers=layers,
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=shape["size"],
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    model = Qwen3ForCausalLM(config).eval()
    return exact(model.double()) if wide else model


def exact(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Norms in the model's own type: those of `transformers` round to float32, in another order for a shared prefix."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            weight = module.weight
            module.forward = partial(rms_norm, normalized_shape=weight.shape, weight=weight, eps=1e-6)
    return model


class Draw:
    """Tokens out of one generator."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCABULARY, (count,), generator=self._generator).tolist())


def said(tokens: tuple[int, ...]) -> TokenSpan:
    return TokenSpan(tokens, True, (-7.0,) * len(tokens))


def samples_of(trajectories: Sequence[Trajectory], turns: int) -> list[TrainingSample]:
    return [sample for t in trajectories for sample in make_samples(t, [1.0] * turns)]


def group(size: int, prompt: int, own: int) -> list[TrainingSample]:
    """Attempts that share their prompt."""
    draw = Draw()
    opening = TokenSpan(draw(prompt), False)
    attempts = [(opening, said(draw(own))) for _ in range(size)]
    made = [Trajectory("t", n, "train", 0, s, (), Ending.SUBMITTED, Graded(1.0)) for n, s in enumerate(attempts)]
    return samples_of(made, 1)


def stripped(size: int, prompt: int, turns: int, thought: int, answer: int, seen: int) -> list[TrainingSample]:
    """Attempts whose later turns see the answers and observations of earlier ones, but not their thinking."""
    draw = Draw()
    opening = draw(prompt)
    made = []
    for number in range(size):
        spans: list[TokenSpan] = []
        starts: list[int] = []
        history = opening
        for turn in range(turns):
            if turn:
                starts.append(len(spans))
            reply = draw(answer)
            spans += [TokenSpan(history, False), said((*draw(thought), *reply))]
            history = (*history, *reply, *draw(seen))
        grade = Graded(1.0)
        made.append(
            Trajectory("t", number, "train", 0, tuple(spans), (), Ending.SUBMITTED, grade, starts=tuple(starts))
        )
    return samples_of(made, turns)


def trained(model: Qwen3ForCausalLM, samples: Sequence[TrainingSample], *, tree: bool, budget: int) -> list[Tensor]:
    """The gradients of one pass over all samples, linear ones in micro-batches of like lengths."""
    model.zero_grad(set_to_none=True)
    scorer = TokenScorer(model, composed=True)
    if tree:
        batches = [collate_tree(samples)]
    else:
        split = split_by_tokens([sample.length for sample in samples], budget)
        batches = [collate([samples[index] for index in indices]) for indices in split]
    for batch in batches:
        logp_N = scorer(batch).logp_N
        (-logp_N * batch.advantage_N.to(logp_N.dtype)).sum().backward()  # type: ignore[no-untyped-call]
    return [p.grad for p in model.parameters() if p.grad is not None]


def compare(samples: Sequence[TrainingSample], *, shape: str, repeats: int) -> dict[str, Any]:
    """Medians of interleaved passes, the times of all layers out of them, and the difference of the gradients."""
    models = {layers: make_model(SHAPES[shape], layers=layers) for layers in MEASURED}
    for model in models.values():
        attend_along(model)
    times: dict[tuple[bool, int], list[float]] = {(tree, layers): [] for layers in models for tree in (True, False)}
    gradients: dict[bool, list[Tensor]] = {}
    for _ in range(repeats):
        for (tree, layers), taken in times.items():
            begun = time.process_time()
            gradients[tree] = trained(models[layers], samples, tree=tree, budget=8192)
            taken.append(time.process_time() - begun)
    pairs = list(zip(gradients[True], gradients[False], strict=True))
    largest = max(float(linear.abs().max()) for _, linear in pairs)
    medians = {tree: [statistics.median(times[tree, layers]) for layers in models] for tree in (True, False)}
    further = SHAPES[shape]["layers"] - MEASURED[0]
    ours, peer = (two + further * (three - two) for two, three in medians.values())
    return {
        "ours": ours,
        "peer": peer,
        "ratio": peer / ours,
        "measured": {"ours": medians[True], "peer": medians[False]},
        "difference": max(float((tree - linear).abs().max()) for tree, linear in pairs) / largest,
        "tokens": float(sum(sample.length for sample in samples)),
        "nodes": float(collate_tree(samples).tokens_BT.numel()),
    }


def exact_difference() -> float:
    """The largest difference of any gradient in float64."""
    model = make_model(SHAPES["exact"], layers=SHAPES["exact"]["layers"], wide=True)
    attend_along(model)
    samples = [*group(3, 40, 30), *stripped(2, 20, 5, 9, 6, 7)]
    pairs = zip(*(trained(model, samples, tree=tree, budget=300) for tree in (True, False)), strict=True)
    return max(float((tree - linear).abs().max()) for tree, linear in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter texts, one repeat")
    parser.add_argument("--shape", choices=("qwen3", "narrow"), default="qwen3")
    parser.add_argument("--batches", nargs="+", choices=tuple(WANTED), default=list(WANTED))
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    quick = arguments.quick
    torch.set_num_threads(1)
    shape, repeats = ("quick", 1) if quick else (arguments.shape, arguments.repeats)
    scale = 8 if quick else 1
    batches = {
        "group": group(8, 2048 // scale, 2048 // scale),
        "stripped": stripped(2, 512 // scale, 20, 192 // scale, 64 // scale, 128 // scale),
    }
    found = {name: compare(batches[name], shape=shape, repeats=repeats) for name in arguments.batches}
    result = {
        "ours": {name: made["ours"] for name, made in found.items()},
        "peer": {name: made["peer"] for name, made in found.items()},
        "ratio": {name: made["ratio"] for name, made in found.items()},
        "measured": {name: made["measured"] for name, made in found.items()},
        "shape": shape,
        "layers": SHAPES[shape]["layers"],
        "repeats": repeats,
        "max_gradient_difference": max(made["difference"] for made in found.values()),
        "max_gradient_difference_float64": exact_difference(),
        "tokens": {name: made["tokens"] for name, made in found.items()},
        "nodes": {name: made["nodes"] for name, made in found.items()},
    }
    print(json.dumps(result))
    fast = quick or all(made["ratio"] >= WANTED[name] for name, made in found.items())
    same = result["max_gradient_difference"] <= 1e-5 and result["max_gradient_difference_float64"] <= 1e-10
    return 0 if fast and same else 1


if __name__ == "__main__":
    sys.exit(main())
