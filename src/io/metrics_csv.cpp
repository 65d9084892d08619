#include "io/metrics_csv.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "core/error.hpp"
#include "io/file_sink.hpp"

namespace layerstream::io {
namespace {

constexpr std::string_view first_column = "step";

bool is_header(std::string_view line) {
  return line == first_column || (line.starts_with(first_column) && line[first_column.size()] == ',');
}

std::optional<std::int64_t> step_of(std::string_view line, const std::string& place) {
  if (is_header(line)) return {};
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), step);
  if (error != std::errc{} || end == line.data() + line.size() || *end != ',') {
    throw FileError(fmt::format("{}: is neither the line of names nor one that begins with a step", place));
  }
  return step;
}

std::vector<std::string> columns_of(std::string_view header) {
  std::vector<std::string> columns;
  for (std::size_t comma = header.find(','); comma != std::string_view::npos;) {
    const std::size_t next = header.find(',', comma + 1);
    columns.emplace_back(header.substr(comma + 1, next - comma - 1));
    comma = next;
  }
  return columns;
}

/// RFC 4180.
std::string csv_cell(std::string_view text) {
  if (text.find_first_of(",\"\r\n") == std::string_view::npos) return std::string(text);
  std::string result = "\"";
  for (const char c : text) result += c == '"' ? std::string("\"\"") : std::string(1, c);
  return result + '"';
}

struct CellText {
  std::string operator()(std::int64_t value) const { return fmt::to_string(value); }
  std::string operator()(double value) const { return std::isfinite(value) ? fmt::to_string(value) : ""; }
  std::string operator()(bool value) const { return value ? "true" : "false"; }
  std::string operator()(const std::string& value) const { return csv_cell(value); }
};

}  // namespace

CsvMetrics::CsvMetrics(std::filesystem::path path, std::int64_t resumed_step,
                       std::shared_ptr<FileSystem> files)
    : files_(std::move(files)), path_(std::move(path)) {
  const std::string text = text_if_present(path_);
  const std::size_t kept = kept_bytes(text, resumed_step, path_, step_of);
  if (kept > 0) {
    const std::string_view header = std::string_view(text).substr(0, text.find('\n'));
    if (!is_header(header)) {
      throw FileError(fmt::format("{}:1: is not a line of names that begins with \"{}\"; move the file away",
                                  path_.string(), first_column));
    }
    columns_ = columns_of(header);
  }
  file_ = std::make_unique<AppendFile>(path_, kept, files_);
}

void CsvMetrics::write(std::int64_t step, std::initializer_list<Metric> metrics) {
  if (!has_columns_of(metrics)) add_columns_of(metrics);
  std::string line = fmt::to_string(step);
  for (const std::string& column : columns_) {
    line += ',';
    const auto metric = std::ranges::find(metrics, column, &Metric::first);
    if (metric != metrics.end()) line += std::visit(CellText{}, metric->second);
  }
  file_->append(line + '\n');
}

bool CsvMetrics::has_columns_of(std::initializer_list<Metric> metrics) const {
  return file_->bytes() > 0 && std::ranges::all_of(metrics, [&](const Metric& metric) {
           return std::ranges::find(columns_, metric.first) != columns_.end();
         });
}

void CsvMetrics::add_columns_of(std::initializer_list<Metric> metrics) {
  std::string names, cells;  // that every line grows by
  for (const auto& [name, value] : metrics) {
    if (std::ranges::find(columns_, name) != columns_.end()) continue;
    columns_.emplace_back(name);
    names += fmt::format(",{}", name);
    cells += ',';
  }
  const std::string before = text_if_present(path_);
  std::string after;
  for (std::size_t begin = 0; begin < before.size();) {
    const std::size_t end = before.find('\n', begin);
    after += before.substr(begin, end - begin) + (begin == 0 ? names : cells) + '\n';
    begin = end + 1;
  }
  if (after.empty()) after = std::string(first_column) + names + '\n';
  replace_file(files_, path_, after);
  file_ = std::make_unique<AppendFile>(path_, after.size(), files_);
}

}  // namespace layerstream::io
