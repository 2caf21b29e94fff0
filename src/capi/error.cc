// SPDX-License-Identifier: Apache-2.0
#include "capi/internal.h"

namespace bitdecoding::capi {

std::string& last_error() {
  thread_local std::string text;
  return text;
}

bd_status report(const Status& status) noexcept {
  try {
    last_error() = status.message();
  } catch (...) {
    last_error().clear();  // no memory for the sentence; the code still tells
  }
  return static_cast<bd_status>(status.code());
}

Status check_range(const char* what, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return {};
  return invalid("{} is {}; expected {} to {}", what, value, low, high);
}

}  // namespace bitdecoding::capi

int bd_abi_version(void) { return BD_ABI_VERSION; }
const char* bd_version(void) { return BITDECODING_VERSION; }
const char* bd_last_error(void) { return bitdecoding::capi::last_error().c_str(); }
