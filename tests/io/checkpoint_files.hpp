#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "io/checkpoint.hpp"
#include "tests/support/scratch_directory.hpp"

namespace layerstream::io::testing {

using test::fast_directory;

/// Content of a test checkpoint: every byte depends on `mark`.
inline std::vector<std::byte> checkpoint_data(int mark, std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i)
    bytes[i] = static_cast<std::byte>((i * 7 + static_cast<unsigned>(mark) * 31) & 0xff);
  return bytes;
}

/// Two safetensors files open at once, filled in pieces, and one text file.
inline std::filesystem::path save_checkpoint(
    const std::filesystem::path& output_dir, std::int64_t step, int mark,
    const std::shared_ptr<FileSystem>& files = std::make_shared<FileSystem>()) {
  CheckpointWriter writer(output_dir, step, files);
  const std::vector<std::byte> data = checkpoint_data(mark, 3000);
  SafetensorsWriter& weights = writer.safetensors("model.safetensors", {{"w", DType::f32, {500}}});
  SafetensorsWriter& moments = writer.safetensors("optimizer.safetensors", {{"m", DType::f32, {250}}});
  weights.append("w", std::span(data).subspan(0, 700));
  moments.append("m", std::span(data).subspan(2000, 1000));
  weights.append("w", std::span(data).subspan(700, 1300));
  moments.finish();
  weights.finish();
  writer.text("state.json", "{\"mark\": " + std::to_string(mark) + "}");
  return writer.commit();
}

/// Reads a checkpoint made by save_checkpoint in full, checks each byte, and returns its mark.
inline int check_checkpoint(const std::filesystem::path& path) {
  const CheckpointReader reader(path, Verify::hashes);
  EXPECT_EQ(reader.files().size(), 3u);
  const std::string state = reader.text("state.json");
  const int mark = std::stoi(state.substr(state.find(':') + 1));
  const std::vector<std::byte> data = checkpoint_data(mark, 3000);
  std::vector<std::byte> read(3000);
  const SafetensorsFile weights = reader.safetensors("model.safetensors");
  weights.read(*weights.find("w"), 0, std::span(read).first(2000));
  const SafetensorsFile moments = reader.safetensors("optimizer.safetensors");
  moments.read(*moments.find("m"), 0, std::span(read).subspan(2000));
  EXPECT_TRUE(read == data) << path;
  return mark;
}

/// Names in a directory, sorted, between blanks.
inline std::string names_in(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  for (const auto& item : std::filesystem::directory_iterator(directory))
    names.push_back(item.path().filename().string());
  std::sort(names.begin(), names.end());
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : " ") + name;
  return text;
}

}  // namespace layerstream::io::testing
