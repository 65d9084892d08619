#!/usr/bin/env bash
# Sets up, builds and tests everything in Release; compiles the CUDA sources where there is a toolkit; then tests
# under AddressSanitizer and UndefinedBehaviorSanitizer: all of it where time permits, else the folders that
# handle memory and files.
#
#   scripts/test.sh [BUDGET_SECONDS]         default 1500, meant for two cores
set -euo pipefail
cd "$(dirname "$0")/.."
budget=${1:-1500}
jobs=$(nproc)
# Tests side by side share the cores: threads that wait must not spin.
export OMP_WAIT_POLICY=passive
SECONDS=0

# run_tests PRESET [ctest argument...]: failing tests show their output; the last lines are ctest's summary.
run_tests() {
  local preset=$1
  shift
  ctest --test-dir "build/$preset" --output-on-failure --no-tests=error --parallel "$jobs" "$@"
}

# What tests of tools/prepare_data need, for them alone, in .deps/python; without it they skip and say so.
python_packages() {
  local python=.deps/python/bin/python packages=(jinja2 pyarrow tokenizers)
  if "$python" -c 'import jinja2, pyarrow, tokenizers' 2>/dev/null; then return; fi
  rm -rf .deps/python
  if python3 -m venv .deps/python >/dev/null &&
    "$python" -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 20 "${packages[@]}"; then
    return
  fi
  rm -rf .deps/python
  echo "test.sh: no Python packages ${packages[*]}: the tests that need them skip" >&2
}

failed=()
# A browser, in which a test looks at the pages of `layerstream report`; where there is none it skips and says so.
packages_for_tests=()
command -v chromium chromium-browser google-chrome >/dev/null || packages_for_tests+=(chromium)
python3 -c 'import ensurepip, venv' 2>/dev/null || packages_for_tests+=(python3-venv)
scripts/setup.sh "${packages_for_tests[@]}"
python_packages
start=$SECONDS
scripts/build.sh cpu
build_seconds=$((SECONDS - start))
start=$SECONDS
run_tests cpu || failed+=("Release tests")
test_seconds=$((SECONDS - start))
scripts/check-cuda.sh || failed+=("compilation for CUDA")

# Estimate: a sanitizer build takes 1.5 times, its tests 8 times as long as in Release. A Release build that
# ccache served says nothing about the other one, so at least 300 s are taken for it.
[ "$build_seconds" -gt 300 ] || build_seconds=300
expected=$((build_seconds * 3 / 2 + test_seconds * 8))
left=$((budget - SECONDS))
selection=()
if [ "$expected" -gt "$left" ]; then
  selection=(-R '^(core|io|backends|longctx|engine)_')
  echo "test.sh: $left s left, about $expected s needed for all sanitizer tests: without ops, model and cli"
fi
# Configured with its target of least work, so that ctest can name the tests to build.
scripts/build.sh cpu-debug layerstream_test_support
mapfile -t targets < <(ctest --test-dir build/cpu-debug -N "${selection[@]}" |
  sed -nE 's/^ *Test +#[0-9]+: ([^ ]+).*/\1/p')
scripts/build.sh cpu-debug "${targets[@]}"
run_tests cpu-debug "${selection[@]}" || failed+=("sanitizer tests")

echo "test.sh: $SECONDS s of $budget s"
if [ ${#failed[@]} -gt 0 ]; then
  echo "test.sh: FAILED: ${failed[*]}" >&2
  exit 1
fi
