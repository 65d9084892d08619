#include "backends/peak_rates.hpp"

#include <array>

namespace layerstream {
namespace {

struct PeakRates {
  std::string_view name;  ///< part of what the driver calls the device; the first that fits counts
  double bf16;            ///< tensor cores, without sparsity
  double f32;             ///< CUDA cores: fp32 runs compute strictly in fp32
};

// Datasheets of NVIDIA, whose bf16 figures "with sparsity" are halved here: GH200 Grace Hopper Superchip
// (2024), H200 and H100 Tensor Core GPU (2024), A100 Tensor Core GPU (2021), L40S (2023); GeForce RTX 4090:
// Ada GPU architecture whitepaper (2022), table 2 (bf16 with fp32 accumulation).
constexpr std::array rates{
    PeakRates{"GH200", 989e12, 67e12},        PeakRates{"H200 NVL", 835e12, 60e12},
    PeakRates{"H200", 989e12, 67e12},         PeakRates{"H100 NVL", 835e12, 60e12},
    PeakRates{"H100 PCIe", 756e12, 51e12},    PeakRates{"H100", 989e12, 67e12},
    PeakRates{"A100", 312e12, 19.5e12},       PeakRates{"L40S", 362e12, 91.6e12},
    PeakRates{"RTX 4090", 165.2e12, 82.6e12},
};

}  // namespace

std::optional<double> peak_flops(std::string_view description, DType compute) {
  for (const PeakRates& peak : rates) {
    if (description.find(peak.name) == std::string_view::npos) continue;
    if (compute == DType::bf16) return peak.bf16;
    if (compute == DType::f32) return peak.f32;
  }
  return {};
}

}  // namespace layerstream
