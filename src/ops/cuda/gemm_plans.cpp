#include "ops/cuda/gemm_plans.hpp"

#include <fmt/format.h>

#include <utility>

#include "core/error.hpp"
#include "ops/cuda/cublas_error.hpp"

namespace layerstream::ops::cuda {
namespace {

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return CUDA_R_64F;
    case DType::f32:
      return CUDA_R_32F;
    case DType::bf16:
      return CUDA_R_16BF;
    default:
      throw ContractError(
          fmt::format("GEMM: {} is no compute dtype; it takes fp64, fp32 or bf16", name_of(dtype)));
  }
}

/// A row-major matrix (rows, columns), which cuBLASLt reads as its column-major transpose.
CublasOwned<cublasLtMatrixLayout_t> row_major(const GemmKey& key, DType dtype, std::int64_t rows,
                                              std::int64_t columns) {
  cublasLtMatrixLayout_t layout = nullptr;
  LAYERSTREAM_CUBLAS(
      cublasLtMatrixLayoutCreate(&layout, cuda_type(dtype), static_cast<std::uint64_t>(columns),
                                 static_cast<std::uint64_t>(rows), columns),
      describe(key));
  return CublasOwned<cublasLtMatrixLayout_t>(layout);
}

template <class Value>
void set(const GemmKey& key, cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
         Value value) {
  LAYERSTREAM_CUBLAS(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)),
                     describe(key));
}

template <class Value>
void set(const GemmKey& key, cublasLtMatmulPreference_t preference,
         cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
  LAYERSTREAM_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)),
                     describe(key));
}

CublasOwned<cublasLtHandle_t> make_handle() {
  cublasLtHandle_t handle = nullptr;
  LAYERSTREAM_CUBLAS(cublasLtCreate(&handle), "the GEMMs of a stream");
  return CublasOwned<cublasLtHandle_t>(handle);
}

}  // namespace

std::string describe(const GemmKey& key) {
  return fmt::format("GEMM ({}, {}, {}) of {} a{} and b{} into {}, aligned to ({}, {}, {}, {}) bytes", key.m,
                     key.n, key.k, name_of(key.compute), key.a_transposed ? " transposed" : "",
                     key.b_transposed ? " transposed" : "", name_of(key.out), key.alignment[0],
                     key.alignment[1], key.alignment[2], key.alignment[3]);
}

std::uint32_t alignment_class(const void* pointer) {
  const std::uintptr_t bits = reinterpret_cast<std::uintptr_t>(pointer) | 16U;
  return static_cast<std::uint32_t>(bits & (~bits + 1));
}

GemmDescriptors::GemmDescriptors(const GemmKey& key) {
  // fp32 in CUBLAS_COMPUTE_32F is not TF32, and bf16 in it accumulates in fp32.
  const bool wide = key.compute == DType::f64;
  cublasLtMatmulDesc_t created = nullptr;
  LAYERSTREAM_CUBLAS(cublasLtMatmulDescCreate(&created, wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                              wide ? CUDA_R_64F : CUDA_R_32F),
                     describe(key));
  operation.reset(created);
  set(key, created, CUBLASLT_MATMUL_DESC_TRANSA, key.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(key, created, CUBLASLT_MATMUL_DESC_TRANSB, key.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  const auto operand = [&](bool transposed, std::int64_t rows, std::int64_t columns) {
    if (transposed) std::swap(rows, columns);
    return row_major(key, key.compute, rows, columns);
  };
  first = operand(key.b_transposed, key.k, key.n);
  second = operand(key.a_transposed, key.m, key.k);
  out = row_major(key, key.out, key.m, key.n);
}

std::vector<cublasLtMatmulHeuristicResult_t> gemm_candidates(cublasLtHandle_t handle, const GemmKey& key,
                                                             const GemmDescriptors& descriptors, int count) {
  cublasLtMatmulPreference_t created = nullptr;
  LAYERSTREAM_CUBLAS(cublasLtMatmulPreferenceCreate(&created), describe(key));
  const CublasOwned<cublasLtMatmulPreference_t> preference(created);
  const auto [a, b, addend, out] = key.alignment;
  set(key, created, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{gemm_workspace_bytes});
  set(key, created, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  set(key, created, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b);
  set(key, created, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a);
  set(key, created, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, addend);
  set(key, created, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out);

  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<std::size_t>(count));
  int found = 0;
  LAYERSTREAM_CUBLAS(
      cublasLtMatmulAlgoGetHeuristic(handle, descriptors.operation.get(), descriptors.first.get(),
                                     descriptors.second.get(), descriptors.out.get(), descriptors.out.get(),
                                     created, count, results.data(), &found),
      describe(key));
  results.resize(static_cast<std::size_t>(found));
  std::erase_if(results, [](const auto& result) {
    return result.state != CUBLAS_STATUS_SUCCESS || result.workspaceSize > gemm_workspace_bytes;
  });
  if (results.empty()) {
    throw CudaError(fmt::format("cuBLASLt has no algorithm within {} bytes of workspace for {}",
                                gemm_workspace_bytes, describe(key)));
  }
  return results;
}

GemmPlans::GemmPlans() : handle_(make_handle()) {}

GemmPlan& GemmPlans::plan(const GemmKey& key) {
  const auto known = plans_.find(key);
  if (known != plans_.end()) return known->second;
  GemmDescriptors descriptors(key);
  const cublasLtMatmulAlgo_t algorithm = gemm_candidates(handle(), key, descriptors, 1).front().algo;
  return plans_.emplace(key, GemmPlan{std::move(descriptors), algorithm}).first->second;
}

}  // namespace layerstream::ops::cuda
