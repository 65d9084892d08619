#include "io/token_shard.hpp"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "io/safetensors.hpp"

namespace layerstream::io {

namespace {

/// The integers of a rank-1 tensor, front to back, read a block at a time.
class IntegerStream {
 public:
  IntegerStream(const SafetensorsFile& file, const TensorEntry& entry) : file_(file), entry_(entry) {}

  /// @pre fewer than numel values were taken.
  std::int64_t next() {
    if (next_ == block_.size()) fill();
    return block_[next_++];
  }

 private:
  static constexpr std::int64_t block_elements = 1 << 18;

  void fill() {
    const std::int64_t count = std::min(block_elements, entry_.numel() - taken_);
    LAYERSTREAM_EXPECT(count > 0, "tensor '{}' has no more values", entry_.name);
    bytes_.resize(static_cast<std::size_t>(count) * size_of(entry_.dtype));
    file_.read(entry_, static_cast<std::uint64_t>(taken_) * size_of(entry_.dtype), bytes_);
    block_.resize(static_cast<std::size_t>(count));
    switch (entry_.dtype) {
      case DType::i64:
        widen<std::int64_t>();
        break;
      case DType::i32:
        widen<std::int32_t>();
        break;
      case DType::u32:
        widen<std::uint32_t>();
        break;
      case DType::u16:
        widen<std::uint16_t>();
        break;
      default:
        widen<std::uint8_t>();
        break;  // u8, boolean
    }
    taken_ += count;
    next_ = 0;
  }

  template <class T>
  void widen() {
    for (std::size_t i = 0; i < block_.size(); ++i) {
      T value;
      std::memcpy(&value, bytes_.data() + i * sizeof(T), sizeof(T));
      block_[i] = static_cast<std::int64_t>(value);
    }
  }

  const SafetensorsFile& file_;
  const TensorEntry& entry_;
  std::vector<std::byte> bytes_;
  std::vector<std::int64_t> block_;
  std::size_t next_ = 0;    // in block_
  std::int64_t taken_ = 0;  // values in this block and those before
};

/// A shard whose tensors have the right names, dtypes and lengths.
class TokenShard {
 public:
  explicit TokenShard(const InputFile& input)
      : path_(input.path.string()), file_(input.path, PageCache::drop) {
    for (const TensorEntry& entry : file_.entries()) {
      if (entry.name != "input_ids" && entry.name != "target_mask" && entry.name != "document_offsets") {
        throw FileError(
            fmt::format("{}: tensor '{}' is not part of a token shard, which has input_ids and optionally "
                        "target_mask and document_offsets",
                        path_, entry.name));
      }
    }
    ids_ =
        find("input_ids", {DType::u16, DType::i32, DType::u32, DType::i64}, "uint16, int32, uint32 or int64");
    if (ids_ == nullptr) {
      throw FileError(
          fmt::format("{}: no tensor 'input_ids'; token shards come from the tool that prepares data, "
                      "model weights are not training data",
                      path_));
    }
    mask_ = find("target_mask", {DType::u8, DType::boolean}, "uint8 or bool");
    if (mask_ != nullptr && mask_->numel() != num_tokens()) {
      throw FileError(fmt::format("{}: tensor 'target_mask' has {} elements, input_ids {}; they must match",
                                  path_, mask_->numel(), num_tokens()));
    }
    offsets_ = find("document_offsets", {DType::i64}, "int64");
    check_offsets();
  }

  const std::string& path() const { return path_; }
  std::int64_t num_tokens() const { return ids_->numel(); }
  bool has_offsets() const { return offsets_ != nullptr; }

  IntegerStream ids() const { return {file_, *ids_}; }
  std::optional<IntegerStream> mask() const {
    return mask_ == nullptr ? std::nullopt : std::optional<IntegerStream>(std::in_place, file_, *mask_);
  }

  /// Calls take(document number, tokens) for each document in order.
  template <class Take>
  void for_each_document(Take&& take) const {
    if (offsets_ == nullptr) {
      take(std::int64_t{0}, num_tokens());
      return;
    }
    IntegerStream offsets(file_, *offsets_);
    std::int64_t begin = offsets.next();
    for (std::int64_t d = 0; d + 1 < offsets_->numel(); ++d) {
      const std::int64_t end = offsets.next();
      take(d, end - begin);
      begin = end;
    }
  }

