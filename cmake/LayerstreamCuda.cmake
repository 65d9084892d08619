# The CUDA toolkit, cuDNN, and how CUDA sources are compiled.
if(CMAKE_VERSION VERSION_LESS 3.25.2)
  message(FATAL_ERROR "The CUDA build needs CMake 3.25.2 or newer (this is ${CMAKE_VERSION}), which can compile CUDA "
                      "as C++20; `pip install cmake` brings one")
endif()

# One architecture per build tree, which Kokkos decides as well: sm_90 unless said otherwise.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
enable_language(CUDA)
find_package(CUDAToolkit 12.4 REQUIRED)

# As on the host, one multiply and one add stay two roundings unless the code says fma. FMT_USE_CONSTEXPR:
# nvcc cannot read fmt 9's own choice.
set(LAYERSTREAM_CUDA_OPTIONS
  --fmad=false --expt-relaxed-constexpr --extended-lambda -Werror=all-warnings -DFMT_USE_CONSTEXPR=1
  "SHELL:-Xcompiler=-Wall,-Wextra,-Wno-unknown-pragmas,-ffp-contract=off")

# cuDNN and its header-only front end (PyPI: nvidia-cudnn-cu13, nvidia-cudnn-frontend).
find_path(LAYERSTREAM_CUDNN_INCLUDE_DIR cudnn.h REQUIRED
          HINTS ${CUDAToolkit_INCLUDE_DIRS} ENV CUDNN_PATH PATH_SUFFIXES include)
find_path(LAYERSTREAM_CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h
          HINTS ENV CUDNN_FRONTEND_PATH PATH_SUFFIXES include)
if(NOT LAYERSTREAM_CUDNN_FRONTEND_INCLUDE_DIR)
  message(STATUS "cudnn-frontend not found: fetching its release")
  include(FetchContent)
  FetchContent_Declare(cudnn_frontend
    URL "https://github.com/NVIDIA/cudnn-frontend/archive/refs/tags/v1.14.0.tar.gz" SOURCE_SUBDIR none)
  FetchContent_MakeAvailable(cudnn_frontend)
  set(LAYERSTREAM_CUDNN_FRONTEND_INCLUDE_DIR "${cudnn_frontend_SOURCE_DIR}/include")
endif()
find_library(LAYERSTREAM_CUDNN_LIBRARY NAMES cudnn libcudnn.so.9 REQUIRED
             HINTS ${CUDAToolkit_LIBRARY_DIR} ENV CUDNN_PATH PATH_SUFFIXES lib lib64)
add_library(layerstream_cudnn INTERFACE)
target_include_directories(layerstream_cudnn SYSTEM INTERFACE
  "${LAYERSTREAM_CUDNN_INCLUDE_DIR}" "${LAYERSTREAM_CUDNN_FRONTEND_INCLUDE_DIR}")
# cudnn-frontend's headers use the driver and the run-time compiler.
target_link_libraries(layerstream_cudnn INTERFACE "${LAYERSTREAM_CUDNN_LIBRARY}" CUDA::nvrtc CUDA::cuda_driver)
