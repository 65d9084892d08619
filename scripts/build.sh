#!/usr/bin/env bash
# Configures build/PRESET where that is still to be done, and builds TARGETS (everything by default).
#
#   scripts/build.sh PRESET [TARGET...]      e.g. scripts/build.sh cpu layerstream
set -euo pipefail
[ $# -ge 1 ] || {
  echo "usage: build.sh PRESET [TARGET...]   (presets: cpu, cpu-debug, cuda)" >&2
  exit 2
}
cd "$(dirname "$0")/.."
preset=$1
shift
build=build/$preset
chosen=.deps/layerstream-deps.cmake
stamp=$build/layerstream-deps.cmake

# An initial cache counts only in a new build tree. A tree made by hand (no stamp) is left as it is.
if [ -f "$build/CMakeCache.txt" ] && [ -f "$stamp" ] && ! cmp -s "$chosen" "$stamp"; then
  echo "build.sh: the choice of Kokkos has changed; configuring $build anew"
  rm -rf "$build"
fi
if [ ! -f "$build/build.ninja" ]; then
  arguments=()
  if [ -f "$chosen" ]; then arguments+=(-C "$chosen"); fi
  if command -v ccache >/dev/null; then arguments+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
  cmake --preset "$preset" "${arguments[@]}"
  if [ -f "$chosen" ]; then cp "$chosen" "$stamp"; fi
fi

if [ $# -gt 0 ]; then
  cmake --build "$build" --target "$@"
else
  cmake --build "$build"
fi
