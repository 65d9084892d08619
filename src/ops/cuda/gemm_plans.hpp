#pragma once

#include <cublasLt.h>

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "core/dtype.hpp"
#include "ops/context.hpp"
#include "ops/linear.hpp"

namespace layerstream::ops::cuda {

/// Workspace that a GEMM may use.
inline constexpr std::size_t gemm_workspace_bytes = gpu_linear_workspace;

/// All that the choice of an algorithm depends on, for out (m, n) = op(a) · op(b) + addend in row-major
/// order.
struct GemmKey {
  std::int64_t m, n, k;
  DType compute, out;
  bool a_transposed, b_transposed;
  /// Bytes, as from alignment_class, of a, b, addend (out's without one) and out.
  std::array<std::uint32_t, 4> alignment;

  friend auto operator<=>(const GemmKey&, const GemmKey&) = default;
};

/// "GEMM (m, n, k) = ...", for messages.
std::string describe(const GemmKey& key);

/// Largest power of two up to 16 that divides the address. No kernel asks for more than 16 bytes (vector
/// loads, TMA); stopping there keeps the choice, and with it the bits, the same wherever an aligned row
/// begins.
std::uint32_t alignment_class(const void* pointer);

struct CublasDestroy {
  void operator()(cublasLtHandle_t handle) const { (void)cublasLtDestroy(handle); }
  void operator()(cublasLtMatmulDesc_t operation) const { (void)cublasLtMatmulDescDestroy(operation); }
  void operator()(cublasLtMatrixLayout_t layout) const { (void)cublasLtMatrixLayoutDestroy(layout); }
  void operator()(cublasLtMatmulPreference_t preference) const {
    (void)cublasLtMatmulPreferenceDestroy(preference);
  }
};
template <class Pointer>
using CublasOwned = std::unique_ptr<std::remove_pointer_t<Pointer>, CublasDestroy>;

/// A product in the column-major terms of cuBLASLt, where row-major out is outᵀ = op(b)ᵀ · op(a)ᵀ: its first
/// operand is our b, its second our a.
struct GemmDescriptors {
  /// @throws CudaError
  explicit GemmDescriptors(const GemmKey& key);

  CublasOwned<cublasLtMatmulDesc_t> operation;
  CublasOwned<cublasLtMatrixLayout_t> first, second, out;  // out also describes the addend
};

/// The heuristic's choices within gemm_workspace_bytes, best first, at most `count` and at least one. Sums
/// that are split over the inner extent are added in the compute type, never in the output type.
/// @throws CudaError if there is no algorithm.
std::vector<cublasLtMatmulHeuristicResult_t> gemm_candidates(cublasLtHandle_t handle, const GemmKey& key,
                                                             const GemmDescriptors& descriptors, int count);

struct GemmPlan {
  GemmDescriptors descriptors;
  cublasLtMatmulAlgo_t algorithm;
  bool tried = false;  ///< against other algorithms
};

/// One stream's cuBLASLt handle, and a plan for each product it has met. Used by one thread at a time.
class GemmPlans {
 public:
  /// @throws CudaError
  GemmPlans();

  cublasLtHandle_t handle() const { return handle_.get(); }

  /// The heuristic's first choice, asked for once per key, unless a rehearsal found a faster one with the
  /// same bits: the same key gives the same bits in every process on one GPU model and library version. The
  /// reference lives as long as this object.
  /// @throws CudaError
  GemmPlan& plan(const GemmKey& key);

  /// While it is on, the first product of each key tries other algorithms (see Libraries::set_rehearsing).
  void set_rehearsing(bool rehearsing) { rehearsing_ = rehearsing; }
  bool is_rehearsing() const { return rehearsing_; }

 private:
  CublasOwned<cublasLtHandle_t> handle_;
  std::map<GemmKey, GemmPlan> plans_;
  bool rehearsing_ = false;
};

/// Of the context's stream; defined beside Libraries. @throws ContractError if the context has no libraries.
GemmPlans& gemm_plans(const Context& context);

}  // namespace layerstream::ops::cuda
