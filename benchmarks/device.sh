#!/usr/bin/env bash
# On a machine with a GPU: builds the package, tests it, checks the kernels for bad memory accesses
# and races, and times everything.
#
#   benchmarks/device.sh OUTPUT_FOLDER [STEP...]
#
# Steps: build test threads memcheck racecheck benchmark profile; all of them if none is named. A failed
# step does not stop the others. OUTPUT_FOLDER gets a log of each, and the timings. PROFILE lists the
# cases of the last step; SHARDS, FIRST and LIMIT are for those before that look for errors of kernels.
set -u
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:?usage: benchmarks/device.sh OUTPUT_FOLDER [STEP...]}" && cd "$1" && pwd)
shift
steps=("$@")
[[ ${#steps[@]} -gt 0 ]] || steps=(build test threads memcheck racecheck benchmark profile)

python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
export JAXMAGMA_CACHE_DIR=${JAXMAGMA_CACHE_DIR:-$(mktemp -d)}

build() {
  "$python" -m pip install --no-build-isolation --no-deps -v . &&
    "$python" -P -c "import jaxmagma._cuda as c; print('NVRTC', c.nvrtc_version())"
}

test() {
  JAXMAGMA_REQUIRE_GPU=1 JAXMAGMA_REQUIRE_NVRTC=1 XLA_PYTHON_CLIENT_PREALLOCATE=false \
    "$python" -P -m pytest -q -p no:cacheprovider -n "$(nproc)" -m gpu tests
}

# Threads that call one function with different traced bases; of two devices, if there are two.
threads() {
  JAXMAGMA_REQUIRE_GPU=1 JAXMAGMA_THREAD_CALLS=6000 \
    "$python" -P -m pytest -q -p no:cacheprovider -n 0 --durations=0 tests/test_cuda_threads.py
}

# sanitized TOOL OMITTED [OPTION...]
#
# All tests that need a GPU, but those omitted, in SHARDS processes with some each, from the one with
# number FIRST on, one for each core at a time. With every array in an allocation of its own, an access
# beyond its end is seen; kernels that are not ours run unchecked. The tool follows no process that XLA
# starts: it ended by signal 11 where it did. After LIMIT seconds, if given, all are interrupted and say
# what they have found. The step fails unless every process says that its tests passed and that there
# was no error; warnings are in the logs, after the names of their tests. Where there are several GPUs,
# processes have two each, and take turns with them.
sanitized() {
  local tool=$1 omitted=$2 number at all=() own=() gpus=() count
  shift 2
  count=$(nvidia-smi --list-gpus | wc -l)
  for ((number = 0; number < count; ++number)); do gpus+=("$number,$(((number + 1) % count))"); done
  ((count > 1)) || gpus=(0)
  mapfile -t all < <("$python" -P -m pytest -q -p no:cacheprovider --collect-only -m gpu \
    -k "not ($omitted)" tests | grep ::)
  local shards=${SHARDS:-$((4 * $(nproc)))} deadline=${LIMIT:+$((SECONDS + LIMIT))}
  echo "${#all[@]} tests"
  [[ ${#all[@]} -gt 0 ]] || return
  for ((number = ${FIRST:-0}; number < shards && number < ${#all[@]}; ++number)); do
    own=()
    for ((at = number; at < ${#all[@]}; at += shards)); do own+=("${all[at]}"); done
    while (($(jobs -rp | wc -l) >= $(nproc))); do wait -n; done
    CUDA_VISIBLE_DEVICES=${gpus[number % ${#gpus[@]}]} \
      check_share "$tool" "$deadline" "$@" -- "${own[@]}" >"$out/$tool.$number.log" 2>&1 &
  done
  wait
  grep -ohE "(ERROR|RACECHECK) SUMMARY: .*" "$out/$tool".*.log | sort | uniq -c
  grep -ohE "[0-9]+ (passed|failed)" "$out/$tool".*.log |
    awk '{ of[$2] += $1 } END { for (x in of) print of[x], x }'
  local bad
  bad=$(grep -LE "^exit status 0$" "$out/$tool".*.log;
    grep -LE "SUMMARY: (0 errors|.*\(0 errors)" "$out/$tool".*.log)
  echo "${bad:-no process failed}"
  [[ -z $bad ]]
}

# What the printer calls its kernels, and the templates of cuda/bgemm_*.h.
ours=(--kernel-name kernel_name=kernel --kernel-name kernel_name=finish
  --kernel-name kernel_substring=BgemmKernel)

# check_share TOOL DEADLINE [OPTION...] -- TEST...
check_share() {
  local tool=$1 deadline=$2 options=()
  shift 2
  while [[ $1 != -- ]]; do options+=("$1") && shift; done
  shift
  JAXMAGMA_REQUIRE_GPU=1 JAXMAGMA_THREAD_CALLS="${calls:-20}" XLA_PYTHON_CLIENT_PREALLOCATE=false \
    XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_FLAGS="--xla_gpu_autotune_level=0" \
    ${deadline:+timeout --signal=INT --kill-after=20 "$((deadline - SECONDS))"} \
    compute-sanitizer --tool "$tool" --launch-timeout 0 "${ours[@]}" "${options[@]}" \
    --target-processes application-only --print-limit 20 \
    "$python" -P -m pytest -v -p no:cacheprovider -p no:xdist "$@"
  echo "exit status $?"
}

# Beside the tools there is no room for so many values, what they need counts as the process's, and the
# kernels of an executable that is gone stay loaded, which the test of the cache does not expect.
omitted="more_values_than_31_bits or cache_is_used_and_repaired or ten_million_elements"

# JAX asks the driver for what some drivers do not have: that is no error of a kernel.
memcheck() { sanitized memcheck "$omitted" --report-api-errors no; }

# There is no time for a second choice before the test of tuning wants to see two, nor for as many
# calls of every thread.
racecheck() { calls=6 sanitized racecheck "$omitted or (test_tune and test_on_a_gpu)"; }

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
