// Malformed files: each fault is refused with its own message.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "core/error.hpp"
#include "data_files.hpp"
#include "io/safetensors.hpp"

namespace layerstream::io {
namespace {

using ::testing::AllOf;
using testing::DataDirectory;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::StartsWith;

std::string file_of(const std::string& header, const std::string& data, std::uint64_t length) {
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file + header + data;
}
std::string file_of(const std::string& header, std::size_t data_bytes = 0) {
  return file_of(header, std::string(data_bytes, 'd'), header.size());
}

class MalformedSafetensors : public ::testing::Test {
 protected:
  /// Message for a file of these bytes; checks that it names the file.
  std::string refusal(const std::string& bytes) {
    const std::string path = directory_.write("x.safetensors", bytes);
    const std::string message = message_of<FileError>([&] { SafetensorsFile{path}; });
    EXPECT_THAT(message, StartsWith(path + ": "));
    return message.substr(std::min(message.size(), path.size() + 2));
  }
  /// The same for one tensor "w" of the given fields.
  std::string tensor_refusal(const std::string& fields, std::size_t data_bytes = 8) {
    const std::string message = refusal(file_of("{\"w\":{" + fields + "}}", data_bytes));
    EXPECT_THAT(message, StartsWith("tensor \"w\": "));
    return message.substr(std::min<std::size_t>(message.size(), 12));
  }

