// SPDX-License-Identifier: Apache-2.0
// The file of outer scales: round trip, beside key means, and what is wrong in a file, in words.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "io/key_shift.h"
#include "io/outer_scale.h"
#include "io/safetensors.h"

namespace bitdecoding {
namespace {

using Bytes = std::vector<std::int8_t>;

class OuterScaleFile : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = (std::filesystem::temp_directory_path() /
             ("bitdecoding_outer_" + std::to_string(::getpid())))
                .string();
  }
  void TearDown() override { std::filesystem::remove(path_); }

  // A file with one tensor; its status when it is read.
  Status read(const std::string& name, const std::string& dtype, std::vector<std::int64_t> shape,
              const Bytes& bytes) const {
    const SafetensorsTensor tensor{name, dtype, std::move(shape), std::as_bytes(std::span(bytes))};
    EXPECT_TRUE(write_safetensors(path_, {tensor}, {}).ok());
    return load_outer_scales(path_).status();
  }
  std::string path_;
};

void expect(const Status& status, StatusCode code, const std::string& part) {
  EXPECT_EQ(status.code(), code) << part;
  EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
}

TEST_F(OuterScaleFile, RoundTripAndSlices) {
  OuterScales written;
  written.num_layers = 3;
  written.num_kv_heads = 2;
  written.key = {0, 1, -64, 64, -5, 6};
  written.value = {9, 8, 7, 6, 5, 4};
  written.metadata["model"] = "tiny";
  ASSERT_TRUE(save_outer_scales(written, path_).ok());
  const OuterScales read = load_outer_scales(path_).take();
  EXPECT_EQ(read.num_layers, 3);
  EXPECT_EQ(read.num_kv_heads, 2);
  EXPECT_EQ(read.key, written.key);
  EXPECT_EQ(read.value, written.value);
  EXPECT_EQ(read.metadata.at("model"), "tiny");
  EXPECT_EQ(read.slice(read.key, 1, 0, 2), (Bytes{-64, 64}));
  EXPECT_EQ(read.slice(read.value, 2, 1, 1), (Bytes{4}));
  EXPECT_TRUE(check_outer_scales(read, 3, 2).ok());
  expect(check_outer_scales(read, 2, 2), StatusCode::kInvalidArgument,
         "3 layers and 2 KV heads, and the model has 2 layers and 2 KV heads");
  expect(check_outer_scales(read, 3, 4), StatusCode::kInvalidArgument, "another model");
}

TEST_F(OuterScaleFile, OneSideIsEnough) {
  OuterScales written;
  written.num_layers = 1;
  written.num_kv_heads = 2;
  written.value = {3, -3};
  ASSERT_TRUE(save_outer_scales(written, path_).ok());
  const OuterScales read = load_outer_scales(path_).take();
  EXPECT_TRUE(read.key.empty());
  EXPECT_TRUE(read.slice(read.key, 0, 0, 2).empty());
  EXPECT_EQ(read.value, written.value);
}

// One sidecar for both: each reader takes its own tensors.
TEST_F(OuterScaleFile, MayLieBesideKeyMeans) {
  std::vector<float> means(128);
  for (std::size_t i = 0; i < means.size(); ++i) means[i] = static_cast<float>(i);
  const Bytes exponents = {4, -4};
  ASSERT_TRUE(write_safetensors(path_,
                                {{"key_shift", "F32", {1, 2, 64}, std::as_bytes(std::span(means))},
                                 {"key_outer", "I8", {1, 2}, std::as_bytes(std::span(exponents))}},
                                {{"version", "1"}})
                  .ok());
  EXPECT_EQ(load_key_shift(path_).take().values, means);
  EXPECT_EQ(load_outer_scales(path_).take().key, exponents);
}

TEST_F(OuterScaleFile, WrongContents) {
  expect(load_outer_scales(path_).status(), StatusCode::kNotFound, path_);
  expect(read("other", "I8", {1, 2}, {0, 0}), StatusCode::kNotFound, "holds no outer scales");
  const StatusCode invalid = StatusCode::kInvalidArgument;
  expect(read("key_outer", "I8", {2}, {0, 0}), invalid,
         "has shape [2]; expected [layers, kv_heads]");
  expect(read("key_outer", "I8", {1, 2, 1}, {0, 0}), invalid, "has shape [1, 2, 1]");
  expect(read("value_outer", "I8", {0, 2}, {}), invalid, "has shape [0, 2]");
  expect(read("value_outer", "I8", {1, 0}, {}), invalid, "has shape [1, 0]");
  expect(read("key_outer", "I8", {1, 4097}, Bytes(4097)), invalid, "has shape [1, 4097]");
  expect(read("key_outer", "U8", {1, 2}, {0, 0}), invalid, "has dtype U8; expected I8");
  expect(read("key_outer", "F32", {1, 1}, {0, 0, 0, 0}), invalid, "has dtype F32");
  expect(read("value_outer", "I8", {2, 2}, {0, 0, 0, 65}), invalid,
         "the exponent 65 at layer 1, KV head 1; expected -64 to 64");
  expect(read("key_outer", "I8", {2, 2}, {0, 0, -128, 0}), invalid,
         "the exponent -128 at layer 1, KV head 0");
}

TEST_F(OuterScaleFile, BothSidesAreOfOneModel) {
  const Bytes exponents = {1, 2, 3, 4};
  const std::span<const std::byte> bytes = std::as_bytes(std::span(exponents));
  ASSERT_TRUE(
      write_safetensors(
          path_, {{"key_outer", "I8", {2, 2}, bytes}, {"value_outer", "I8", {4, 1}, bytes}}, {})
          .ok());
  expect(load_outer_scales(path_).status(), StatusCode::kInvalidArgument,
         "'value_outer' has shape [4, 1], and 'key_outer' has [2, 2]");
}

}  // namespace
}  // namespace bitdecoding
