// SPDX-License-Identifier: Apache-2.0
// From a format and a head_dim to a template's arguments.
#pragma once

#include "bitdecoding/format.h"
#include "bitdecoding/status.h"

namespace bitdecoding::cuda {

template <Format kFormat, class Run>
Status for_head_dim(int head_dim, const Run& run) {
  switch (head_dim) {
    case 64:
      run.template operator()<kFormat, 64>();
      break;
    case 96:
      run.template operator()<kFormat, 96>();
      break;
    case 128:
      run.template operator()<kFormat, 128>();
      break;
    case 192:
      run.template operator()<kFormat, 192>();
      break;
    case 256:
      run.template operator()<kFormat, 256>();
      break;
    default:
      return {StatusCode::kUnsupported, "head_dim must be 64, 96, 128, 192 or 256"};
  }
  return {};
}

template <class Run>
Status for_shape(Format format, int head_dim, const Run& run) {
  return format == Format::kNvfp4 ? for_head_dim<Format::kNvfp4>(head_dim, run)
                                  : for_head_dim<Format::kMxfp4>(head_dim, run);
}

}  // namespace bitdecoding::cuda
