// SPDX-License-Identifier: Apache-2.0
#include "common/dispatch_decode.h"
#include "sm80/arch.h"

namespace bitdecoding::cuda {

Status launch_decode_sm80(const DecodeShape& shape, const DecodeArgs& args,
                          const DecodeLaunch& on) {
  return dispatch_decode<Sm80>(shape, args, on);
}

}  // namespace bitdecoding::cuda
