#!/usr/bin/env bash
# Confirm on an NVIDIA GPU what only one can show: kernels, their speed, engines with CUDA graphs.
#
#   scripts/gpu_check.sh [--python PYTHON | --with-vllm] [options of scripts/gpu_check.py, see --help]
#
#   scripts/gpu_check.sh --with-vllm --write    # all of it, figures into docs/gpu.md
#   scripts/gpu_check.sh --interpret            # no GPU: does the check itself work?
#
# Python: the one named; with --with-vllm .venv as scripts/setup.sh makes it, with vLLM (several GB);
# else .venv if it has torch and Triton; else .venv-gpu, made here with those two and no vLLM.
# Exit codes: 0 all shown, 1 something is wrong, 2 cannot run here, 3 a part was left out.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

python="" with_vllm=false
options=()
while (($#)); do
  case "$1" in
    --python) python=${2:?--python needs a path}; shift ;;
    --python=*) python=${1#*=} ;;
    --with-vllm) with_vllm=true ;;
    *) options+=("$1") ;;
  esac
  shift
done
if $with_vllm && [[ -n $python ]]; then
  echo "gpu_check: --python or --with-vllm, not both" >&2
  exit 2
fi

has_torch() { "$1" -c 'import torch, triton' >/dev/null 2>&1; }

if $with_vllm; then
  "$here/scripts/setup.sh"
  python=$here/.venv/bin/python
elif [[ -z $python ]] && has_torch "$here/.venv/bin/python"; then
  python=$here/.venv/bin/python
elif [[ -z $python ]]; then
  python=$here/.venv-gpu/bin/python
  if ! has_torch "$python"; then
    torch=$(sed -n 's/^TORCH_VERSION=//p' "$here/scripts/setup.sh")
    echo "gpu_check: installing torch $torch and Triton into .venv-gpu (several GB)" >&2
    "${PYTHON:-python3}" -m venv --clear "$here/.venv-gpu"
    "$python" -m pip --disable-pip-version-check install -qq "torch==$torch" triton numpy >&2
  fi
fi

exec "$python" "$here/scripts/gpu_check.py" ${options[@]+"${options[@]}"}
