#pragma once

#include "core/run_config.hpp"
#include "io/dataset_report.hpp"
#include "io/input_files.hpp"
#include "io/token_store.hpp"

namespace layerstream::io {

/// Appends the documents of a token shard: a safetensors file with rank-1 tensors
///   input_ids         (N) uint16, int32, uint32 or int64: tokens; nothing is added to them
///   target_mask       (N) uint8 or bool, optional: 1 where the token is a target; all are if absent
///   document_offsets  (D+1) int64, optional: ascending from 0 to N; one document if absent
/// Empty documents are skipped and noted in `report`.
///
/// Throws FileError for any other tensor, dtype, rank, length or order of offsets. A token outside the
/// vocabulary and a mask value that is neither 0 nor 1 throw FileError with file, tensor, index and value, or
/// under on_bad_line: skip leave out the document and are noted.
void read_token_shard(const InputFile& file, OnBadLine on_bad_line, TokenStore& store, DatasetReport& report,
                      const PieceCallback& piece_done = {});

}  // namespace layerstream::io
