"""The whole job by two processes with sharded weights, over a stand-in for a vLLM server."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from deepswe.training.checkpoint import latest
from deepswe.training.metrics import read_rows

ROOT = Path(__file__).parents[2]
RECIPE = """
[run]
name = "many"
directory = "{directory}"
threads = 1
[model.scratch]
hidden_size = 32
layers = 2
heads = 2
key_value_heads = 1
intermediate_size = 64
vocabulary = 512
[tasks]
kind = "frozenlake"
train = 16
heldout = 2
max_size = 3
observation = "relational"
[rollout]
tasks_per_step = 2
group_size = 2
max_steps = 2
max_tokens = 200
max_turn_tokens = 3
[algorithm]
preset = "reinforce"
kl_start_every = 0
[training]
steps = 2
learning_rate = 1e-2
weight_decay = 0.5
activation_checkpointing = true
checkpoint_every = 1
[engine]
backend = "vllm"
[engine.vllm]
servers = ["http://127.0.0.1:{port}"]
directory = "{directory}"
max_mismatch = 0
[evaluation]
attempts = 1
"""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_two_processes_make_one_run_and_its_checkpoint_loads_as_a_plain_model(tmp_path: Path) -> None:
    port = free_port()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(directory=tmp_path, port=port))
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.vllm_server.server", "--port", str(port), "--flat"], cwd=ROOT
    )
    try:
        deadline = time.monotonic() + 120
        while not answers(port) and time.monotonic() < deadline:
            time.sleep(0.1)
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
        done = subprocess.run(
            [*launch, str(free_port()), "-m", "deepswe", "train", str(recipe)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=250,
        )
    finally:
        server.kill()
        server.wait()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    run = tmp_path / "many"
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "train"]
    assert [(row["step"], row["updates"]) for row in rows] == [(1, 1), (2, 1)]
    checkpoint = latest(run / "checkpoints" / "training")
    assert checkpoint is not None
    assert checkpoint.state()["step"] == 2
    assert (checkpoint.path / "shards").is_dir()
    assert AutoModelForCausalLM.from_pretrained(checkpoint.export).config.num_hidden_layers == 2
    assert (run / "report.html").exists()
