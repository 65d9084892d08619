#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "core/error.hpp"
#include "io/checkpoint.hpp"
#include "io/checkpoint_names.hpp"
#include "io/file_sink.hpp"

namespace layerstream::io {

namespace fs = std::filesystem;

CheckpointWriter::CheckpointWriter(fs::path output_dir, std::int64_t step, std::shared_ptr<FileSystem> files)
    : files_(std::move(files)),
      output_dir_(std::move(output_dir)),
      temporary_(output_dir_ / checkpoint_name(step, temporary_suffix)) {
  LAYERSTREAM_EXPECT(step >= 0, "a checkpoint of step {}", step);
  manifest_.step = step;
  create_directories(*files_, output_dir_);
  remove_leftovers(output_dir_, *files_);
  remove_tree(*files_, temporary_);  // what could not be removed before is an error now
  if (files_->mkdir(temporary_.c_str(), 0777) != 0)
    throw system_error(temporary_, "creating the directory", errno);
}

CheckpointWriter::~CheckpointWriter() {
  writers_.clear();
  if (remove_temporary_) remove_tree_no_throw(*files_, temporary_);
}

fs::path CheckpointWriter::new_file(const std::string& name) {
  LAYERSTREAM_EXPECT(is_plain_file_name(name) && name != CheckpointManifest::file_name,
                     "{} as a checkpoint's file", in_quotes(name));
  const bool taken =
      std::ranges::any_of(manifest_.files, [&](const CheckpointFile& f) { return f.name == name; });
  LAYERSTREAM_EXPECT(!taken, "{}: {} is written twice", temporary_.string(), in_quotes(name));
  return temporary_ / name;
}

SafetensorsWriter& CheckpointWriter::safetensors(const std::string& name,
                                                 const std::vector<TensorSpec>& tensors,
                                                 const std::map<std::string, std::string>& metadata) {
  writers_.push_back(std::make_unique<SafetensorsWriter>(files_, new_file(name), tensors, metadata));
  manifest_.files.push_back({name, 0, ""});  // completed by commit()
  return *writers_.back();
}

void CheckpointWriter::text(const std::string& name, std::string_view content) {
  FileSink sink(files_, new_file(name));
  sink.append(content);
  sink.finish();
  manifest_.files.push_back({name, sink.bytes(), sink.hash().hex()});
}

fs::path CheckpointWriter::commit() {
  LAYERSTREAM_EXPECT(remove_temporary_, "{} is committed already", temporary_.string());
  for (const std::unique_ptr<SafetensorsWriter>& writer : writers_) {
    const FileSink& sink = writer->sink();
    LAYERSTREAM_EXPECT(sink.finished(), "{} is not finished", sink.path().string());
    const auto file =
        std::ranges::find(manifest_.files, sink.path().filename().string(), &CheckpointFile::name);
    file->bytes = sink.bytes();
    file->xxh3 = sink.hash().hex();
  }
  FileSink sink(files_, temporary_ / CheckpointManifest::file_name);
  sink.append(manifest_.to_json());
  sink.finish();
  sync_directory(*files_, temporary_);
  const fs::path final_path = output_dir_ / checkpoint_name(manifest_.step);
  put_in_place(final_path);
  return final_path;
}

void CheckpointWriter::put_in_place(const fs::path& final_path) {
  std::error_code ignored;
  const fs::path replaced = output_dir_ / checkpoint_name(manifest_.step, replaced_suffix);
  bool aside = false;
  if (fs::exists(fs::symlink_status(final_path, ignored))) {
    if (files_->exchange(temporary_.c_str(), final_path.c_str()) == 0) {
      // The old one now has the temporary name. It goes once the exchange is durable.
      remove_temporary_ = false;
      sync_directory(*files_, output_dir_);
      remove_tree_no_throw(*files_, temporary_);
      return;
    }
    if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP) {
      throw system_error(temporary_, fmt::format("exchanging with {}", final_path.string()), errno);
    }
    // Until the second rename, find_checkpoints and remove_leftovers know the old one by its suffix.
    rename(*files_, final_path, replaced);
    aside = true;
  }
  try {
    rename(*files_, temporary_, final_path);
  } catch (const FileError&) {
    if (aside) files_->rename(replaced.c_str(), final_path.c_str());
    throw;
  }
  remove_temporary_ = false;
  sync_directory(*files_, output_dir_);
  if (aside) remove_tree_no_throw(*files_, replaced);
}

}  // namespace layerstream::io
