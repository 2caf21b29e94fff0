// SPDX-License-Identifier: Apache-2.0
// Pages that leave the process: fragment order, tag, bounds and corruption checks.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "bitdecoding/page.h"
#include "page/address.h"
#include "page/layout.h"

namespace bitdecoding {
namespace {

constexpr std::int64_t kTagBytes = sizeof(FormatTag);

void convert_key_part(const PageGeometry& from, const PageGeometry& to, const std::uint8_t* in,
                      std::uint8_t* out) {
  const int block = scale_block(from.format);
  for (int row = 0; row < from.page_size; ++row) {
    for (int dim = 0; dim < padded_key_dims(from); ++dim) {
      const std::uint8_t code = get_nibble(in, code_address(from, Side::kKey, row, dim));
      set_nibble(out, code_address(to, Side::kKey, row, dim), code);
      if (dim % block == 0) {
        out[scale_address(to, Side::kKey, row, dim)] =
            in[scale_address(from, Side::kKey, row, dim)];
      }
    }
  }
}

void convert_value_part(const PageGeometry& from, const PageGeometry& to, const std::uint8_t* in,
                        std::uint8_t* out) {
  const int block = scale_block(from.format);
  for (int row = 0; row < from.page_size; ++row) {
    for (int dim = 0; dim < from.head_dim; ++dim) {
      const std::uint8_t code = get_nibble(in, code_address(from, Side::kValue, row, dim));
      set_nibble(out, code_address(to, Side::kValue, row, dim), code);
      if (row % block == 0) {
        out[scale_address(to, Side::kValue, row, dim)] =
            in[scale_address(from, Side::kValue, row, dim)];
      }
    }
  }
}

template <class T>
void put(std::uint8_t* at, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    at[i] = static_cast<std::uint8_t>(static_cast<std::uint64_t>(value) >> (8 * i));
  }
}

template <class T>
T get(const std::uint8_t* at) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) value |= static_cast<std::uint64_t>(at[i]) << (8 * i);
  return static_cast<T>(value);
}

void write_tag(const FormatTag& tag, std::uint8_t* at) {
  put(at, tag.magic);
  put(at + 4, tag.version);
  put(at + 6, static_cast<std::uint8_t>(tag.format));
  put(at + 7, static_cast<std::uint8_t>(tag.order));
  put(at + 8, tag.head_dim);
  put(at + 10, tag.page_size);
  put(at + 12, tag.num_kv_heads);
  put(at + 14, tag.first_kv_head);
  put(at + 16, tag.payload_bytes);
  put(at + 24, tag.reserved);
}

Status check_heads(std::size_t num_heads, int first_kv_head, const void* const* heads) {
  if (num_heads == 0 || num_heads > 0xFFFF) {
    return {StatusCode::kInvalidArgument,
            fmt::format("a page has 1 to 65535 KV heads, but {} were given", num_heads)};
  }
  if (first_kv_head < 0 || first_kv_head > 0xFFFF) {
    return {StatusCode::kInvalidArgument,
            fmt::format("the first KV head is {}, but must be 0 to 65535", first_kv_head)};
  }
  for (std::size_t h = 0; h < num_heads; ++h) {
    if (heads[h] == nullptr) {
      return {StatusCode::kInvalidArgument,
              fmt::format("the pointer of KV head {} is null; every head needs its bytes", h)};
    }
  }
  return {};
}

template <class T>
Status check_match(const char* what, const T& in_tag, const T& expected) {
  if (in_tag == expected) return {};
  return {StatusCode::kInvalidArgument,
          fmt::format("the page's {} is {}, but this cache's is {}; a page can only be imported "
                      "into a cache with the same layout",
                      what, in_tag, expected)};
}

