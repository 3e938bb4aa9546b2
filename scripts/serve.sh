#!/usr/bin/env bash
# Serve a model with KV-cache eviction on, setting everything up first.
#
#   scripts/serve.sh [MODEL] [vllm serve options ...]
#
# Without MODEL (first argument, or --model): the bundled SmolLM2-135M-Instruct, no network needed
# once it is set up. Every option is passed to `vllm serve`; a default below is overruled by giving
# the same option. `scripts/serve.sh --help=all` lists vLLM's options.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

"$root/scripts/setup.sh"
unset VLLM_VERSION # meant for setup.sh; vLLM warns of variables that it does not know

export VLLM_NO_USAGE_STATS=${VLLM_NO_USAGE_STATS:-1} DO_NOT_TRACK=${DO_NOT_TRACK:-1}
defaults=(--kv-eviction nexus --kv-budget "20%")
for argument in "$@"; do # a configuration file may name the policy and the budget itself
  if [[ $argument == --kv-eviction-config* ]]; then defaults=(); fi
done

if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
  # Compiled, this CPU build has answered nonsense; bfloat16 crawls on CPUs without AVX-512.
  defaults+=(--enforce-eager --dtype float32)
  export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-2} # GiB
fi

model=()
bundled=true
if [[ $# -gt 0 && $1 != -* ]]; then
  model=("$1")
  bundled=false
  shift
fi
for argument in "$@"; do
  if [[ $argument == --model || $argument == --model=* ]]; then bundled=false; fi
done
if $bundled; then
  model=("$("$root/.venv/bin/python" "$root/scripts/prepare_model.py")")
  defaults+=(--served-model-name smollm2-135m-instruct --max-model-len 8192)
  export HF_HUB_OFFLINE=1
fi

exec "$root/.venv/bin/vllm" serve "${model[@]}" "${defaults[@]}" "$@"