 private:
  const TensorEntry* find(std::string_view name, std::initializer_list<DType> allowed,
                          std::string_view allowed_names) const {
    const TensorEntry* entry = file_.find(name);
    if (entry == nullptr) return nullptr;
    if (std::find(allowed.begin(), allowed.end(), entry->dtype) == allowed.end()) {
      throw FileError(fmt::format("{}: tensor '{}' is {}; it must be {}", path_, name, name_of(entry->dtype),
                                  allowed_names));
    }
    if (entry->shape.size() != 1) {
      throw FileError(
          fmt::format("{}: tensor '{}' has rank {}; it must have rank 1, documents one after another", path_,
                      name, entry->shape.size()));
    }
    return entry;
  }

  void check_offsets() const {
    if (offsets_ == nullptr) return;
    const std::int64_t count = offsets_->numel();
    if (count == 0) {
      throw FileError(fmt::format("{}: tensor 'document_offsets' is empty; it must go from 0 to {}", path_,
                                  num_tokens()));
    }
    IntegerStream offsets(file_, *offsets_);
    std::int64_t before = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t offset = offsets.next();
      if (i == 0 && offset != 0) throw wrong_offset(i, offset, "the first must be 0");
      if (offset < before) throw wrong_offset(i, offset, fmt::format("less than {} before it", before));
      if (offset > num_tokens())
        throw wrong_offset(i, offset, fmt::format("beyond the {} tokens", num_tokens()));
      before = offset;
    }
    if (before != num_tokens()) {
      throw wrong_offset(count - 1, before,
                         fmt::format("the last must be {}, the number of tokens", num_tokens()));
    }
  }

  FileError wrong_offset(std::int64_t i, std::int64_t offset, std::string_view cause) const {
    return FileError(
        fmt::format("{}: tensor 'document_offsets': element {} is {}: {}", path_, i, offset, cause));
  }

  std::string path_;
  SafetensorsFile file_;
  const TensorEntry* ids_ = nullptr;
  const TensorEntry* mask_ = nullptr;     // or absent
  const TensorEntry* offsets_ = nullptr;  // or absent
};

}  // namespace

void read_token_shard(const InputFile& file, OnBadLine on_bad_line, TokenStore& store, DatasetReport& report,
                      const PieceCallback& piece_done) {
  constexpr std::int64_t tokens_of_piece = 1 << 20;
  const TokenShard shard(file);
  if (shard.num_tokens() == 0) {
    report.empty_files.add(shard.path());
    return;
  }
  store.begin_source({shard.path(), false, !shard.has_offsets()});
  IntegerStream ids = shard.ids();
  std::optional<IntegerStream> mask = shard.mask();
  std::int64_t index = 0;  // of the token in the shard
  shard.for_each_document([&](std::int64_t number, std::int64_t length) {
    if (length == 0) {
      report.empty_documents.add(fmt::format("{}: document {}", shard.path(), number));
      return;
    }
    std::string fault;  // the document's first
    store.begin_document(number);
    for (const std::int64_t end = index + length; index < end; ++index) {
      if (piece_done && index % tokens_of_piece == 0) {
        piece_done(static_cast<std::int64_t>(static_cast<double>(file.bytes) * static_cast<double>(index) /
                                             static_cast<double>(shard.num_tokens())));
      }
      const std::int64_t id = ids.next();
      const std::int64_t is_target = mask ? mask->next() : 1;
      if (!fault.empty()) continue;
      if (id < 0 || id >= store.vocab_size()) {
        fault = fmt::format(
            "{}: document {}: tensor 'input_ids': element {} is {}, outside the vocabulary of {} tokens",
            shard.path(), number, index, id, store.vocab_size());
      } else if (is_target != 0 && is_target != 1) {
        fault = fmt::format("{}: document {}: tensor 'target_mask': element {} is {}, neither 0 nor 1",
                            shard.path(), number, index, is_target);
      } else {
        store.append_token(static_cast<std::int32_t>(id), is_target == 1);
      }
    }
    if (fault.empty()) {
      store.finish_document();
      return;
    }
    if (on_bad_line == OnBadLine::error) {
      throw FileError(
          fault +
          "; prepare the shard with the tokenizer of this model, or set on_bad_line: skip to leave out "
          "such documents");
    }
    report.bad_documents.add(fault);
    store.discard_document();
  });
  ++report.token_shards;
}

}  // namespace layerstream::io
