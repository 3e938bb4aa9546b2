#!/usr/bin/env bash
# Measure stock vLLM against eviction on the bundled model, setting everything up first.
#
#   scripts/bench.sh [nexus-vllm bench options ...]
#
# Writes report.md, report.json and plots to bench, or to --out DIR. The sizes are those of
# docs/bench/report.md, made by `scripts/bench.sh --out docs/bench`: about an hour on two cores that
# have nothing else to do. `--parts a,f` takes some of it; sizes that are given again replace these.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

"$root/scripts/setup.sh" --dev
export HF_HUB_OFFLINE=1
model=$("$root/.venv/bin/python" "$root/scripts/prepare_model.py")
exec "$root/.venv/bin/nexus-vllm" bench "$model" --out "$root/bench" \
  --starts 6 --rounds 1 \
  --contexts 2048,4096,8192 --batches 1,8 \
  --loads 2048+2048x12,3584+512x8 \
  --fed-tokens 50000 --stream-tokens 1000 --stream-allocators uniform,lu \
  --live-tokens 512,1024,2048,4096 --evictions 6 \
  "$@"
