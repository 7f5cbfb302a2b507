#!/usr/bin/env bash
# The learner on a GPU against the same model under plain transformers code, in one run of at most ten minutes.
#
#   tests/gpu/run.sh [OUT]       # writes OUT/gpu.json (default: the current directory) and prints it
#
# No network: the models have random weights. It needs a CUDA build of torch and transformers; nothing of it is installed
# here. Exits 0 only where the checks hold.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-.}
mkdir -p "$out"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
exec timeout 590 "$python" tests/gpu/learner.py --out "$out/gpu.json" --budget-s 540