Status check_tag(const FormatTag& tag, const PageGeometry& g, std::size_t num_heads,
                 int first_kv_head) {
  Status status = check_match("format", format_name(tag.format), format_name(g.format));
  if (status.ok()) status = check_match("head_dim", int{tag.head_dim}, g.head_dim);
  if (status.ok()) status = check_match("page size", int{tag.page_size}, g.page_size);
  if (status.ok()) {
    status = check_match("number of KV heads", std::size_t{tag.num_kv_heads}, num_heads);
  }
  if (status.ok()) status = check_match("first KV head", int{tag.first_kv_head}, first_kv_head);
  return status;
}

// The bytes of [begin, end) that no writer produces.
Status check_scales(const PageGeometry& g, const std::uint8_t* tile, std::int64_t begin,
                    std::int64_t end, std::int64_t tile_offset) {
  const std::uint8_t largest = g.format == Format::kMxfp4 ? kE8m0MaxCode : kE4m3MaxCode;
  for (std::int64_t i = begin; i < end; ++i) {
    if (tile[i] <= largest) continue;
    return {StatusCode::kCorrupt,
            fmt::format("byte {} of the page is the scale 0x{:02X}, which no writer produces "
                        "(largest 0x{:02X}); the page is damaged, fetch it again",
                        tile_offset + i, tile[i], largest)};
  }
  return {};
}

