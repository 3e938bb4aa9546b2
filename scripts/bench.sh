#!/usr/bin/env bash
# Measure stock vLLM against eviction on the bundled model, setting everything up first.
#
#   scripts/bench.sh [nexus-vllm bench options ...]
#
# Writes bench/report.md and bench/report.json, or to --out DIR. `--parts a,c,f` takes some of it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

"$root/scripts/setup.sh"
export HF_HUB_OFFLINE=1
model=$("$root/.venv/bin/python" "$root/scripts/prepare_model.py")
exec "$root/.venv/bin/nexus-vllm" bench "$model" --out "$root/bench" "$@"
