#!/usr/bin/env bash
# Brings what the build needs: Debian packages, and a Kokkos that is recent enough. Quick when all is there.
#
#   scripts/setup.sh [PACKAGE...]            further Debian packages, if they can be had
#
# Kokkos is the first of: one that CMake finds by itself; the release pinned in
# cmake/LayerstreamDependencies.cmake; on Debian, unstable's packages, unpacked into .deps/kokkos.
# What was chosen is written to .deps/layerstream-deps.cmake, which scripts/build.sh gives to CMake (-C).
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD
dependencies=cmake/LayerstreamDependencies.cmake
chosen=.deps/layerstream-deps.cmake

packages=(
  g++ cmake ninja-build ca-certificates
  libopenblas-openmp-dev libhwy-dev libnuma-dev libxxhash-dev python3
  nlohmann-json3-dev libyaml-cpp-dev libcli11-dev libspdlog-dev libfmt-dev
  libgtest-dev libgmock-dev libbenchmark-dev
)

die() {
  echo "setup.sh: $*" >&2
  exit 1
}

install_packages() { # PACKAGE...
  [ $# -gt 0 ] || return 0
  if ! command -v dpkg-query >/dev/null; then
    echo "setup.sh: not a Debian system; the equivalents of these packages must be installed: $*" >&2
    return
  fi
  local installed missing=() package
  installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "$@" 2>/dev/null || true)
  for package in "$@"; do
    grep -qx "installed $package" <<<"$installed" || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0

  local as_root=()
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "run as root, or have an administrator install: ${missing[*]}"
    as_root=(sudo)
  fi
  echo "setup.sh: installing ${missing[*]}"
  # A source that has nothing to do with these packages may fail; the installation decides.
  "${as_root[@]}" apt-get -qq update || echo "setup.sh: apt-get update had errors; going on" >&2
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get -qq -y --no-install-recommends install "${missing[@]}" >/dev/null ||
    die "these packages could not be installed: ${missing[*]}"
}

pinned() { # NAME: the value of set(LAYERSTREAM_KOKKOS_NAME ...)
  sed -nE "s/^set\(LAYERSTREAM_KOKKOS_$1 +([^ )]+)\).*/\1/p" "$dependencies"
}

# Whether CMake finds a Kokkos that this project accepts; "$@" are further arguments to cmake.
cmake_finds_kokkos() {
  local probe wanted
  wanted=$(sed -nE 's/^find_package\(Kokkos ([0-9.]+).*/\1/p' "$dependencies")
  [ -n "$wanted" ] || die "$dependencies names no Kokkos version"
  probe=$(mktemp -d)
  cat >"$probe/CMakeLists.txt" <<CMAKE
cmake_minimum_required(VERSION 3.22)
project(probe CXX)
find_package(Kokkos $wanted REQUIRED)
file(WRITE "\${CMAKE_BINARY_DIR}/version" "\${Kokkos_VERSION}")
CMAKE
  kokkos_version=
  if cmake -G Ninja "$@" -S "$probe" -B "$probe/build" >/dev/null 2>&1; then
    kokkos_version=$(cat "$probe/build/version")
  fi
  rm -rf "$probe"
  [ -n "$kokkos_version" ]
}

# The pinned release, unpacked into .deps/kokkos-VERSION; fails where it cannot be had.
download_release() {
  local version sha url source archive=.deps/kokkos.tar.gz
  version=$(pinned VERSION)
  sha=$(pinned SHA256)
  url=$(sed -nE 's/.*URL +"([^"]*)".*/\1/p' "$dependencies")
  # shellcheck disable=SC2016  # the variable is CMake's
  url=${url//'${LAYERSTREAM_KOKKOS_VERSION}'/$version}
  if [ -z "$version" ] || [ -z "$sha" ] || [ -z "$url" ]; then die "$dependencies pins no Kokkos release"; fi
  kokkos_version=$version
  source=.deps/kokkos-$version
  if [ -d "$source" ]; then return; fi

  # CMake downloads, as it is there; a connection that brings nothing for 10 s is given up.
  cat >.deps/download.cmake <<CMAKE
file(DOWNLOAD "$url" "$archive" INACTIVITY_TIMEOUT 10 TIMEOUT 120 STATUS status)
list(GET status 0 code)
if(NOT code EQUAL 0)
  message(FATAL_ERROR "\${status}")
endif()
CMAKE
  local good=0
  if ! cmake -P .deps/download.cmake >/dev/null 2>&1; then
    echo "setup.sh: the pinned Kokkos release cannot be downloaded here"
  elif [ "$(sha256sum "$archive" | cut -d ' ' -f 1)" != "$sha" ]; then
    echo "setup.sh: what was downloaded from $url is not the pinned Kokkos release (SHA-256 differs); not used" >&2
  else
    # set -e is off here: this function is called as a condition.
    rm -rf .deps/unpacked && mkdir .deps/unpacked &&
      tar -xzf "$archive" -C .deps/unpacked --strip-components=1 &&
      mv .deps/unpacked "$source" && good=1
  fi
  rm -f .deps/download.cmake "$archive"
  [ "$good" = 1 ]
}

choose_kokkos() {
  mkdir -p .deps
  if [ -f "$chosen" ] && grep -qxF "# for $repository" "$chosen"; then
    if [ -d ".deps/kokkos-$(pinned VERSION)" ] || cmake_finds_kokkos -C "$chosen"; then return; fi
  fi
  if cmake_finds_kokkos; then
    write_choice "Kokkos $kokkos_version, found by CMake" ""
  elif download_release; then
    write_choice "Kokkos $kokkos_version, the pinned release, built with the project" \
      "set(FETCHCONTENT_SOURCE_DIR_KOKKOS \"$repository/.deps/kokkos-$kokkos_version\" CACHE PATH \"\")"
  else
    echo "setup.sh: taking Debian unstable's Kokkos"
    scripts/kokkos-from-debian.sh .deps/kokkos ||
      die "no Kokkos: install release $(pinned VERSION) and set Kokkos_ROOT to its prefix, then run this again"
    cmake_finds_kokkos -C .deps/kokkos/kokkos-debian.cmake || die "CMake refuses the Kokkos in .deps/kokkos"
    write_choice "Kokkos $kokkos_version of Debian unstable" \
      "include(\"$repository/.deps/kokkos/kokkos-debian.cmake\")"
  fi
}

write_choice() { # DESCRIPTION LINE
  printf '# Written by scripts/setup.sh: an initial cache for cmake -C.\n# for %s\n# %s\n%s\n' \
    "$repository" "$1" "$2" >"$chosen.new"
  mv "$chosen.new" "$chosen"
  echo "setup.sh: $1"
}

install_packages "${packages[@]}"
for package in "$@"; do
  (install_packages "$package") || echo "setup.sh: going on without it" >&2
done
choose_kokkos
