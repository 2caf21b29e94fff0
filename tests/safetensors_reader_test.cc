// SPDX-License-Identifier: Apache-2.0
// Hostile and broken safetensors files: each a sentence with the byte offset, nothing allocated for
// a mere claim.
#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string>

#include "io/file.h"
#include "io/key_shift.h"
#include "io/safetensors.h"

namespace bitdecoding {
namespace {

std::string with_length(std::uint64_t length, std::string_view rest) {
  const auto bytes = std::bit_cast<std::array<char, 8>>(length);
  return std::string(bytes.data(), 8) + std::string(rest);
}

std::string file_of(std::string_view header, std::string_view data) {
  return with_length(header.size(), std::string(header) + std::string(data));
}

std::string floats(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * 4};
}

std::span<const std::uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

Result<SafetensorsIndex> index_of(const std::string& file) {
  return read_safetensors_index(*memory_byte_source("f", bytes_of(file)));
}

std::string error_of(const std::string& file) {
  const Result<SafetensorsIndex> index = index_of(file);
  if (index.ok()) return "(accepted)";
  EXPECT_EQ(index.status().code(), StatusCode::kCorrupt) << index.status().message();
  return index.status().message();
}

#define EXPECT_HAS(text, part)                    \
  EXPECT_NE((text).find(part), std::string::npos) \
      << "\"" << (text) << "\" lacks \"" << (part) << "\""

constexpr const char* kTwo = R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},)"
                             R"( "b": {"dtype": "U8", "shape": [2, 2], "data_offsets": [8, 12]}})";

TEST(SafetensorsIndex, ReadsTwoTensorsAndMetadata) {
  const std::string header =
      R"({"b": {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]}, "__metadata__": {"k": "v"},)"
      R"( "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})";
  const std::string file = file_of(header, std::string(12, 'x'));
  const SafetensorsIndex index = index_of(file).take();
  ASSERT_EQ(index.tensors.size(), 2U);
  EXPECT_EQ(index.tensors[0].name, "a");
  EXPECT_EQ(index.tensors[0].offset, 8 + header.size());
  EXPECT_EQ(index.tensors[1].offset, 16 + header.size());
  EXPECT_EQ(index.metadata.at("k"), "v");
  EXPECT_NE(index.find("b"), nullptr);
  EXPECT_EQ(index.find("c"), nullptr);
  EXPECT_TRUE(index_of(file_of("{}", "")).ok());
  EXPECT_TRUE(index_of(file_of(R"({"__metadata__": {}})", "")).ok());
}

TEST(SafetensorsIndex, HeaderLengths) {
  EXPECT_HAS(error_of(""), "0 bytes long");
  EXPECT_HAS(error_of("1234567"), "7 bytes long");
  EXPECT_HAS(error_of(with_length(0, "{}")), "at byte 0 is 0");
  EXPECT_HAS(error_of(with_length(std::uint64_t{1} << 63, "{}")), "9223372036854775808");
  EXPECT_HAS(error_of(with_length(~std::uint64_t{0}, "{}")), "18446744073709551615");
  EXPECT_HAS(error_of(with_length(100'000'001, "{}")), "above the format's limit");
  EXPECT_HAS(error_of(with_length(100'000'000, "{}")), "truncated");
  EXPECT_HAS(error_of(with_length(3, "{}")), "ends at byte 10");
}

TEST(SafetensorsIndex, GitLfsPointer) {
  const std::string pointer =
      "version https://git-lfs.github.com/spec/v1\noid sha256:"
      "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";
  EXPECT_HAS(error_of(pointer), "git-lfs pointer");
}

TEST(SafetensorsIndex, EveryTruncationIsFound) {
  const std::string file = file_of(kTwo, std::string(12, 'x'));
  ASSERT_TRUE(index_of(file).ok());
  for (std::size_t size = 0; size < file.size(); ++size) {
    EXPECT_FALSE(index_of(file.substr(0, size)).ok()) << size;
  }
  EXPECT_HAS(error_of(file.substr(0, file.size() - 1)), "truncated");
  EXPECT_HAS(error_of(file + "x"), "goes on to byte");
}

