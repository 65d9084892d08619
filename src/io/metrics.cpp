#include "io/metrics.hpp"

#include <fcntl.h>

#include <cerrno>
#include <system_error>

#include "core/error.hpp"
#include "io/file_source.hpp"
#include "io/json_text.hpp"

namespace layerstream::io {

namespace {

/// Length of the part of `text` that a run resumed at `resumed_step` keeps.
std::size_t kept_bytes(std::string_view text, std::int64_t resumed_step, const std::filesystem::path& path) {
  std::size_t begin = 0;
  for (std::int64_t line = 1; begin < text.size(); ++line) {
    const std::size_t end = text.find('\n', begin);
    if (end == std::string_view::npos) return begin;  // torn
    nlohmann::json json;
    try {
      json = parse_json(text.substr(begin, end - begin), fmt::format("{}:{}", path.string(), line));
      if (!json.is_object()) throw FileError(fmt::format("{}:{}: is not a JSON object", path.string(), line));
    } catch (const FileError& error) {
      if (end + 1 == text.size()) return begin;  // torn where the disk lost its front
      throw FileError(fmt::format("{}; repair the line, or move the file away", error.what()));
    }
    const auto step = json.find("step");
    if (step != json.end() && step->is_number_integer() && step->get<std::int64_t>() > resumed_step)
      return begin;
    begin = end + 1;
  }
  return begin;
}

nlohmann::ordered_json to_json(const MetricValue& value) {
  return std::visit([](const auto& v) { return nlohmann::ordered_json(v); }, value);
}

}  // namespace

MetricsWriter::MetricsWriter(std::filesystem::path path, std::int64_t resumed_step,
                             std::shared_ptr<FileSystem> files)
    : files_(std::move(files)), path_(std::move(path)) {
  std::error_code ignored;
  std::size_t present = 0;
  if (std::filesystem::exists(path_, ignored)) {
    const std::string text = read_text(path_);
    present = text.size();
    bytes_ = kept_bytes(text, resumed_step, path_);
  }
  fd_ = files_->open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd_ < 0) throw system_error(path_, "opening the file", errno);
  if (bytes_ != present && files_->truncate(fd_, static_cast<off_t>(bytes_)) != 0) {
    const int error_number = errno;
    files_->close(fd_);
    throw system_error(path_, fmt::format("cutting the file to {} bytes", bytes_), error_number);
  }
}

MetricsWriter::~MetricsWriter() {
  files_->close(fd_);
}

void MetricsWriter::write(std::int64_t step, std::initializer_list<Metric> metrics) {
  nlohmann::ordered_json json{{"step", step}};
  for (const auto& [name, value] : metrics) json[std::string(name)] = to_json(value);
  const std::string line = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";

  std::string_view left = line;
  while (!left.empty()) {
    const ssize_t written = files_->write(fd_, left.data(), left.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      const int error_number = written < 0 ? errno : ENOSPC;
      files_->truncate(fd_, static_cast<off_t>(bytes_));  // no torn line before the next one
      throw system_error(path_, fmt::format("writing {} bytes", line.size()), error_number);
    }
    left.remove_prefix(static_cast<std::size_t>(written));
  }
  bytes_ += line.size();
}

}  // namespace layerstream::io
