// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "bitdecoding/page.h"
#include "page/layout.h"

namespace bitdecoding {
namespace {

bool is_known_format(Format format) {
  const int number = static_cast<int>(format);
  return number >= static_cast<int>(Format::kBf16) && number <= static_cast<int>(Format::kMxfp4);
}

}  // namespace

Result<PageGeometry> PageGeometry::make(Format format, FragmentOrder order, int head_dim,
                                        int page_size) {
  if (!is_known_format(format)) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("page format number {} does not exist; expected 1 (bf16), 2 (fp8_e4m3), 3 "
                    "(nvfp4_rows), 4 (nvfp4) or 5 (mxfp4)",
                    static_cast<int>(format)));
  }
  if (order != FragmentOrder::kFp4Mma && order != FragmentOrder::kQuad &&
      order != FragmentOrder::kFp16Mma) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("fragment order number {} does not exist; expected 1 (fp4_mma), 2 "
                              "(quad) or 3 (fp16_mma)",
                              static_cast<int>(order)));
  }
  if (std::find(kHeadDims.begin(), kHeadDims.end(), head_dim) == kHeadDims.end()) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("head_dim {} is not offered; expected one of {}", head_dim,
                              fmt::join(kHeadDims, ", ")));
  }
  if (page_size < kMinPageSize || page_size > kMaxPageSize || page_size % kTileTokens != 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("page size {} is not offered; expected a multiple of {} from {} to "
                              "{} tokens (vLLM: --block-size 128)",
                              page_size, kTileTokens, kMinPageSize, kMaxPageSize));
  }
  PageGeometry g;
  g.format = format;
  g.order = order;
  g.head_dim = head_dim;
  g.page_size = page_size;
  g.group_tokens = bitdecoding::group_tokens(format);
  g.groups_per_page = page_size / g.group_tokens;
  g.tile_bytes = layout::tile_parts(format, head_dim).bytes;
  g.head_bytes = g.tile_bytes * (page_size / kTileTokens);
  g.bytes_per_token = static_cast<double>(g.tile_bytes) / kTileTokens;
  return g;
}

}  // namespace bitdecoding
