#!/usr/bin/env bash
# The long versions of the random tests, side by side, and a table of how they went.
#
#   scripts/long_runs.sh [--seed N] [--lives N] [--arrivals N] [--worker N] [--twin N]
#
# N is how many events each draws (arrivals: requests); 0 leaves one out. Prints Markdown, for
# docs/correctness.md; logs go to long_runs, or to --out DIR. Fails if one of them does.
# The same seed, count and versions draw the same events.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

seed=0 lives=1000000 arrivals=100000 worker=1000000 twin=100000 out=$root/long_runs
while [[ $# -gt 0 ]]; do
  case $1 in
    --seed | --lives | --arrivals | --worker | --twin | --out)
      printf -v "${1#--}" %s "${2?$1 needs a value}"
      ;;
    *) echo "unknown option $1" >&2 && exit 2 ;;
  esac
  shift 2
done

cd "$root"
mkdir -p "$out"
python=${PYTHON:-.venv/bin/python}
cores=$(nproc) # before the next line, which it heeds
export OMP_NUM_THREADS=1 # as many tests as cores; each has small tensors only

# One test: its name, the variables that choose the run, how many events, what pytest is to run.
run() {
  local name=$1 choice=$2 count=$3 result=passed begin=$SECONDS
  shift 3
  read -ra variables <<<"$choice"
  env "${variables[@]}" "$python" -m pytest -p no:cacheprovider "$@" &>"$out/$name.log" ||
    result="failed: $name.log"
  echo "| \`$choice pytest $*\` | $seed | $count | $((SECONDS - begin)) | $result |" >"$out/$name.row"
}

tests=()
if ((lives)); then
  tests+=("lives;NEXUS_SEED=$seed NEXUS_EVENTS=$lives;$lives;tests/scheduler/test_lives.py")
fi
if ((worker)); then
  tests+=("worker;NEXUS_WORKER_SEED=$seed NEXUS_WORKER_EVENTS=$worker;$worker;tests/unit/test_worker_events.py")
fi
if ((twin)); then
  tests+=("twin;NEXUS_TWIN_SEED=$seed NEXUS_TWIN_EVENTS=$twin;$twin;tests/unit/test_worker_twin.py")
fi
if ((arrivals)); then
  tests+=("arrivals;NEXUS_SEED=$seed NEXUS_ARRIVALS=$arrivals;$arrivals;tests/scheduler/test_admission.py -k every_request_ends")
fi

rm -f "$out"/*.row
for test in "${tests[@]}"; do
  while (($(jobs -rp | wc -l) >= cores)); do wait -n; done
  IFS=';' read -r name choice count what <<<"$test"
  # shellcheck disable=SC2086 # a path and options
  run "$name" "$choice" "$count" $what &
done
wait

echo "| command | seed | events | seconds | result |"
echo "|---|---|---|---|---|"
cat "$out"/*.row
! grep -q "failed" "$out"/*.row
