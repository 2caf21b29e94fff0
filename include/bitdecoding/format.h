// SPDX-License-Identifier: Apache-2.0
// Page formats: what the bytes of a page mean. A format never names a model or an architecture.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "bitdecoding/status.h"

#pragma GCC visibility push(default)
namespace bitdecoding {

// The numbers are stored in pages that leave the process: never reuse one.
enum class Format : std::uint8_t {
  kBf16 = 1,     // rows of BF16
  kFp8E4m3 = 2,  // rows of E4M3 with unit scales
  kNvfp4Rows =
      3,       // E2M1 + E4M3 per 16, K and V both blocked along head_dim (vLLM's `nvfp4` values)
  kNvfp4 = 4,  // the tile: K blocked along head_dim, V along tokens, E4M3 per 16
  kMxfp4 = 5,  // the same tile, E8M0 per 32
};

// Order of the bits inside a 512-byte fragment and its scale bytes; tiled formats only.
enum class FragmentOrder : std::uint8_t {
  kFp4Mma = 1,   // operand order of the block-scaled FP4 MMA: how pages are exchanged
  kQuad = 2,     // four columns a row, 16 rows: what integer dot products on CPUs read
  kFp16Mma = 3,  // kFp4Mma with the bits of a word arranged for one-mask unpacking to FP16 (CUDA)
};

enum class DType : std::uint8_t { kF32 = 1, kBf16 = 2, kF16 = 3 };

std::string_view format_name(Format format);
std::string_view fragment_order_name(FragmentOrder order);
std::string_view dtype_name(DType dtype);
Result<Format> parse_format(std::string_view name);

constexpr bool is_tiled(Format f) { return f == Format::kNvfp4 || f == Format::kMxfp4; }
constexpr int dtype_bytes(DType d) { return d == DType::kF32 ? 4 : 2; }

// Values under one scale; 0 for formats without scales.
constexpr int scale_block(Format f) {
  return f == Format::kMxfp4 ? 32 : (f == Format::kNvfp4 || f == Format::kNvfp4Rows ? 16 : 0);
}

// Tokens that must be quantized together, which is also the size of a shadow group: V's scale
// block for tiled formats, 16 for the others (there it only sets the granularity of the BF16
// rule).
constexpr int group_tokens(Format f) { return f == Format::kMxfp4 ? 32 : 16; }

// Exponents of outer scales are -64 to 64: every product of a code and its scales is a normal
// float.
inline constexpr int kMaxOuterExponent = 64;

inline constexpr int kTileTokens = 64;
inline constexpr int kMinPageSize = 64;
inline constexpr int kMaxPageSize = 1024;
inline constexpr std::array<int, 5> kHeadDims = {64, 96, 128, 192, 256};
inline constexpr int kMaxHeadDim = kHeadDims.back();

// Travels with every page that leaves the process: 32 bytes, little endian, before the payload.
struct FormatTag {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;  // grows when any golden page changes
  Format format = Format::kNvfp4;
  FragmentOrder order = FragmentOrder::kFp4Mma;
  std::uint16_t head_dim = 0;
  std::uint16_t page_size = 0;      // tokens
  std::uint16_t num_kv_heads = 0;   // heads in the payload
  std::uint16_t first_kv_head = 0;  // the payload's first head within the layer (tensor parallel)
  std::uint64_t payload_bytes = 0;
  std::uint64_t reserved = 0;  // zero

  static constexpr std::uint32_t kMagic = 0x50344442;  // "BD4P"
  static constexpr std::uint16_t kVersion = 1;
};
static_assert(sizeof(FormatTag) == 32, "the tag is 32 bytes on every platform");

}  // namespace bitdecoding
#pragma GCC visibility pop
