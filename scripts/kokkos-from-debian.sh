#!/usr/bin/env bash
# Unpacks Debian unstable's Kokkos (OpenMP) into PREFIX, for Debian machines whose release has none that is
# recent enough and that cannot download a release from upstream. The system is not changed, and root is
# not needed.
#
#   scripts/kokkos-from-debian.sh PREFIX
#
# Unstable's libkokkos is linked against a newer C and C++ runtime than an older Debian's, so that runtime
# comes along, and executables are told to start with its dynamic loader. PREFIX/kokkos-debian.cmake
# holds what CMake must know: configure with `cmake -C PREFIX/kokkos-debian.cmake`.
#
# The mirror is the one of this machine's own apt configuration; packages are checked against the
# Debian archive's key as always.
set -euo pipefail

keyring=/usr/share/keyrings/debian-archive-keyring.gpg

die() {
  echo "kokkos-from-debian.sh: $*" >&2
  exit 1
}

# apt with sources, lists and cache of its own in $work.
prepare_apt() {
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs"
  : >"$work/unstable.list"
  # Proxies and credentials of the machine's configuration stay; its hooks, which may want root, do not.
  # $work is closed to others, so apt's unprivileged download user could not write into it.
  cat >"$work/apt.conf" <<CONF
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Post-Invoke;
Dir::Etc::SourceList "$work/unstable.list";
Dir::Etc::SourceParts "/dev/null";
Dir::State::Lists "$work/lists";
Dir::Cache "$work/cache";
APT::Sandbox::User "root";
APT::Update::Error-Mode "any";
Acquire::Languages "none";
Acquire::Retries "2";
Acquire::http::Timeout "30";
Acquire::https::Timeout "30";
CONF
}

unstable() {
  local tool=$1
  shift
  "$tool" -c "$work/apt.conf" -qq "$@"
}

# The archives that this machine's apt uses, Debian's main one first: apt itself reads its sources, in
# either format. Those whose lists were never downloaded are known by their path alone. The security
# archive has no unstable suite.
mirrors() {
  # shellcheck disable=SC2016  # apt's own variables
  {
    apt-get indextargets --format '$(ORIGIN)/$(LABEL) $(REPO_URI)' 'Created-By: Packages'
    apt-get indextargets --no-release-info --format 'unknown $(REPO_URI)' 'Created-By: Packages'
  } 2>/dev/null |
    awk '$1 == "Debian/Debian" { first[++n] = $2; next }
         $2 ~ /\/debian\/?$/   { later[++m] = $2 }
         END { for (i = 1; i <= n; ++i) print first[i]; for (i = 1; i <= m; ++i) print later[i] }' |
    awk '!seen[$0]++'
}

read_unstable_lists() {
  local candidates mirror
  candidates=$(mirrors)
  if [ -z "$candidates" ]; then
    die "apt is configured with no Debian archive; add one to /etc/apt/sources.list.d and run 'apt-get update'"
  fi
  while read -r mirror; do
    echo "deb [signed-by=$keyring] $mirror unstable main" >"$work/unstable.list"
    if unstable apt-get update; then return; fi
    echo "kokkos-from-debian.sh: $mirror gives no lists of unstable" >&2
  done <<<"$candidates"
  die "none of the configured Debian archives could be read; see apt's messages above"
}

download_packages() {
  local library
  library=$(unstable apt-cache depends libkokkos-dev | awk '/Depends: libkokkos[0-9]/ { print $2; exit }')
  [ -n "$library" ] || die "unstable's libkokkos-dev names no libkokkos library package"
  (cd "$work/debs" &&
    unstable apt-get download libkokkos-dev "$library" libc6 libstdc++6 libgcc-s1 libgomp1) ||
    die "the packages could not be downloaded; see apt's messages above"
}

