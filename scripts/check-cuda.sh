#!/usr/bin/env bash
# Compiles every source that a CUDA build has, for one architecture (90 by default), without linking: needs the
# CUDA toolkit and cuDNN's headers, but no GPU, no driver and no CUDA-enabled Kokkos. Where there is no toolkit it
# says so and ends well.
#
#   scripts/check-cuda.sh [89|90|120]
set -euo pipefail
cd "$(dirname "$0")/.."
architecture=${1:-90}
build=build/cuda-check-$architecture
venv=.deps/cuda-check
chosen=.deps/layerstream-deps.cmake

nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
if [ -z "$nvcc" ]; then
  echo "check-cuda.sh: SKIPPED: no nvcc in PATH or /usr/local/cuda/bin"
  exit 0
fi
cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
cudnn=
for folder in "${CUDNN_PATH:-$cuda}/include" "$cuda/include" /usr/include; do
  if [ -e "$folder/cudnn.h" ]; then cudnn=$folder; fi
done
if [ -z "$cudnn" ]; then
  echo "check-cuda.sh: SKIPPED: no cudnn.h beside $nvcc; set CUDNN_PATH to where cuDNN 9 lies"
  exit 0
fi

# A CMake that can compile CUDA as C++20, and cudnn-frontend's headers.
if [ ! -e "$venv/ready" ]; then
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet 'cmake>=3.28' nvidia-cudnn-frontend
  touch "$venv/ready"
fi
headers=$(dirname "$(find "$PWD/$venv" -name cudnn_frontend.h -print -quit)")

arguments=()
if [ -f "$chosen" ]; then arguments+=(-C "$chosen"); fi
if command -v ccache >/dev/null; then
  arguments+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
fi
mkdir -p "$build"
"$venv/bin/cmake" -S . -B "$build" -G Ninja "${arguments[@]}" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_CUDA_ARCHITECTURES="$architecture" -DLAYERSTREAM_ENABLE_CUDA=ON -DLAYERSTREAM_CUDA_COMPILE_CHECK=ON \
  -DCMAKE_CUDA_COMPILER="$nvcc" -DLAYERSTREAM_CUDNN_FRONTEND_INCLUDE_DIR="$headers" >"$build/configure.log" 2>&1 || {
  cat "$build/configure.log" >&2
  exit 1
}
"$venv/bin/cmake" --build "$build"
