// SPDX-License-Identifier: Apache-2.0
// Reading and writing safetensors files: 8 bytes of header length (little endian), a JSON header,
// then the bytes of the tensors. The reader believes nothing: every length is compared with the
// bytes that are there before anything is allocated, and errors name the byte offset.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bitdecoding/status.h"

namespace bitdecoding {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // "F32", "BF16", ...
  std::vector<std::int64_t> shape;
  std::uint64_t offset = 0;  // of the first byte in the file
  std::uint64_t bytes = 0;
};

struct SafetensorsIndex {
  std::vector<SafetensorsEntry> tensors;  // by offset
  std::map<std::string, std::string> metadata;

  const SafetensorsEntry* find(std::string_view name) const;
};

// Where the bytes come from: a file, or memory (fuzzing, tests).
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual const std::string& name() const = 0;  // begins error messages
  virtual std::uint64_t size() const = 0;
  // Exactly out.size() bytes from `offset`; kCorrupt when they are not there any more.
  virtual Status read(std::uint64_t offset, std::span<std::uint8_t> out) const = 0;
};

Result<std::unique_ptr<ByteSource>> open_byte_source(const std::string& path);
std::unique_ptr<ByteSource> memory_byte_source(std::string name,
                                               std::span<const std::uint8_t> bytes);

Result<SafetensorsIndex> read_safetensors_index(const ByteSource& source);

// Values of an F32, BF16 or F16 tensor as floats. kCorrupt at the first NaN or infinity.
Result<std::vector<float>> read_float_tensor(const ByteSource& source,
                                             const SafetensorsEntry& entry);

// Values of an I8 tensor.
Result<std::vector<std::int8_t>> read_int8_tensor(const ByteSource& source,
                                                  const SafetensorsEntry& entry);

// Values of an F64 tensor. kCorrupt at the first NaN or infinity.
Result<std::vector<double>> read_double_tensor(const ByteSource& source,
                                               const SafetensorsEntry& entry);

struct SafetensorsTensor {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

// Tensors and metadata, written through a temporary file.
Status write_safetensors(const std::string& path, const std::vector<SafetensorsTensor>& tensors,
                         const std::map<std::string, std::string>& metadata);

}  // namespace bitdecoding
