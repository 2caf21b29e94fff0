// SPDX-License-Identifier: Apache-2.0
// Files are read whole or not at all, and replaced whole or not at all.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>

#include "io/file.h"
#include "io/safetensors.h"
#include "io/suggest.h"

namespace bitdecoding {
namespace {

class FileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        std::filesystem::temp_directory_path() / ("bitdecoding_io_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path(const char* name) const { return (folder_ / name).string(); }
  std::filesystem::path folder_;
};

TEST_F(FileTest, RoundTripAtTheLimit) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{4096}}) {
    const std::string bytes(size, '\xA5');
    ASSERT_TRUE(write_file_atomic(path("f"), bytes).ok());
    EXPECT_EQ(read_file(path("f"), static_cast<std::int64_t>(size)).take(), bytes);
    if (size == 0) continue;
    const Result<std::string> cut = read_file(path("f"), static_cast<std::int64_t>(size) - 1);
    EXPECT_EQ(cut.status().code(), StatusCode::kInvalidArgument);
  }
}

TEST_F(FileTest, DevicesAndFilesAboveTheLimitAreNotRead) {
  const Status device = read_file("/dev/zero", 1 << 20).status();
  EXPECT_EQ(device.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(device.message().find("is a device"), std::string::npos) << device.message();
  ASSERT_TRUE(write_file_atomic(path("sparse"), "x").ok());
  std::error_code error;
  std::filesystem::resize_file(path("sparse"), std::uintmax_t{1} << 33, error);
  ASSERT_FALSE(error) << error.message();
  const Status large = read_file(path("sparse"), 1 << 20).status();
  EXPECT_EQ(large.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(large.message().find("longer than 1048576 bytes"), std::string::npos);
}

TEST_F(FileTest, AnEndlessPipeIsCutAtTheLimit) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const std::string bytes(2000, 'x');
  ASSERT_EQ(::write(ends[1], bytes.data(), bytes.size()), 2000);
  const auto text = read_file("/dev/fd/" + std::to_string(ends[0]), 1000);
  ::close(ends[0]);
  ::close(ends[1]);
  EXPECT_EQ(text.status().code(), StatusCode::kInvalidArgument);
}

TEST_F(FileTest, ANamedPipeWithoutAWriterIsNotWaitedFor) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  Result<std::string> text = read_file(path("pipe"), 1000);
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_EQ(text.take(), "");
  const auto source = open_byte_source(path("pipe"));
  EXPECT_EQ(source.status().code(), StatusCode::kInvalidArgument);
}

TEST_F(FileTest, ASlowPipeIsReadToItsEnd) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  std::thread writer([&] {
    for (const char* part : {"one ", "two"}) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      EXPECT_GT(::write(ends[1], part, std::strlen(part)), 0);
    }
    ::close(ends[1]);
  });
  Result<std::string> text = read_file("/dev/fd/" + std::to_string(ends[0]), 1000);
  writer.join();
  ::close(ends[0]);
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_EQ(text.take(), "one two");
}

TEST_F(FileTest, ReplacingLeavesNoTemporaryFile) {
  ASSERT_TRUE(write_file_atomic(path("f"), "old").ok());
  ASSERT_TRUE(write_file_atomic(path("f"), "new").ok());
  EXPECT_EQ(read_file(path("f"), 100).take(), "new");
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    (void)entry;
    ++files;
  }
  EXPECT_EQ(files, 1);
}

TEST_F(FileTest, AFailedWriteKeepsTheOldFileAndSaysWhy) {
  std::filesystem::create_directories(folder_ / "d" / "inside");
  const Status status = write_file_atomic(path("d"), "x");
  EXPECT_EQ(status.code(), StatusCode::kIo);
  EXPECT_NE(status.message().find("/d'"), std::string::npos) << status.message();
  EXPECT_TRUE(std::filesystem::is_directory(folder_ / "d" / "inside"));
  EXPECT_EQ(write_file_atomic(path("none/f"), "x").code(), StatusCode::kIo);
}

TEST_F(FileTest, MissingIsNotFound) {
  EXPECT_EQ(read_file(path("none"), 10).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(read_file(path(""), 10).status().code(), StatusCode::kInvalidArgument);
}

TEST(Suggest, NearNamesOnly) {
  const std::vector<std::string> known = {"serve", "doctor", "recipe", "version"};
  EXPECT_EQ(nearest_name("sevre", known), "serve");
  EXPECT_EQ(nearest_name("Recipes", known), "recipe");
  EXPECT_EQ(nearest_name("xylophone", known), "");
  EXPECT_EQ(nearest_name("", known), "");
  EXPECT_EQ(nearest_name(std::string(100000, 's'), known), "");
  EXPECT_EQ(nearest_name("sink-tokens", {"tail_tokens", "sink_tokens"}), "sink_tokens");
  EXPECT_EQ(join_or({"a", "b", "c"}), "a, b or c");
  EXPECT_EQ(join_or({"a"}), "a");
}

}  // namespace
}  // namespace bitdecoding