  DataDirectory directory_;
};

TEST_F(MalformedSafetensors, AbsentFileIsNamedWithTheCause) {
  const std::string path = directory_.path("none.safetensors");
  EXPECT_EQ(message_of<FileError>([&] { SafetensorsFile{path}; }),
            path + ": opening the file failed: No such file or directory");
}

TEST_F(MalformedSafetensors, DirectoryInsteadOfAFile) {
  EXPECT_EQ(message_of<FileError>([&] { SafetensorsFile{directory_.root()}; }),
            directory_.root() + ": is not a regular file");
}

TEST_F(MalformedSafetensors, EmptyFile) {
  EXPECT_EQ(refusal(""), "too short for a safetensors file: 0 bytes, the header length alone takes 8");
}

TEST_F(MalformedSafetensors, ShortFile) {
  EXPECT_EQ(refusal("1234567"), "too short for a safetensors file: 7 bytes, the header length alone takes 8");
}

TEST_F(MalformedSafetensors, GitLfsPointer) {
  EXPECT_EQ(refusal("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"),
            "is a Git LFS pointer, not the data; run `git lfs pull` in its repository");
}

TEST_F(MalformedSafetensors, HeaderLengthAboveTheLimit) {
  EXPECT_EQ(
      refusal(file_of("{}", "", 100'000'001)),
      "header length 100000001 is above the format's limit of 100000000 bytes; is this a safetensors file?");
  EXPECT_THAT(refusal(file_of("{}", "", UINT64_MAX)),
              HasSubstr("header length 18446744073709551615 is above"));
}

TEST_F(MalformedSafetensors, HeaderLengthBeyondTheFile) {
  EXPECT_EQ(refusal(file_of("{}", "", 3)),
            "header length 3 reaches beyond the file of 10 bytes: it was cut off, fetch it again");
}

TEST_F(MalformedSafetensors, HeaderIsNotUtf8) {
  EXPECT_EQ(refusal(file_of("{\"\xc3\x28\":1}")), "the header is not UTF-8 at its byte 4");
  EXPECT_EQ(refusal(file_of("{\"\xff\":1}")), "the header is not UTF-8 at its byte 3");
}

TEST_F(MalformedSafetensors, HeaderIsNotJson) {
  EXPECT_THAT(refusal(file_of("{\"w\": nonsense}")), StartsWith("the header is not JSON at its byte 8: "));
  EXPECT_THAT(refusal(file_of("{\"w\"")), StartsWith("the header is not JSON at its byte 5: "));
  EXPECT_THAT(refusal(file_of("{} {}")), StartsWith("the header is not JSON at its byte 4: "));
  EXPECT_THAT(refusal(file_of("")), StartsWith("the header is not JSON at its byte 1: "));
}

TEST_F(MalformedSafetensors, HeaderHoldsAZeroByte) {
  EXPECT_EQ(refusal(file_of(std::string("{}\0\0", 4))), "the header is not JSON at its byte 2: a zero byte");
}

TEST_F(MalformedSafetensors, HeaderStartsWithAByteOrderMark) {
  EXPECT_EQ(refusal(file_of("\xef\xbb\xbf{}")), "the header is not JSON at its byte 0: a byte-order mark");
}

TEST_F(MalformedSafetensors, HeaderIsNotAnObject) {
  EXPECT_EQ(refusal(file_of("[1]")), "the header is an array instead of a JSON object");
  EXPECT_EQ(refusal(file_of("17")), "the header is 17 instead of a JSON object");
  EXPECT_EQ(refusal(file_of("\"x\"")), "the header is the string \"x\" instead of a JSON object");
  EXPECT_EQ(refusal(file_of("null")), "the header is null instead of a JSON object");
}

TEST_F(MalformedSafetensors, DeepNestingIsRefusedAtOnce) {
  EXPECT_EQ(refusal(file_of(std::string(1'000'000, '['))), "the header is an array instead of a JSON object");
}

TEST_F(MalformedSafetensors, TensorIsNotAnObject) {
  EXPECT_EQ(refusal(file_of("{\"w\":[1]}")), "tensor \"w\": is described by an array instead of an object");
}

TEST_F(MalformedSafetensors, MissingField) {
  EXPECT_EQ(tensor_refusal(R"("shape":[2],"data_offsets":[0,8])"), "field \"dtype\" is missing");
  EXPECT_EQ(tensor_refusal(R"("dtype":"F32","data_offsets":[0,8])"), "field \"shape\" is missing");
  EXPECT_EQ(tensor_refusal(R"("dtype":"F32","shape":[2])"), "field \"data_offsets\" is missing");
}

TEST_F(MalformedSafetensors, UnknownField) {
  EXPECT_EQ(tensor_refusal(R"("dtype":"F32","stride":[1])"), "unknown field \"stride\"");
}

TEST_F(MalformedSafetensors, RepeatedField) {
  EXPECT_EQ(tensor_refusal(R"("dtype":"F32","dtype":"F32")"), "field \"dtype\" occurs twice");
}

TEST_F(MalformedSafetensors, UnknownDtype) {
  EXPECT_EQ(tensor_refusal(R"("dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8])"),
            "unknown dtype \"F8_E4M3\"; this program reads F64, F32, F16, BF16, I64, I32, I16, I8, U64, U32, "
            "U16, U8, "
            "BOOL");
  EXPECT_THAT(tensor_refusal(R"("dtype":"f32","shape":[2],"data_offsets":[0,8])"),
              StartsWith("unknown dtype \"f32\""));
}

TEST_F(MalformedSafetensors, FieldOfTheWrongType) {
  EXPECT_EQ(tensor_refusal(R"("dtype":7)"), "dtype is 7 instead of a string");
  EXPECT_EQ(tensor_refusal(R"("shape":"2")"), "shape is the string \"2\" instead of an array");
  EXPECT_EQ(tensor_refusal(R"("shape":[[2]])"),
            "shape holds an array instead of a non-negative 64-bit integer");
  EXPECT_EQ(tensor_refusal(R"("data_offsets":{})"), "data_offsets is an object instead of an array");
  EXPECT_EQ(tensor_refusal(R"("data_offsets":[0,true])"),
            "data_offsets holds true instead of a non-negative 64-bit integer");
}

TEST_F(MalformedSafetensors, DuplicateTensor) {
  EXPECT_EQ(refusal(file_of(R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                            R"("w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                            2)),
            "tensor \"w\" occurs twice in the header");
  // The same name, spelled with an escape.
  EXPECT_EQ(refusal(file_of(R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                            R"("\u0077":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                            2)),
            "tensor \"w\" occurs twice in the header");
}

TEST_F(MalformedSafetensors, DuplicateMetadata) {
  EXPECT_EQ(refusal(file_of(R"({"__metadata__":{},"__metadata__":{}})")),
            "__metadata__ occurs twice in the header");
  EXPECT_EQ(refusal(file_of(R"({"__metadata__":{"a":"1","a":"2"}})")), "__metadata__ has key \"a\" twice");
}

TEST_F(MalformedSafetensors, MetadataOfTheWrongType) {
  EXPECT_EQ(refusal(file_of(R"({"__metadata__":"pt"})")),
            "__metadata__ is the string \"pt\" instead of an object");
  EXPECT_EQ(refusal(file_of(R"({"__metadata__":{"format":1}})")),
            "__metadata__ key \"format\" is 1 instead of a string");
}

TEST_F(MalformedSafetensors, NegativeShape) {
  EXPECT_EQ(tensor_refusal(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"),
            "shape holds -2 instead of a non-negative 64-bit integer");
}

TEST_F(MalformedSafetensors, FractionalShape) {
  EXPECT_EQ(tensor_refusal(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"),
            "shape holds 2.0 instead of a non-negative 64-bit integer");
}

TEST_F(MalformedSafetensors, OverflowingShape) {
  // One extent beyond int64, beyond uint64, a product beyond int64, and bytes beyond int64.
  EXPECT_EQ(tensor_refusal(R"("dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,8])"),
            "shape overflows: it holds 9223372036854775808");
  EXPECT_EQ(tensor_refusal(R"("dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,8])"),
            "shape holds 18446744073709551616 instead of a non-negative 64-bit integer");
  EXPECT_EQ(tensor_refusal(R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0])", 0),
            "shape [4294967296, 4294967296] overflows");
  EXPECT_EQ(tensor_refusal(R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0])", 0),
            "shape [2305843009213693952] overflows");
}

TEST_F(MalformedSafetensors, ShapeTimesDtypeIsNotTheByteLength) {
  EXPECT_EQ(tensor_refusal(R"("dtype":"F32","shape":[3,1],"data_offsets":[0,8])"),
            "shape [3, 1] of F32 is 12 bytes, but data_offsets [0, 8] are 8 bytes");
}

TEST_F(MalformedSafetensors, OffsetsOutOfRange) {
  EXPECT_EQ(
      tensor_refusal(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])", 7),
      "data_offsets [0, 8] reach beyond the 7 bytes of data in the file: it was cut off, fetch it again");
}