TEST(SafetensorsIndex, BrokenHeaders) {
  EXPECT_HAS(error_of(file_of("{]", "")), "not valid JSON at byte 9");
  EXPECT_HAS(error_of(file_of("[]", "")), "not a JSON object");
  EXPECT_HAS(error_of(file_of(R"({"a": 1})", "")), "must have dtype");
  EXPECT_HAS(
      error_of(file_of(R"({"a": {"dtype": "F31", "shape": [], "data_offsets": [0, 0]}})", "")),
      "unknown dtype 'F31'");
  EXPECT_HAS(error_of(file_of(R"({"__metadata__": {"a": 1}})", "")), "map text to text");
  EXPECT_HAS(error_of(file_of(R"({"a": {}, "a": {}})", "")), "twice");
  EXPECT_HAS(
      error_of(file_of("{\"a\": " + std::string(100000, '[') + std::string(100000, ']') + "}", "")),
      "nested deeper");
  EXPECT_FALSE(index_of(file_of("{\"a\": " + std::string(100000, '['), "")).ok());
}

std::string entry(const char* dtype, const char* shape, const char* offsets) {
  return std::string(R"({"a": {"dtype": ")") + dtype + R"(", "shape": )" + shape +
         R"(, "data_offsets": )" + offsets + "}}";
}

TEST(SafetensorsIndex, ShapesAndOffsets) {
  const std::string data(8, 'x');
  ASSERT_TRUE(index_of(file_of(entry("F32", "[2]", "[0, 8]"), data)).ok());
  for (const char* offsets :
       {"[8, 0]", "[0]", "[0, 8, 8]", "[-1, 7]", "[0, 8.0]", "\"0-8\"", "[0, \"8\"]", "null"}) {
    EXPECT_HAS(error_of(file_of(entry("F32", "[2]", offsets), data)), "two ascending byte offsets");
  }
  for (const char* shape :
       {"[-2]", "[2.0]", "2", "null", "[\"2\"]", "[1,1,1,1,1,1,1,1,2]",
        "[4611686018427387904, 4611686018427387904]", "[18446744073709551615]"}) {
    EXPECT_HAS(error_of(file_of(entry("F32", shape, "[0, 8]"), data)), "tensor 'a' at byte 9");
  }
  EXPECT_HAS(error_of(file_of(entry("F32", "[3]", "[0, 8]"), data)), "needs 12 bytes");
  EXPECT_HAS(error_of(file_of(entry("F32", "[1000000000]", "[0, 4000000000]"), data)), "truncated");
  EXPECT_HAS(error_of(file_of(entry("F32", "[1]", "[4, 8]"), data)), "a hole lies before it");
}

TEST(SafetensorsIndex, Overlap) {
  const std::string header = R"({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},)"
                             R"( "b": {"dtype": "U8", "shape": [8], "data_offsets": [4, 12]}})";
  EXPECT_HAS(error_of(file_of(header, std::string(12, 'x'))), "overlaps the tensor before it");
}

TEST(SafetensorsValues, DtypesAndNonFinite) {
  const std::string header = entry("BF16", "[2]", "[0, 4]");
  const std::string file = file_of(header, std::string("\x80\x3f\x00\xc0", 4));
  const auto source = memory_byte_source("f", bytes_of(file));
  const SafetensorsIndex index = read_safetensors_index(*source).take();
  EXPECT_EQ(read_float_tensor(*source, index.tensors[0]).take(), (std::vector<float>{1.0F, -2.0F}));

  const std::string half =
      file_of(entry("F16", "[2]", "[0, 4]"), std::string("\x00\x3c\x00\xc0", 4));
  const auto half_source = memory_byte_source("f", bytes_of(half));
  EXPECT_EQ(read_float_tensor(*half_source, read_safetensors_index(*half_source).value().tensors[0])
                .take(),
            (std::vector<float>{1.0F, -2.0F}));

  const std::string wrong = file_of(entry("I32", "[1]", "[0, 4]"), std::string(4, 'x'));
  const auto wrong_source = memory_byte_source("f", bytes_of(wrong));
  const Status status =
      read_float_tensor(*wrong_source, read_safetensors_index(*wrong_source).value().tensors[0])
          .status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_HAS(status.message(), "expected F32, BF16 or F16");

  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    const std::string text = file_of(entry("F32", "[2]", "[0, 8]"), floats({1.0F, bad}));
    const auto bad_source = memory_byte_source("f", bytes_of(text));
    const Status s =
        read_float_tensor(*bad_source, read_safetensors_index(*bad_source).value().tensors[0])
            .status();
    EXPECT_EQ(s.code(), StatusCode::kCorrupt);
    EXPECT_HAS(s.message(), "at byte " + std::to_string(text.size() - 4));
  }
}

