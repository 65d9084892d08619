#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace layerstream {

/// A number and who says so: the measurement, the publication, or the reasoning behind an estimate.
struct Rate {
  double value = 0.0;
  std::string source;
};

/// A rate that depends on the size of the work.
class RateCurve {
 public:
  struct Point {
    double at = 0.0;
    Rate rate;
  };

  RateCurve() = default;
  /// @pre at least one point, `at` ascending and positive.
  explicit RateCurve(std::vector<Point> points) : points_(std::move(points)) {}

  /// Linear in the logarithm of `size` between points, constant beyond them. @pre not empty.
  double at(double size) const;
  const std::vector<Point>& points() const { return points_; }

 private:
  std::vector<Point> points_;
};

/// What a machine can do. Units are in the names; all rates are sustained ones, of a warm machine.
struct HardwareProfile {
  std::string name;         ///< "h200-pcie5-128g"
  std::string description;  ///< a line about the machine and where the numbers are from

  struct Device {
    std::string name;
    /// Its kernels run on the host's cores and in the host's memory (a CPU build).
    bool simulated = false;
    Rate memory_bytes;
    Rate copy_bytes_per_second;                    ///< device memory, read and written bytes counted
    RateCurve bf16_gemm_flops_per_second;          ///< fp32 accumulation; over tokens of a chunk
    Rate f32_gemm_flops_per_second;                ///< strict fp32
    RateCurve attention_forward_flops_per_second;  ///< bf16, FLOPs of visible pairs; over tokens of a row
    RateCurve attention_backward_flops_per_second;
    RateCurve attention_backward_nondeterministic_flops_per_second;  ///< bf16 with `deterministic: false`
    /// Matrix products of a card that has rested, over the sustained rates above: power limits the clock.
    Rate cool_ratio;
    Rate f32_attention_flops_per_second;  ///< both directions
    Rate adamw_parameters_per_second;     ///< state and gradient in device memory
    Rate kernel_seconds;                  ///< what each launch costs beside the work
  } device;

  struct Link {
    bool coherent = false;  ///< kernels reach any host memory (Grace Hopper)
    Rate to_device_bytes_per_second, to_host_bytes_per_second;  ///< pinned, alone, large copies
    Rate duplex_bytes_per_second;                               ///< both directions together
    Rate copy_seconds;                                          ///< what each copy costs beside its bytes
    Rate kernel_read_bytes_per_second, kernel_write_bytes_per_second;  ///< kernels on host memory
    Rate adamw_in_place_parameters_per_second;  ///< a device kernel on state in host memory
    Rate adamw_in_place_thread_blocks;          ///< of that kernel, at its fastest
  } link;

  struct Host {
    std::string name;
    Rate memory_bytes;
    Rate cores;
    Rate triad_bytes_per_second;       ///< 24 bytes an element: what is written is not counted as read
    Rate adamw_parameters_per_second;  ///< alone, all cores; 28 bytes a parameter
    /// The two at the same time, copies in both directions.
    Rate adamw_beside_copies_parameters_per_second, copies_beside_adamw_bytes_per_second;
    Rate handover_seconds;  ///< from the end of an operation until a waiting thread has issued the next
  } host;

  /// Bytes a second that host memory serves when the optimizer and copies share it.
  double host_memory_bytes_per_second() const;
};

/// Bytes of state and gradient that AdamW moves: two halves, two moments, each read and written; gradient
/// read.
inline constexpr double adamw_bytes_per_parameter = 28.0;

/// Reads a profile and checks it. Throws ConfigError that names file, line and key of everything that is
/// missing, unknown, given twice, not finite, without a source, outside of what any machine can do (a link of
/// less than 1 MB/s or more than 100 TB/s: a slip of units), or at odds with another rate.
HardwareProfile load_hardware_profile(const std::filesystem::path& path);
HardwareProfile parse_hardware_profile(std::string_view yaml, std::string_view source_name);

/// The profile as YAML that `parse_hardware_profile` takes. @param comment lines put before it, without `#`.
std::string to_yaml(const HardwareProfile& profile, std::string_view comment = {});

}  // namespace layerstream
