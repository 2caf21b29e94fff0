// SPDX-License-Identifier: Apache-2.0
// The file of logits rows that the plugin's capture writes (docs/vllm.md): FILE.json says how long
// a record is, FILE holds the records: request, position, next token, 0 (int32 each), then the
// logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "bitdecoding/status.h"

namespace bitdecoding::eval {

struct LogitsRow {
  int request = 0;
  int position = 0;
  int token = 0;  // the prompt's token at position + 1
  const float* logits = nullptr;
};

// Mapped, not read: a capture of 4,096 positions is 0.8 GB.
class LogitsFile {
 public:
  static Result<LogitsFile> open(const std::string& path);
  LogitsFile(LogitsFile&& other) noexcept;
  LogitsFile& operator=(LogitsFile&& other) noexcept;
  ~LogitsFile();

  std::size_t rows() const { return rows_; }
  std::size_t vocab_size() const { return vocab_size_; }
  LogitsRow row(std::size_t index) const;

 private:
  LogitsFile() = default;

  const std::uint8_t* bytes_ = nullptr;
  std::size_t size_ = 0;
  std::size_t rows_ = 0;
  std::size_t vocab_size_ = 0;
  std::size_t header_bytes_ = 0;
  std::size_t record_bytes_ = 0;
};

}  // namespace bitdecoding::eval