// ---- the sidecar -------------------------------------------------------------------------------

KeyShift sidecar(int layers, int heads, int dim) {
  KeyShift s;
  s.num_layers = layers;
  s.num_kv_heads = heads;
  s.head_dim = dim;
  s.values.resize(static_cast<std::size_t>(layers * heads * dim));
  for (std::size_t i = 0; i < s.values.size(); ++i) s.values[i] = 0.25F * static_cast<float>(i);
  s.metadata["model"] = "a \"quoted\" model";
  s.metadata["tokens"] = "4096";
  return s;
}

class SidecarTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("bitdecoding_sidecar_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
    path_ = (folder_ / "key_shift.safetensors").string();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::filesystem::path folder_;
  std::string path_;
};

TEST_F(SidecarTest, RoundTripAndSlices) {
  const KeyShift written = sidecar(3, 4, 64);
  ASSERT_TRUE(save_key_shift(written, path_).ok());
  const KeyShift read = load_key_shift(path_).take();
  EXPECT_EQ(read.values, written.values);
  EXPECT_EQ(read.num_layers, 3);
  EXPECT_EQ(read.num_kv_heads, 4);
  EXPECT_EQ(read.head_dim, 64);
  EXPECT_EQ(read.metadata.at("model"), "a \"quoted\" model");
  EXPECT_EQ(read.metadata.at("version"), "1");
  EXPECT_TRUE(read.warnings.empty());
  const auto slice = read.slice(2, 1, 2);
  ASSERT_EQ(slice.size(), 128U);
  EXPECT_EQ(slice[0], 0.25F * ((2 * 4 + 1) * 64));
  EXPECT_EQ(slice[127], 0.25F * ((2 * 4 + 1) * 64 + 127));
  EXPECT_TRUE(read.value_means.empty());
  EXPECT_TRUE(read.value_slice(2, 1, 2).empty());
}

TEST_F(SidecarTest, ValueMeansBesideThoseOfKeys) {
  KeyShift written = sidecar(3, 4, 64);
  for (const float mean : written.values) written.value_means.push_back(1.0F - mean);
  ASSERT_TRUE(save_key_shift(written, path_).ok());
  const KeyShift read = load_key_shift(path_).take();
  EXPECT_EQ(read.values, written.values);
  EXPECT_EQ(read.value_means, written.value_means);
  EXPECT_EQ(read.value_slice(2, 1, 2)[5], 1.0F - read.slice(2, 1, 2)[5]);
  const std::string bytes(256 * 2, '\0');
  const Status shape =
      parse_key_shift("f",
                      bytes_of(file_of(R"({"key_shift": {"dtype": "F32", "shape": [1, 1, 64],)"
                                       R"( "data_offsets": [0, 256]}, "value_shift": {"dtype":)"
                                       R"( "F32", "shape": [1, 64, 1], "data_offsets": [256,)"
                                       R"( 512]}})",
                                       bytes)))
          .status();
  EXPECT_EQ(shape.code(), StatusCode::kInvalidArgument);
  EXPECT_HAS(shape.message(), "'value_shift' has shape [1, 64, 1]");
}

