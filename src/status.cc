// SPDX-License-Identifier: Apache-2.0
#include "bitdecoding/status.h"

namespace bitdecoding {

const char* status_code_name(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kInvalidArgument:
      return "invalid argument";
    case StatusCode::kOutOfRange:
      return "out of range";
    case StatusCode::kUnsupported:
      return "unsupported";
    case StatusCode::kNotFound:
      return "not found";
    case StatusCode::kCorrupt:
      return "corrupt";
    case StatusCode::kIo:
      return "input/output error";
    case StatusCode::kResourceExhausted:
      return "out of resources";
    case StatusCode::kInternal:
      return "internal error";
  }
  return "unknown";
}

}  // namespace bitdecoding
