"""Our losses and advantages against TRL's own, on the same tensors; needs the extra `compare`."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "against_trl.py"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed: pip install -e .[compare]")
def test_losses_gradients_and_advantages_agree_with_trl_to_1e_5():
    done = subprocess.run([sys.executable, str(SCRIPT), "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert {"grpo", "dapo", "dr_grpo", "gspo", "rloo", "advantage leave_one_out"} <= set(result["losses compared"])
    assert result["max_abs_difference"] <= 1e-5
