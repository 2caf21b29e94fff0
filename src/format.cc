// SPDX-License-Identifier: Apache-2.0
#include "bitdecoding/format.h"

#include <fmt/format.h>

namespace bitdecoding {

std::string_view format_name(Format format) {
  switch (format) {
    case Format::kBf16:
      return "bf16";
    case Format::kFp8E4m3:
      return "fp8_e4m3";
    case Format::kNvfp4Rows:
      return "nvfp4_rows";
    case Format::kNvfp4:
      return "nvfp4";
    case Format::kMxfp4:
      return "mxfp4";
  }
  return "unknown";
}

std::string_view fragment_order_name(FragmentOrder order) {
  switch (order) {
    case FragmentOrder::kFp4Mma:
      return "fp4_mma";
    case FragmentOrder::kQuad:
      return "quad";
    case FragmentOrder::kFp16Mma:
      return "fp16_mma";
  }
  return "unknown";
}

std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kBf16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
  }
  return "unknown";
}

Result<Format> parse_format(std::string_view name) {
  for (const Format f :
       {Format::kBf16, Format::kFp8E4m3, Format::kNvfp4Rows, Format::kNvfp4, Format::kMxfp4}) {
    if (name == format_name(f)) return f;
  }
  return Status(
      StatusCode::kInvalidArgument,
      fmt::format("unknown page format '{}'; expected bf16, fp8_e4m3, nvfp4_rows, nvfp4 or mxfp4",
                  name));
}

}  // namespace bitdecoding
