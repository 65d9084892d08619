#include "ops/detail/gemm.hpp"

#include <type_traits>

#include "ops/detail/check.hpp"
#include "ops/detail/dispatch.hpp"
#include "ops/detail/host_gemm.hpp"
#include "ops/detail/panelled_gemm.hpp"
#include "ops/elementwise.hpp"

namespace layerstream::ops::detail {
namespace {

/// out += addend, unless the product already started from it.
void add_addend(const Context& context, const GemmArguments& g) {
  if (g.addend && !g.accumulates_in_place()) add(context, g.out, g.addend, g.out);
}

}  // namespace

void gemm(const char* operation, const Context& context, const GemmArguments& g) {
  dispatch_compute(g.a.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    using A = MathOf<T>;
    const GemmOperand<T> a{g.a.as<T>(), g.a.dim(1), g.a_transposed};
    const GemmOperand<T> b{g.b.as<T>(), g.b.dim(1), g.b_transposed};
    if constexpr (std::is_same_v<T, A>) {
      host_gemm(g.out.as<A>(), g.n(), g.m(), g.n(), g.k(), a, b, g.accumulates_in_place() ? A(1) : A(0));
      add_addend(context, g);
    } else {
      const auto space = execution_space(context);
      A* workspace = workspace_as<A>(operation, context, gemm_workspace(g.a.dtype()));
      if (g.out.dtype() == g.a.dtype()) {
        const T* addend = g.addend ? g.addend.as<T>() : nullptr;
        panelled_gemm(space, workspace, PanelledGemm<T>{g.out.as<T>(), g.m(), g.n(), g.k(), a, b, addend});
      } else {
        A* out = g.out.as<A>();
        const A* start = g.accumulates_in_place() ? out : nullptr;
        panelled_gemm(space, workspace, PanelledGemm<A>{out, g.m(), g.n(), g.k(), a, b, start});
        add_addend(context, g);
      }
    }
  });
}

std::size_t gemm_workspace(DType compute) {
  return compute == DType::bf16 ? panelled_gemm_workspace() : 0;
}

}  // namespace layerstream::ops::detail
