#include "io/text_source.hpp"

#include <algorithm>
#include <span>
#include <string>
#include <string_view>

#include "core/error.hpp"
#include "io/byte_tokenizer.hpp"
#include "io/file_source.hpp"
#include "io/utf8.hpp"

namespace layerstream::io {

namespace {

constexpr std::size_t piece_bytes = std::size_t{64} << 20;

std::string read_whole_file(const InputFile& file, const PieceCallback& piece_done) {
  const FileSource source(file.path, PageCache::drop);
  std::string text(source.size(), '\0');
  const std::span bytes = std::as_writable_bytes(std::span(text));
  for (std::size_t begin = 0; begin < bytes.size(); begin += piece_bytes) {
    if (piece_done) piece_done(static_cast<std::int64_t>(begin));
    source.read(begin, bytes.subspan(begin, std::min(piece_bytes, bytes.size() - begin)));
  }
  return text;
}

/// End of the piece that begins at `begin`: behind a newline, so that no character is cut.
std::size_t end_of_piece(std::string_view text, std::size_t begin) {
  if (text.size() - begin <= piece_bytes) return text.size();
  const std::size_t newline = text.find('\n', begin + piece_bytes);
  return newline == std::string_view::npos ? text.size() : newline + 1;
}

/// Lines of a text, found in ascending order.
class LineCounter {
 public:
  explicit LineCounter(std::string_view text) : text_(text) {}

  /// Moves on to the line that holds `offset`, which must not lie before the last one asked for.
  void seek(std::size_t offset) {
    for (std::size_t end = text_.find('\n', begin_); end < offset; end = text_.find('\n', begin_)) {
      begin_ = end + 1;
      ++number_;
    }
  }
  std::size_t begin() const { return begin_; }
  /// Behind the line's newline.
  std::size_t end() const { return std::min(text_.find('\n', begin_), text_.size() - 1) + 1; }
  std::string place(const InputFile& file, std::size_t offset) const {
    return fmt::format("{}:{}:{}", file.path.string(), number_, offset - begin_ + 1);
  }

 private:
  std::string_view text_;
  std::size_t begin_ = 0;
  std::int64_t number_ = 1;
};

void append_valid_lines(const InputFile& file, std::string_view text, OnBadLine on_bad_line,
                        TokenStore& store, DatasetReport& report, const PieceCallback& piece_done) {
  LineCounter line(text);
  std::size_t begin = 0;  // of the text not yet appended: that of a line
  while (begin < text.size()) {
    if (piece_done) piece_done(file.bytes);
    const std::size_t end = end_of_piece(text, begin);
    const auto fault = find_utf8_fault(text.substr(begin, end - begin));
    if (!fault) {
      store.append_bytes(text.substr(begin, end - begin));
      begin = end;
      continue;
    }
    const std::size_t offset = begin + fault->offset;
    line.seek(offset);
    const std::string message = fmt::format("{}: not UTF-8: {}", line.place(file, offset), fault->cause);
    if (on_bad_line == OnBadLine::error) {
      throw FileError(message + "; correct or convert the file, or set on_bad_line: skip");
    }
    report.bad_lines.add(message);
    store.append_bytes(text.substr(begin, line.begin() - begin));
    begin = line.end();
  }
}

}  // namespace

void read_text_file(const InputFile& file, OnBadLine on_bad_line, TokenStore& store, DatasetReport& report,
                    const PieceCallback& piece_done) {
  const std::string path = file.path.string();
  const std::string text = read_whole_file(file, piece_done);
  if (text.empty()) {
    report.empty_files.add(path);
    return;
  }
  if (text.starts_with("version https://git-lfs.github.com/spec/") && text.size() < 1024) {
    throw FileError(fmt::format("{}: is a Git LFS pointer, not the data; run `git lfs pull`", path));
  }
  if (const std::size_t nul = text.find('\0'); nul != std::string::npos) {
    LineCounter line(text);
    line.seek(nul);
    const std::string place = line.place(file, nul);
    if (!file.from_directory && on_bad_line == OnBadLine::error) {
      throw FileError(place + ": a NUL byte: not a text file (UTF-16 must be converted to UTF-8)");
    }
    report.binary_files.add(place);
    return;
  }

  store.begin_source({path, true, true});
  store.begin_document(0);
  append_valid_lines(file, text, on_bad_line, store, report, piece_done);
  if (store.document_length() == 0) {
    report.empty_documents.add(path);
    return;
  }
  store.append_token(ByteTokenizer::end_of_document);
  store.finish_document();
  ++report.text_files;
}

}  // namespace layerstream::io
