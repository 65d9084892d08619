#pragma once

#include "core/run_config.hpp"
#include "io/dataset_report.hpp"
#include "io/input_files.hpp"
#include "io/token_store.hpp"

namespace layerstream::io {

/// Appends a UTF-8 text file as one document of the byte tokenizer, its bytes as they are (CRLF included),
/// ended by ByteTokenizer::end_of_document. The file is held in memory while it is read.
///
/// Skipped and noted in `report`: empty files; files with a NUL byte, if found in a directory or under
/// on_bad_line: skip; under on_bad_line: skip also the lines that are not UTF-8. Otherwise these throw
/// FileError with "file:line:byte: cause", line and byte counted from 1, as does a file that cannot be read
/// or is a Git LFS pointer.
void read_text_file(const InputFile& file, OnBadLine on_bad_line, TokenStore& store, DatasetReport& report,
                    const PieceCallback& piece_done = {});

}  // namespace layerstream::io