unpack_packages() {
  local deb
  for deb in "$work"/debs/*.deb; do
    case ${deb##*/} in
      libkokkos*) dpkg-deb -x "$deb" "$new" ;;
      *) dpkg-deb -x "$deb" "$work/runtime" ;;
    esac
  done
  local core
  core=$(find "$new/usr/lib" -name libkokkoscore.so | head -n 1)
  [ -n "$core" ] || die "unstable's libkokkos-dev holds no libkokkoscore.so"
  multiarch=$(basename "$(dirname "$core")")

  mkdir -p "$new/runtime"
  find "$work/runtime" -path "*/lib/$multiarch/*" -prune \( -name '*.so' -o -name '*.so.*' \) \
    ! -name '*.py' -exec cp -a -t "$new/runtime" {} +
  loader=$(cd "$new/runtime" && find . -name 'ld-linux-*.so.*' -printf '%f\n' | head -n 1)
  [ -n "$loader" ] || die "unstable's libc6 holds no dynamic loader"
}

# The package's CMake files expect to lie in /usr, and name archives that the package does not ship.
adapt_cmake_files() {
  local folder=$new/usr/lib/$multiarch archive
  [ -d "$folder/cmake/Kokkos" ] || die "unstable's libkokkos-dev holds no CMake package"
  sed -i -e 's#\([";]\)/usr/include/#\1${_IMPORT_PREFIX}/include/#g' "$folder"/cmake/Kokkos/KokkosTargets*.cmake
  { grep -hoE "/lib/$multiarch/libkokkos[a-z]+\.a" "$folder"/cmake/Kokkos/KokkosTargets*.cmake || true; } | sort -u |
    while read -r archive; do
      [ -e "$new/usr$archive" ] || ar rcs "$new/usr$archive"
    done
}

# Every library that Kokkos needs is found with the new runtime alone.
check_library() {
  local library=$new/usr/lib/$multiarch/libkokkoscore.so
  if ! "$new/runtime/$loader" --library-path "$new/runtime" --list "$library" >"$work/needed" 2>&1 ||
    grep -q 'not found' "$work/needed"; then
    cat "$work/needed" >&2
    die "the unpacked libkokkoscore does not load on this machine"
  fi
}

write_cache_file() {
  local library=$prefix/usr/lib/$multiarch
  cat >"$new/kokkos-debian.cmake" <<CMAKE
# Written by scripts/kokkos-from-debian.sh.
set(Kokkos_DIR "$library/cmake/Kokkos" CACHE PATH "")
# Programs start with the loader and libraries that Kokkos was linked against.
string(JOIN " " flags
  "-Wl,--allow-shlib-undefined"
  "-Wl,--dynamic-linker=$prefix/runtime/$loader"
  "-Wl,--disable-new-dtags"
  "-Wl,-rpath,$prefix/runtime:$library")
set(CMAKE_EXE_LINKER_FLAGS_INIT "\${flags}" CACHE STRING "")
set(CMAKE_SKIP_RPATH ON CACHE BOOL "")
CMAKE
}

main() {
  [ $# = 1 ] || die "usage: kokkos-from-debian.sh PREFIX"
  local tool
  for tool in apt-get apt-cache dpkg-deb ar; do
    command -v "$tool" >/dev/null || die "$tool is missing: this script is for Debian with binutils installed"
  done
  [ -r "$keyring" ] || die "$keyring is missing; install debian-archive-keyring"

  mkdir -p "$(dirname "$1")"
  prefix=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
  case $prefix in
    *[[:space:]:\;\"]*) die "$prefix: a path with blanks, colons, semicolons or quotes cannot be linked into programs" ;;
  esac
  new=$prefix.new
  work=$(mktemp -d)
  trap 'rm -rf "$work" "$new"' EXIT
  rm -rf "$new"
  mkdir "$new"

  prepare_apt
  read_unstable_lists
  download_packages
  unpack_packages
  adapt_cmake_files
  check_library
  write_cache_file
  rm -rf "$prefix"
  mv "$new" "$prefix"
  echo "Kokkos $(dpkg-deb -f "$work"/debs/libkokkos-dev_*.deb Version) of Debian unstable is in $prefix"
}

main "$@"