TEST_F(MalformedSafetensors, BeginAfterEnd) {
  EXPECT_EQ(tensor_refusal(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"),
            "data_offsets [8, 0] begin after their end");
}

TEST_F(MalformedSafetensors, NegativeOffset) {
  EXPECT_EQ(tensor_refusal(R"("dtype":"F32","shape":[2],"data_offsets":[-8,0])"),
            "data_offsets holds -8 instead of a non-negative 64-bit integer");
}

TEST_F(MalformedSafetensors, WrongNumberOfOffsets) {
  EXPECT_EQ(tensor_refusal(R"("data_offsets":[0])"), "data_offsets has 1 numbers instead of two");
  EXPECT_EQ(tensor_refusal(R"("data_offsets":[0,8,8])"), "data_offsets has more than two numbers");
}

TEST_F(MalformedSafetensors, GapBetweenTensors) {
  EXPECT_EQ(refusal(file_of(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                            R"("b":{"dtype":"U8","shape":[2],"data_offsets":[5,7]}})",
                            7)),
            "tensor \"b\": 3 bytes before it, [2, 5), belong to no tensor");
}

TEST_F(MalformedSafetensors, GapBeforeTheFirstTensor) {
  EXPECT_EQ(tensor_refusal(R"("dtype":"U8","shape":[4],"data_offsets":[4,8])"),
            "4 bytes before it, [0, 4), belong to no tensor");
}

TEST_F(MalformedSafetensors, OverlappingTensors) {
  EXPECT_EQ(refusal(file_of(R"({"b":{"dtype":"U8","shape":[3],"data_offsets":[1,4]},)"
                            R"("a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
                            4)),
            "tensor \"b\": bytes [1, 4) overlap those of tensor \"a\", [0, 2)");
}

TEST_F(MalformedSafetensors, EmptyTensorInsideAnother) {
  EXPECT_THAT(refusal(file_of(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                              R"("b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})",
                              4)),
              StartsWith("tensor \"b\": bytes [2, 2) overlap"));
}

TEST_F(MalformedSafetensors, TrailingData) {
  EXPECT_EQ(refusal(file_of(R"({"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 9)),
            "5 bytes after the last tensor, \"w\", [4, 9), belong to no tensor");
  EXPECT_EQ(refusal(file_of("{}", 1)), "1 bytes after the header, [0, 1), belong to no tensor");
}

TEST_F(MalformedSafetensors, NamesOfAnyBytesAreEscapedInMessages) {
  EXPECT_THAT(refusal(file_of(R"({"a\n\u001b[31m":7})")), StartsWith(R"(tensor "a\n\u001b[31m": )"));
}

}  // namespace
}  // namespace layerstream::io