Status check_payload(const PageGeometry& g, std::span<const std::uint8_t> bytes) {
  if (scale_block(g.format) == 0) return {};
  const layout::TileParts parts = layout::tile_parts(g.format, g.head_dim);
  const auto size = static_cast<std::int64_t>(bytes.size());
  for (std::int64_t at = kTagBytes; at < size; at += g.tile_bytes) {
    const std::uint8_t* tile = bytes.data() + at;
    Status status = check_scales(g, tile, parts.key_scales, parts.value_codes, at);
    if (status.ok()) status = check_scales(g, tile, parts.value_scales, parts.bytes, at);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace

Status convert_fragment_order(const PageGeometry& geometry, FragmentOrder from, FragmentOrder to,
                              std::span<const std::uint8_t> in, std::span<std::uint8_t> out) {
  const auto bytes = static_cast<std::size_t>(geometry.head_bytes);
  if (in.size() != bytes || out.size() != bytes || bytes == 0) {
    return {StatusCode::kInvalidArgument,
            fmt::format("one head of a page has {} bytes, but {} were given to convert into {}",
                        bytes, in.size(), out.size())};
  }
  if (in.data() < out.data() + bytes && out.data() < in.data() + bytes) {
    return {StatusCode::kInvalidArgument,
            "the two buffers of an order conversion overlap; give it a separate output"};
  }
  if (from == to || !is_tiled(geometry.format)) {
    std::memcpy(out.data(), in.data(), bytes);
    return {};
  }
  PageGeometry source = geometry;
  PageGeometry target = geometry;
  source.order = from;
  target.order = to;
  std::memset(out.data(), 0, bytes);
  convert_key_part(source, target, in.data(), out.data());
  convert_value_part(source, target, in.data(), out.data());
  return {};
}

Result<std::vector<std::uint8_t>> export_page(const PageGeometry& geometry,
                                              std::span<const std::uint8_t* const> heads,
                                              int first_kv_head) {
  Status status =
      check_heads(heads.size(), first_kv_head, reinterpret_cast<const void* const*>(heads.data()));
  if (!status.ok()) return status;
  FormatTag tag;
  tag.format = geometry.format;
  tag.head_dim = static_cast<std::uint16_t>(geometry.head_dim);
  tag.page_size = static_cast<std::uint16_t>(geometry.page_size);
  tag.num_kv_heads = static_cast<std::uint16_t>(heads.size());
  tag.first_kv_head = static_cast<std::uint16_t>(first_kv_head);
  tag.payload_bytes = heads.size() * static_cast<std::uint64_t>(geometry.head_bytes);
  std::vector<std::uint8_t> bytes(sizeof(FormatTag) + tag.payload_bytes);
  write_tag(tag, bytes.data());
  const auto head_bytes = static_cast<std::size_t>(geometry.head_bytes);
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const std::span<std::uint8_t> out(bytes.data() + kTagBytes + h * head_bytes, head_bytes);
    status = convert_fragment_order(geometry, geometry.order, FragmentOrder::kFp4Mma,
                                    {heads[h], head_bytes}, out);
    if (!status.ok()) return status;
  }
  return bytes;
}

Result<FormatTag> read_format_tag(std::span<const std::uint8_t> bytes) {
  if (bytes.size() < sizeof(FormatTag)) {
    return Status(StatusCode::kCorrupt,
                  fmt::format("a page begins with a tag of {} bytes, but there are only {} bytes",
                              sizeof(FormatTag), bytes.size()));
  }
  const std::uint8_t* at = bytes.data();
  FormatTag tag;
  tag.magic = get<std::uint32_t>(at);
  tag.version = get<std::uint16_t>(at + 4);
  tag.format = static_cast<Format>(at[6]);
  tag.order = static_cast<FragmentOrder>(at[7]);
  tag.head_dim = get<std::uint16_t>(at + 8);
  tag.page_size = get<std::uint16_t>(at + 10);
  tag.num_kv_heads = get<std::uint16_t>(at + 12);
  tag.first_kv_head = get<std::uint16_t>(at + 14);
  tag.payload_bytes = get<std::uint64_t>(at + 16);
  tag.reserved = get<std::uint64_t>(at + 24);
  if (tag.magic != FormatTag::kMagic) {
    return Status(StatusCode::kCorrupt,
                  fmt::format("the page begins with 0x{:08X} instead of the tag's magic 0x{:08X} "
                              "('BD4P'); these bytes are no exported page",
                              tag.magic, FormatTag::kMagic));
  }
  if (tag.version != FormatTag::kVersion) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("the page has layout version {}, but this library reads version {}; "
                              "export it again with a matching library",
                              tag.version, FormatTag::kVersion));
  }
  if (tag.order != FragmentOrder::kFp4Mma || tag.reserved != 0) {
    return Status(StatusCode::kCorrupt,
                  fmt::format("the page's tag names fragment order {} and reserved value {}; pages "
                              "are exchanged in order 1 (fp4_mma) with 0 there",
                              at[7], tag.reserved));
  }
  const auto geometry = PageGeometry::make(tag.format, tag.order, tag.head_dim, tag.page_size);
  if (!geometry.ok()) {
    return Status(StatusCode::kCorrupt,
                  "the page's tag describes no valid page: " + geometry.status().message());
  }
  const std::uint64_t expected =
      tag.num_kv_heads * static_cast<std::uint64_t>(geometry.value().head_bytes);
  if (tag.num_kv_heads == 0 || tag.payload_bytes != expected ||
      bytes.size() != sizeof(FormatTag) + expected) {
    return Status(StatusCode::kCorrupt,
                  fmt::format("{} KV heads of this page need {} payload bytes, but its tag says {} "
                              "and {} are there; the page is cut or padded",
                              tag.num_kv_heads, expected, tag.payload_bytes,
                              bytes.size() - sizeof(FormatTag)));
  }
  return tag;
}

Status import_page(const PageGeometry& geometry, std::span<const std::uint8_t> bytes,
                   std::span<std::uint8_t* const> heads, int first_kv_head) {
  Status status =
      check_heads(heads.size(), first_kv_head, reinterpret_cast<const void* const*>(heads.data()));
  if (!status.ok()) return status;
  const auto tag = read_format_tag(bytes);
  if (!tag.ok()) return tag.status();
  status = check_tag(tag.value(), geometry, heads.size(), first_kv_head);
  if (status.ok()) status = check_payload(geometry, bytes);
  if (!status.ok()) return status;
  const auto head_bytes = static_cast<std::size_t>(geometry.head_bytes);
  for (std::size_t h = 0; h < heads.size(); ++h) {
    status = convert_fragment_order(geometry, FragmentOrder::kFp4Mma, geometry.order,
                                    bytes.subspan(sizeof(FormatTag) + h * head_bytes, head_bytes),
                                    {heads[h], head_bytes});
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace bitdecoding