TEST_F(SidecarTest, CutInHalf) {
  ASSERT_TRUE(save_key_shift(sidecar(3, 4, 64), path_).ok());
  const std::string whole = read_file(path_, 1 << 20).take();
  ASSERT_TRUE(write_file_atomic(path_, std::string_view(whole).substr(0, whole.size() / 2)).ok());
  const Status status = load_key_shift(path_).status();
  EXPECT_EQ(status.code(), StatusCode::kCorrupt);
  EXPECT_HAS(status.message(), "truncated");
}

TEST_F(SidecarTest, MissingNamesThePathAndTheCommand) {
  for (const std::string& path : {path_, (folder_ / "no" / "dir").string()}) {
    const Status status = load_key_shift(path).status();
    EXPECT_EQ(status.code(), StatusCode::kNotFound);
    EXPECT_HAS(status.message(), path);
    EXPECT_HAS(status.message(), "bitdecoding serve");
  }
  EXPECT_EQ(load_key_shift(folder_.string()).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(SidecarTest, AnotherModel) {
  const KeyShift s = sidecar(3, 4, 64);
  EXPECT_TRUE(check_key_shift(s, 3, 4, 64).ok());
  for (const auto& [layers, heads, dim] : {std::tuple{2, 4, 64}, {3, 8, 64}, {3, 4, 128}}) {
    const Status status = check_key_shift(s, layers, heads, dim);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_HAS(status.message(), "3 layers, 4 KV heads and head_dim 64");
    EXPECT_HAS(status.message(), std::to_string(layers) + " layers, ");
  }
}

TEST_F(SidecarTest, WarnsWhenItLooksUncalibrated) {
  for (const float value : {0.0F, 1.0F}) {
    KeyShift s = sidecar(2, 1, 64);
    s.values.assign(s.values.size(), value);
    ASSERT_TRUE(save_key_shift(s, path_).ok());
    const KeyShift read = load_key_shift(path_).take();
    ASSERT_EQ(read.warnings.size(), 1U);
    EXPECT_HAS(read.warnings[0], "looks uncalibrated");
  }
  KeyShift s = sidecar(3, 1, 64);
  std::fill(s.values.begin() + 64, s.values.begin() + 128, 0.0F);
  ASSERT_TRUE(save_key_shift(s, path_).ok());
  const KeyShift read = load_key_shift(path_).take();
  ASSERT_EQ(read.warnings.size(), 1U);
  EXPECT_HAS(read.warnings[0], "layers 1:");
}

TEST_F(SidecarTest, WrongContents) {
  const auto parse = [](const std::string& file) {
    return parse_key_shift("f", bytes_of(file)).status();
  };
  const Status none = parse(file_of(R"({"__metadata__": {"version": "1"}})", ""));
  EXPECT_EQ(none.code(), StatusCode::kNotFound);
  EXPECT_HAS(none.message(), "no tensor at all");
  const Status other = parse(file_of(entry("F32", "[2]", "[0, 8]"), std::string(8, 'x')));
  EXPECT_HAS(other.message(), "among them 'a'");
  const Status shape =
      parse(file_of(R"({"key_shift": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})",
                    std::string(8, '\0')));
  EXPECT_EQ(shape.code(), StatusCode::kInvalidArgument);
  EXPECT_HAS(shape.message(), "shape [2]");
  const Status version =
      parse(file_of(R"({"__metadata__": {"version": "2"}, "key_shift": {"dtype": "F32",)"
                    R"( "shape": [0], "data_offsets": [0, 0]}})",
                    ""));
  EXPECT_EQ(version.code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace bitdecoding
