# How every target of this project is compiled.
#
#   layerstream_library(name SOURCES ... [PUBLIC libs ...] [PRIVATE libs ...])
#   layerstream_test(name SOURCES ... [LIBRARIES libs ...] [KERNEL_THREADS n])
#
# Headers are included by their path from the repository's source roots:
# "core/tensor.hpp", "backends/host_region.hpp", "longctx/chunk_plan.hpp".

add_library(layerstream_options INTERFACE)
target_include_directories(layerstream_options INTERFACE
  "${CMAKE_SOURCE_DIR}/src" "${CMAKE_SOURCE_DIR}")
# One multiply and one add stay two roundings unless the code says std::fma: results must not depend on
# what an optimiser chose to fuse.
set(LAYERSTREAM_CXX_OPTIONS -Wall -Wextra -Werror -ffp-contract=off)
if(NOT LAYERSTREAM_CPU_ARCH STREQUAL "baseline")
  list(APPEND LAYERSTREAM_CXX_OPTIONS "-march=${LAYERSTREAM_CPU_ARCH}")
endif()
target_compile_options(layerstream_options INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${LAYERSTREAM_CXX_OPTIONS}>")
target_compile_options(layerstream_options INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:${LAYERSTREAM_CUDA_OPTIONS}>")
if(LAYERSTREAM_SANITIZE)
  target_compile_options(layerstream_options INTERFACE
    -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  target_link_options(layerstream_options INTERFACE -fsanitize=address,undefined)
endif()

function(layerstream_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC layerstream_options ${ARG_PUBLIC} PRIVATE ${ARG_PRIVATE})
endfunction()

# Sources that launch kernels: nvcc compiles them in a CUDA build, the C++ compiler otherwise.
function(layerstream_kernels)
  if(LAYERSTREAM_ENABLE_CUDA)
    set_source_files_properties(${ARGN} PROPERTIES LANGUAGE CUDA)
  endif()
endfunction()

function(layerstream_test name)
  cmake_parse_arguments(ARG "" "KERNEL_THREADS" "SOURCES;LIBRARIES" ${ARGN})
  if(NOT ARG_KERNEL_THREADS)
    set(ARG_KERNEL_THREADS 2)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LIBRARIES} layerstream_test_support GTest::gmock)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES
    TIMEOUT 1800  # the planner's searches take ten minutes under sanitizers on two busy cores
    ENVIRONMENT "OMP_PROC_BIND=false;OMP_NUM_THREADS=${ARG_KERNEL_THREADS};OMP_WAIT_POLICY=passive;LAYERSTREAM_TEST_DATA=${CMAKE_SOURCE_DIR}/tests")
endfunction()
