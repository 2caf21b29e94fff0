// SPDX-License-Identifier: Apache-2.0
// From a shape to the instance that was compiled for it.
#pragma once

#include <fmt/format.h>

#include "common/decode.h"

namespace bitdecoding::cuda {

// Defined in the instances, one file a format and head_dim.
template <Format kFormat, int kHeadDim, class Arch>
Status launch_columns(const DecodeShape& shape, const DecodeArgs& args, const DecodeLaunch& on);

template <Format kFormat, class Arch>
Status dispatch_head_dim(const DecodeShape& shape, const DecodeArgs& args, const DecodeLaunch& on) {
  switch (shape.head_dim) {
    case 64:
      return launch_columns<kFormat, 64, Arch>(shape, args, on);
    case 96:
      return launch_columns<kFormat, 96, Arch>(shape, args, on);
    case 128:
      return launch_columns<kFormat, 128, Arch>(shape, args, on);
    case 192:
      return launch_columns<kFormat, 192, Arch>(shape, args, on);
    case 256:
      return launch_columns<kFormat, 256, Arch>(shape, args, on);
    default:
      return {StatusCode::kUnsupported,
              fmt::format("there is no decode kernel for head_dim {}", shape.head_dim)};
  }
}

template <class Arch>
Status dispatch_decode(const DecodeShape& shape, const DecodeArgs& args, const DecodeLaunch& on) {
  if (shape.format == Format::kNvfp4)
    return dispatch_head_dim<Format::kNvfp4, Arch>(shape, args, on);
  return dispatch_head_dim<Format::kMxfp4, Arch>(shape, args, on);
}

}  // namespace bitdecoding::cuda
