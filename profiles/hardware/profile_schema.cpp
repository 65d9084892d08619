#include "profiles/hardware/profile_schema.hpp"

namespace layerstream {
namespace {

template <auto Section, auto Member>
auto* in(HardwareProfile& profile) {
  return &(profile.*Section.*Member);
}

constexpr auto device = &HardwareProfile::device;
constexpr auto link = &HardwareProfile::link;
constexpr auto host = &HardwareProfile::host;
using Device = HardwareProfile::Device;
using Link = HardwareProfile::Link;
using Host = HardwareProfile::Host;
using Text = ProfileKey::Text;
using Flag = ProfileKey::Flag;
using Number = ProfileKey::Number;
using Curve = ProfileKey::Curve;

}  // namespace

std::vector<ProfileKey> profile_schema() {
  return {
      {"", "name", Text([](HardwareProfile& p) { return &p.name; })},
      {"", "description", Text([](HardwareProfile& p) { return &p.description; })},

      {"device", "name", Text(in<device, &Device::name>)},
      {"device", "simulated", Flag(in<device, &Device::simulated>)},
      {"device", "memory_bytes", Number{in<device, &Device::memory_bytes>, memory_bytes}},
      {"device", "copy_bytes_per_second",
       Number{in<device, &Device::copy_bytes_per_second>, bytes_per_second}},
      {"device", "bf16_gemm_flops_per_second",
       Curve{in<device, &Device::bf16_gemm_flops_per_second>, flops_per_second, "tokens"}},
      {"device", "f32_gemm_flops_per_second",
       Number{in<device, &Device::f32_gemm_flops_per_second>, flops_per_second}},
      {"device", "attention_forward_flops_per_second",
       Curve{in<device, &Device::attention_forward_flops_per_second>, flops_per_second, "row_tokens"}},
      {"device", "attention_backward_flops_per_second",
       Curve{in<device, &Device::attention_backward_flops_per_second>, flops_per_second, "row_tokens"}},
      {"device", "attention_backward_nondeterministic_flops_per_second",
       Curve{in<device, &Device::attention_backward_nondeterministic_flops_per_second>, flops_per_second,
             "row_tokens"}},
      {"device", "cool_ratio", Number{in<device, &Device::cool_ratio>, speed_ratio}},
      {"device", "f32_attention_flops_per_second",
       Number{in<device, &Device::f32_attention_flops_per_second>, flops_per_second}},
      {"device", "adamw_parameters_per_second",
       Number{in<device, &Device::adamw_parameters_per_second>, parameters_per_second}},
      {"device", "kernel_seconds", Number{in<device, &Device::kernel_seconds>, duration_seconds}},

      {"link", "coherent", Flag(in<link, &Link::coherent>)},
      {"link", "to_device_bytes_per_second",
       Number{in<link, &Link::to_device_bytes_per_second>, bytes_per_second}},
      {"link", "to_host_bytes_per_second",
       Number{in<link, &Link::to_host_bytes_per_second>, bytes_per_second}},
      {"link", "duplex_bytes_per_second", Number{in<link, &Link::duplex_bytes_per_second>, bytes_per_second}},
      {"link", "copy_seconds", Number{in<link, &Link::copy_seconds>, duration_seconds}},
      {"link", "kernel_read_bytes_per_second",
       Number{in<link, &Link::kernel_read_bytes_per_second>, bytes_per_second}},
      {"link", "kernel_write_bytes_per_second",
       Number{in<link, &Link::kernel_write_bytes_per_second>, bytes_per_second}},
      {"link", "adamw_in_place_parameters_per_second",
       Number{in<link, &Link::adamw_in_place_parameters_per_second>, parameters_per_second}},
      {"link", "adamw_in_place_thread_blocks",
       Number{in<link, &Link::adamw_in_place_thread_blocks>, thread_block_count}},

      {"host", "name", Text(in<host, &Host::name>)},
      {"host", "memory_bytes", Number{in<host, &Host::memory_bytes>, memory_bytes}},
      {"host", "cores", Number{in<host, &Host::cores>, core_count}},
      {"host", "triad_bytes_per_second", Number{in<host, &Host::triad_bytes_per_second>, bytes_per_second}},
      {"host", "adamw_parameters_per_second",
       Number{in<host, &Host::adamw_parameters_per_second>, parameters_per_second}},
      {"host", "adamw_beside_copies_parameters_per_second",
       Number{in<host, &Host::adamw_beside_copies_parameters_per_second>, parameters_per_second}},
      {"host", "copies_beside_adamw_bytes_per_second",
       Number{in<host, &Host::copies_beside_adamw_bytes_per_second>, bytes_per_second}},
      {"host", "handover_seconds", Number{in<host, &Host::handover_seconds>, duration_seconds}},
  };
}

}  // namespace layerstream
