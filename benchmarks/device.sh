#!/usr/bin/env bash
# On a machine with a GPU: builds the package, tests it, checks the kernels for bad memory accesses
# and races, and times everything.
#
#   benchmarks/device.sh OUTPUT_FOLDER [STEP...]
#
# Steps: build test memcheck racecheck benchmark profile; all of them if none is named. A failed
# step does not stop the others. OUTPUT_FOLDER gets a log of each, and the timings. PROFILE lists the
# cases of the last step; SHARDS and LIMIT are for those before that look for errors of kernels.
set -u
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:?usage: benchmarks/device.sh OUTPUT_FOLDER [STEP...]}" && cd "$1" && pwd)
shift
steps=("$@")
[[ ${#steps[@]} -gt 0 ]] || steps=(build test memcheck racecheck benchmark profile)

python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
export JAXMAGMA_CACHE_DIR=${JAXMAGMA_CACHE_DIR:-$(mktemp -d)}

build() {
  "$python" -m pip install --no-build-isolation --no-deps -v . &&
    "$python" -P -c "import jaxmagma._cuda as c; print('NVRTC', c.nvrtc_version())"
}

test() {
  JAXMAGMA_REQUIRE_GPU=1 JAXMAGMA_REQUIRE_NVRTC=1 \
    "$python" -P -m pytest -q -p no:cacheprovider tests/test_cuda.py tests/test_cuda_compile.py
}

# All tests that need a GPU, but one that has no room beside a tool: each of SHARDS processes has some
# of them, and is interrupted after LIMIT seconds, if given: then it says what it has found, and the step
# fails. With every array in an allocation of its own, an access beyond its end is seen. The tool
# itself ends by signal 11 at times: then it starts again, twice at most.
sanitized() {
  local tool=$1 shards=${SHARDS:-14} status=0 number at process all=() own=() processes=()
  shift
  mapfile -t all < <("$python" -P -m pytest -q -p no:cacheprovider --collect-only -m gpu \
    -k "not more_values_than_31_bits" tests | grep ::)
  echo "${#all[@]} tests"
  [[ ${#all[@]} -gt 0 ]] || return
  for ((number = 0; number < shards && number < ${#all[@]}; ++number)); do
    own=()
    for ((at = number; at < ${#all[@]}; at += shards)); do own+=("${all[at]}"); done
    (
      for _ in 1 2 3; do
        JAXMAGMA_REQUIRE_GPU=1 XLA_PYTHON_CLIENT_PREALLOCATE=false \
          XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_FLAGS="--xla_gpu_autotune_level=0" \
          ${LIMIT:+timeout --signal=INT "$LIMIT"} \
          compute-sanitizer --tool "$tool" "$@" --error-exitcode 9 --print-limit 20 \
          "$python" -P -m pytest -q -p no:cacheprovider -p no:xdist "${own[@]}" \
          >"$out/$tool.$number.log" 2>&1
        status=$?
        [[ $status -eq 139 ]] || break
      done
      exit $status
    ) &
    processes+=($!)
  done
  for process in "${processes[@]}"; do wait "$process" || status=1; done
  grep -ohE "(ERROR|RACECHECK) SUMMARY: .*" "$out/$tool".*.log | sort | uniq -c
  grep -ohE "[0-9]+ (passed|failed)" "$out/$tool".*.log |
    awk '{ of[$2] += $1 } END { for (x in of) print of[x], x }'
  return $status
}

# JAX asks the driver for what some drivers do not have: that is no error of a kernel.
memcheck() { sanitized memcheck --report-api-errors no; }

racecheck() { sanitized racecheck; }

benchmark() {
  # Without peers first: that is what there is time for where a device is short.
  local status=0
  "$python" -m benchmarks --suite ceiling bgemm --no-peer --json "$out/ceiling.json" || status=1
  "$python" -m benchmarks --json "$out/overview.json" || status=1
  "$python" -m benchmarks --suite first-call --json "$out/first-call.json" || status=1
  return $status
}

# What one launch of each case's kernel keeps busy: memory, shared memory, the pipes.
profile() {
  local sections=(SpeedOfLight MemoryWorkloadAnalysis MemoryWorkloadAnalysis_Tables
    ComputeWorkloadAnalysis LaunchStats Occupancy WarpStateStats)
  local case
  for case in ${PROFILE:-chain/n16 chain/n32 bk1/p15 bk3/p8 bk3-grad/p8}; do
    ncu "${sections[@]/#/--section=}" --kernel-name kernel --launch-skip 1 --launch-count 1 \
      "$python" -m benchmarks --suite all --cases "^$case\$" --no-peer --megabytes 400 || return
  done
}

failed=()
for step in "${steps[@]}"; do
  printf '==== %s\n' "$step"
  begin=$SECONDS
  if "$step" >"$out/$step.log" 2>&1; then verdict=ok; else verdict=FAILED; failed+=("$step"); fi
  case $step in
    benchmark) cat "$out/$step.log" ;;
    *) [[ $verdict == ok ]] && tail -n 3 "$out/$step.log" || tail -n 40 "$out/$step.log" ;;
  esac
  printf '==== %s: %s after %d s\n' "$step" "$verdict" "$((SECONDS - begin))"
done
[[ ${#failed[@]} -eq 0 ]]
