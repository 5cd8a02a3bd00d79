#!/usr/bin/env bash
# Runs tests under what makes a machine slow, or another order of tests. None of it may turn a test red:
#   busy          beside four busy processes of the same priority (at the lowest one, tests get a hundredth of a core)
#   one-core      on one core
#   slow-imports  with 3 s more for the first import of mlflow_compress in each process
#   slow-sleep    with sleeps of three times their length, and 50 ms more for each connect and recv of a socket
#   random        shuffled, with three seeds
# Arguments name the tests (without: the fast ones), and MODES other modes than all five. It needs Linux.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=("$@")
logs=$(mktemp -d)
busy=()
failed=()
trap '[ ${#busy[@]} -eq 0 ] || kill "${busy[@]}"' EXIT

# Prints one line for a mode. The second argument and what follows are the command before `pytest`, up to `--`; then options.
run() {
  local name=$1 before=()
  shift
  while [ "$1" != -- ]; do before+=("$1"); shift; done
  shift
  local log="$logs/$name.log"
  "${before[@]}" python -m pytest -q -n 2 -p no:cacheprovider "$@" "${tests[@]}" >"$log" 2>&1 || failed+=("$name")
  echo "$name: $(tail -n 1 "$log")"
}

slow="PYTHONPATH=$PWD/tools/slow_machine${PYTHONPATH:+:$PYTHONPATH}"
for mode in ${MODES:-busy one-core slow-imports slow-sleep random}; do
  case $mode in
    busy)
      for _ in 1 2 3 4; do bash -c 'while :; do :; done' & busy+=($!); done
      run busy env --
      kill "${busy[@]}"
      wait "${busy[@]}" 2>/dev/null || true  # without it bash tells of their end
      busy=()
      ;;
    one-core) run one-core taskset -c 0 -- ;;
    slow-imports) run slow-imports env "$slow" SLOW_MACHINE=imports -- ;;
    slow-sleep) run slow-sleep env "$slow" SLOW_MACHINE=sleep -- ;;
    random) for seed in 1 2 3; do run "random-$seed" env -- -p randomly --randomly-seed="$seed"; done ;;
    *) echo "unknown mode: $mode" >&2; exit 2 ;;
  esac
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}; see $logs" >&2; exit 1; }
rm -r "$logs"
