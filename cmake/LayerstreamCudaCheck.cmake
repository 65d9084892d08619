# Kokkos::kokkos as a CUDA build sees it, made from the headers of an installed Kokkos without CUDA: enough to
# compile every CUDA source, not to link. For machines that have the toolkit and no CUDA-enabled Kokkos.
find_path(LAYERSTREAM_KOKKOS_HEADERS Kokkos_Core.hpp REQUIRED
          HINTS "${Kokkos_DIR}/../../../../include" "${Kokkos_DIR}/../../../include" "${Kokkos_ROOT}/include"
          PATH_SUFFIXES kokkos)
set(overlay "${CMAKE_BINARY_DIR}/kokkos-with-cuda")

file(READ "${LAYERSTREAM_KOKKOS_HEADERS}/KokkosCore_config.h" config)
set(architecture_89 ARCH_ADA89)
set(architecture_90 ARCH_HOPPER ARCH_HOPPER90)
set(architecture_120 ARCH_BLACKWELL ARCH_BLACKWELL120)
if(NOT DEFINED architecture_${CMAKE_CUDA_ARCHITECTURES})
  message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES is ${CMAKE_CUDA_ARCHITECTURES}; the check knows 89, 90 and 120")
endif()
foreach(feature ENABLE_CUDA ENABLE_SERIAL ${architecture_${CMAKE_CUDA_ARCHITECTURES}})
  string(REPLACE "/* #undef KOKKOS_${feature} */" "#define KOKKOS_${feature}" config "${config}")
endforeach()
string(REPLACE "#define KOKKOS_ENABLE_OPENMP" "/* #undef KOKKOS_ENABLE_OPENMP */" config "${config}")
file(CONFIGURE OUTPUT "${overlay}/KokkosCore_config.h" CONTENT "${config}" @ONLY)
file(WRITE "${overlay}/KokkosCore_Config_FwdBackend.hpp"
  "#pragma once\n#include <fwd/Kokkos_Fwd_SERIAL.hpp>\n#include <fwd/Kokkos_Fwd_CUDA.hpp>\n")
file(WRITE "${overlay}/KokkosCore_Config_SetupBackend.hpp" "#pragma once\n#include <setup/Kokkos_Setup_Cuda.hpp>\n")
file(WRITE "${overlay}/KokkosCore_Config_DeclareBackend.hpp"
  "#pragma once\n#include <decl/Kokkos_Declare_SERIAL.hpp>\n#include <decl/Kokkos_Declare_CUDA.hpp>\n")
file(READ "${LAYERSTREAM_KOKKOS_HEADERS}/desul/atomics/Config.hpp" config)
string(REPLACE "/* #undef DESUL_ATOMICS_ENABLE_CUDA */" "#define DESUL_ATOMICS_ENABLE_CUDA" config "${config}")
string(REPLACE "#define DESUL_ATOMICS_ENABLE_OPENMP" "/* #undef DESUL_ATOMICS_ENABLE_OPENMP */" config "${config}")
file(CONFIGURE OUTPUT "${overlay}/desul/atomics/Config.hpp" CONTENT "${config}" @ONLY)

add_library(layerstream_kokkos_headers INTERFACE)
target_include_directories(layerstream_kokkos_headers SYSTEM INTERFACE "${overlay}" "${LAYERSTREAM_KOKKOS_HEADERS}")
add_library(Kokkos::kokkos ALIAS layerstream_kokkos_headers)
