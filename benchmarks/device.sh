#!/usr/bin/env bash
# On a machine with a GPU: builds the package, tests it, checks the kernels for bad memory accesses
# and races, and times everything.
#
#   benchmarks/device.sh OUTPUT_FOLDER [STEP...]
#
# Steps: build test memcheck racecheck benchmark profile; all of them if none is named. A failed
# step does not stop the others. OUTPUT_FOLDER gets a log of each, and the timings. PROFILE lists the
# cases of the last step.
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

# A few kernels of each kind: with every array in an allocation of its own, an access beyond its
# end is seen.
sanitized() {
  local tool=$1 tests=$2
  XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_FLAGS="--xla_gpu_autotune_level=0" \
    compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
    "$python" -P -m pytest -q -p no:cacheprovider -p no:xdist tests/test_cuda.py -k "$tests"
}

memcheck() {
  sanitized memcheck "test_contractions or test_several or test_dtypes or test_mass or \
    test_parameters or test_transposed or test_rectangular or test_nan"
}

racecheck() {
  sanitized racecheck "test_several or (test_contractions and 1013) or test_parts or \
    (test_parameters and 1013) or test_nan or test_rectangular or test_traced"
}

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
