# Libraries by find_package; Kokkos also from its pinned release archive.
set(LAYERSTREAM_KOKKOS_VERSION 5.2.2)
set(LAYERSTREAM_KOKKOS_SHA256 d6557aaef39302282a15f9c770433d1fcdf4e961dfd6d9ed726b9d0d0f546b9f)

find_package(Threads REQUIRED)
if(NOT LAYERSTREAM_ENABLE_CUDA)
  find_package(BLAS REQUIRED)
  find_path(LAYERSTREAM_CBLAS_INCLUDE_DIR cblas.h REQUIRED
            PATH_SUFFIXES x86_64-linux-gnu aarch64-linux-gnu openblas)
endif()
find_package(nlohmann_json REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(CLI11 REQUIRED)
find_package(spdlog REQUIRED)
find_package(hwy REQUIRED)
# Where a build's own instruction set is AVX3_DL, as on Sapphire Rapids, Highway 1.0 compiles only if that is wanted.
target_compile_definitions(hwy::hwy INTERFACE HWY_WANT_AVX3_DL)
find_path(LAYERSTREAM_XXHASH_INCLUDE_DIR xxhash.h REQUIRED)
find_library(LAYERSTREAM_XXHASH_LIBRARY xxhash REQUIRED)
find_library(LAYERSTREAM_NUMA_LIBRARY numa REQUIRED)

# Kokkos: an installed one if it is recent enough; else the pinned release (needs a download).
# scripts/setup.sh prepares a machine that has only Debian's package registry.
if(LAYERSTREAM_CUDA_COMPILE_CHECK AND NOT FETCHCONTENT_SOURCE_DIR_KOKKOS)
  include(LayerstreamCudaCheck)
  return()
endif()
find_package(Kokkos 4.6 QUIET)
if(NOT Kokkos_FOUND)
  message(STATUS "Kokkos not found: fetching release ${LAYERSTREAM_KOKKOS_VERSION}")
  include(FetchContent)
  set(Kokkos_ENABLE_SERIAL ON CACHE BOOL "")
  set(Kokkos_ENABLE_OPENMP ON CACHE BOOL "")
  if(LAYERSTREAM_ENABLE_CUDA)
    set(Kokkos_ENABLE_CUDA ON CACHE BOOL "")
    set(Kokkos_ENABLE_COMPILE_AS_CMAKE_LANGUAGE ON CACHE BOOL "")
  endif()
  FetchContent_Declare(Kokkos
    URL "https://github.com/kokkos/kokkos/releases/download/${LAYERSTREAM_KOKKOS_VERSION}/kokkos-${LAYERSTREAM_KOKKOS_VERSION}.tar.gz"
    URL_HASH "SHA256=${LAYERSTREAM_KOKKOS_SHA256}")
  FetchContent_MakeAvailable(Kokkos)
endif()
message(STATUS "Kokkos ${Kokkos_VERSION}")
if(LAYERSTREAM_ENABLE_CUDA AND NOT Kokkos_ENABLE_CUDA)
  message(FATAL_ERROR "LAYERSTREAM_ENABLE_CUDA needs a Kokkos built with CUDA; this one has ${Kokkos_DEVICES}. "
                      "Set Kokkos_ROOT to one, or CMAKE_DISABLE_FIND_PACKAGE_Kokkos=ON to build the pinned release")
endif()

if(LAYERSTREAM_BUILD_TESTS)
  find_package(GTest REQUIRED)
endif()
if(LAYERSTREAM_BUILD_BENCHES)
  find_package(benchmark REQUIRED)
endif()
