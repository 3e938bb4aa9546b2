#!/usr/bin/env bash
# Everything that must pass before a change goes in: lint, format, types, the whole test suite.
#
#   scripts/test.sh [pytest arguments ...]
#
# With arguments, tests/kernels is left out: TRITON_INTERPRET=1 python -m pytest tests/kernels
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh --dev
python=.venv/bin/python
"$python" scripts/prepare_model.py >/dev/null

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy nexus_vllm scripts
# One process per core, a module's tests together: engines are started once for each.
status=0
"$python" -m pytest -n auto --dist loadscope --durations 8 "$@" || status=$?
# Kernels by themselves: Triton decides as it is imported whether it interprets.
if (($# == 0)); then
  TRITON_INTERPRET=1 "$python" -m pytest tests/kernels -n auto --dist loadfile --durations 8 ||
    status=$?
fi
exit "$status"
