#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "backends/host_region.hpp"
#include "engine/model_io.hpp"
#include "engine_fixture.hpp"
#include "io/safetensors.hpp"

namespace layerstream::test {

inline std::filesystem::path golden(const std::string& name) {
  const char* const data = std::getenv("LAYERSTREAM_TEST_DATA");
  return std::filesystem::path(data == nullptr ? "tests" : data) / "golden" / name;
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

inline void write_file(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

/// Message of the FileError that `call` must throw.
inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const FileError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no FileError";
  return "";
}

/// Slabs without an engine.
class Slabs {
 public:
  explicit Slabs(const ModelSpec& spec) : layout(make_layout(spec)) {
    Ledger planned;
    Arena dry = Arena::dry(Space::host, planned);
    const ParameterStore counted(layout, dry);
    region_ = HostRegion(planned.total(Space::host));
    arena_ = std::make_unique<Arena>(Space::host, region_.data(), region_.bytes(), ledger_);
    store = std::make_unique<ParameterStore>(layout, *arena_);
  }

  template <class Function>
  void for_each(const Function& function) const {
    for (int block = 0; block < layout.num_blocks(); ++block) {
      for (const Parameter& parameter : layout.blocks[static_cast<std::size_t>(block)].parameters) {
        function(block, parameter);
      }
    }
  }

  std::vector<std::uint32_t> bits(int block, const Parameter& parameter) const {
    std::vector<float> values(static_cast<std::size_t>(parameter.numel()));
    store->read(block, parameter, 0, values);
    std::vector<std::uint32_t> bits(values.size());
    std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
    return bits;
  }

  /// Every bit pattern that is a finite number; a function of the place alone.
  void fill_with_random_bits() {
    std::uint64_t stream = 100;
    for_each([&](int block, const Parameter& parameter) {
      std::vector<float> values(static_cast<std::size_t>(parameter.numel()));
      for (std::size_t i = 0; i < values.size(); ++i) {
        auto bits = static_cast<std::uint32_t>(uniform_at(9, stream, i) * 4294967296.0);
        if ((bits & 0x7f800000U) == 0x7f800000U) bits ^= 0x40000000U;
        std::memcpy(&values[i], &bits, sizeof(float));
      }
      store->write(block, parameter, 0, values);
      ++stream;
    });
  }

  ModelLayout layout;
  std::unique_ptr<ParameterStore> store;

 private:
  HostRegion region_;
  Ledger ledger_;
  std::unique_ptr<Arena> arena_;
};

/// A tensor as a file has it.
struct RawTensor {
  DType dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;
  friend bool operator==(const RawTensor&, const RawTensor&) = default;
};
using RawTensors = std::map<std::string, RawTensor>;

inline RawTensors read_tensors(const std::filesystem::path& directory) {
  const io::ModelFiles files(directory);
  RawTensors tensors;
  for (const std::string& name : files.names()) {
    const io::TensorEntry& entry = *files.find(name);
    std::vector<std::byte> bytes(static_cast<std::size_t>(entry.numel()) * size_of(entry.dtype));
    files.read(entry, 0, bytes);
    tensors[name] = {entry.dtype, entry.shape, std::move(bytes)};
  }
  return tensors;
}

inline void write_tensors(const std::filesystem::path& directory, const RawTensors& tensors) {
  std::filesystem::create_directories(directory);
  std::vector<io::TensorSpec> specs;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::i16}) {
    for (const auto& [name, tensor] : tensors) {
      if (tensor.dtype == dtype) specs.push_back({name, tensor.dtype, tensor.shape});
    }
  }
  io::SafetensorsWriter writer(std::make_shared<io::FileSystem>(), directory / "model.safetensors", specs);
  for (const io::TensorSpec& spec : specs) writer.append(spec.name, tensors.at(spec.name).bytes);
  writer.finish();
}

/// fp32 bits of a half in a file, by arithmetic of its own.
inline std::uint32_t widened(DType dtype, std::uint16_t half) {
  if (dtype == DType::bf16) return static_cast<std::uint32_t>(half) << 16;
  const int exponent = (half >> 10) & 0x1f;
  const int mantissa = half & 0x3ff;
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  if (exponent == 0x1f) return sign | 0x7f800000U | (static_cast<std::uint32_t>(mantissa) << 13);
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  const auto value = static_cast<float>(magnitude);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return sign | bits;
}

inline std::vector<std::uint32_t> widened(const RawTensor& tensor) {
  const std::size_t size = size_of(tensor.dtype);
  std::vector<std::uint32_t> result(tensor.bytes.size() / size);
  for (std::size_t i = 0; i < result.size(); ++i) {
    std::uint16_t half = 0;
    if (size == 4) {
      std::memcpy(&result[i], tensor.bytes.data() + i * 4, 4);
    } else {
      std::memcpy(&half, tensor.bytes.data() + i * 2, 2);
      result[i] = widened(tensor.dtype, half);
    }
  }
  return result;
}

inline std::vector<std::string> names_in(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace layerstream::test
