"""Memory of the loss at Qwen3's vocabulary: from hidden states to log-probs of the tokens and back, against autograd's.

The naive loss makes the logits of all tokens, their log-softmax and its gradient. Ours makes them a few rows at a time.
Each runs in a process of its own; what counts is the peak of its anonymous memory over what stood before (hidden
states, the output matrix and the gradients of both). Prints one JSON object as its last line:

- `naive_mib`, `ours_mib`, `ratio`: at the same number of tokens
- `max_abs_difference`: the largest of any log-prob or gradient
- `ours_by_tokens_mib`: ours at more tokens, which need no more logits

Exits 0 only where the ratio is at least 8 and the difference at most 1e-5. `--quick` takes fewer tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import torch
from peak_memory import PeakMemory
from torch import Tensor, nn

from deepswe.training.forward import LOGITS_PER_CHUNK
from deepswe.training.forward_head import score_by_head

VOCABULARY, WIDTH = 151_936, 64
RATIO, TOLERANCE = 8.0, 1e-5


def drawn(tokens: int) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """(head, hidden states, targets, gradient of the log-probs)."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    with torch.no_grad():
        head.weight.normal_(generator=generator).mul_(0.1)
    hidden_NH = torch.randn(tokens, WIDTH, generator=generator).requires_grad_()
    targets_N = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    return head, hidden_NH, targets_N, torch.randn(tokens, generator=generator) / tokens


def naive(head: nn.Linear, hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
    return head(hidden_NH).log_softmax(-1).gather(1, targets_N[:, None])[:, 0]


def ours(head: nn.Linear, hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
    return score_by_head(head, hidden_NH, targets_N, temperature=1.0, rows=LOGITS_PER_CHUNK // VOCABULARY)[0]


SIDES = {"naive": naive, "ours": ours}


def measure(side: str, tokens: int) -> dict[str, Any]:
    """The peak of one side over what stands before; in a process of its own."""
    torch.set_num_threads(1)
    head, hidden_NH, targets_N, upstream_N = drawn(tokens)
    head.weight.grad, hidden_NH.grad = torch.ones_like(head.weight), torch.ones_like(hidden_NH)
    head.weight.grad.zero_()
    hidden_NH.grad.zero_()
    with PeakMemory() as peak:
        SIDES[side](head, hidden_NH, targets_N).backward(upstream_N)
    return {"mib": peak.mib}


def difference(tokens: int) -> float:
    """The largest difference of log-probs and gradients, at a number of tokens that makes several chunks."""
    head, hidden_NH, targets_N, upstream_N = drawn(tokens)
    found = []
    for score in SIDES.values():
        head.weight.grad = hidden_NH.grad = None
        logp_N = score(head, hidden_NH, targets_N)
        logp_N.backward(upstream_N)
        assert hidden_NH.grad is not None
        assert head.weight.grad is not None
        found.append((logp_N.detach(), hidden_NH.grad.clone(), head.weight.grad.clone()))
    return max(float((left - right).abs().max()) for left, right in zip(*found, strict=True))


def spawned(side: str, tokens: int) -> float:
    command = [sys.executable, __file__, "--one", side, str(tokens)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(done.stdout)["mib"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,048 tokens instead of 6,144, and none beyond")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one[0], int(arguments.one[1]))))
        return 0
    tokens, more = (2048, []) if arguments.quick else (6144, [16_384, 32_768])
    found = {side: spawned(side, tokens) for side in SIDES}
    result: dict[str, Any] = {
        "naive_mib": found["naive"],
        "ours_mib": found["ours"],
        "ratio": found["naive"] / found["ours"],
        "max_abs_difference": difference(512),
        "tokens": tokens,
        "vocabulary": VOCABULARY,
        "ours_by_tokens_mib": {str(count): spawned("ours", count) for count in more},
    }
    print(json.dumps(result))
    return 0 if result["ratio"] >= RATIO and result["max_abs_difference"] <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
