#!/usr/bin/env bash
# Thousands of mixed requests to one server with the bundled model, setting everything up first.
#
#   scripts/soak.sh [nexus-vllm soak options ...]
#
# Writes soak.md, soak.json and the server's log to soak, or to --out DIR. Fails on any 5xx, answer
# other than expected, page not given back, changed canary or memory that grows. 10,000 requests,
# unless --requests says otherwise; a short one: --requests 150 --drain-every 50.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

"$root/scripts/setup.sh" --dev
export HF_HUB_OFFLINE=1
model=$("$root/.venv/bin/python" "$root/scripts/prepare_model.py")
exec "$root/.venv/bin/nexus-vllm" soak "$model" --out "$root/soak" "$@"
