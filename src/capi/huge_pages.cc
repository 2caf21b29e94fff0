// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "capi/internal.h"

namespace bitdecoding::capi {
namespace {

// Whole kernel pages inside [data, data + bytes). Advice is a wish: where the kernel does not take
// it, the memory works as before, and the caller learns it from advised_bytes.
std::int64_t advise(void* data, std::int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t begin = (address + page - 1) / page * page;
  const std::uintptr_t end = (address + static_cast<std::uintptr_t>(bytes)) / page * page;
  if (end <= begin) return 0;
  void* start = static_cast<char*>(data) + (begin - address);
  if (madvise(start, end - begin, MADV_HUGEPAGE) != 0) return 0;
  return static_cast<std::int64_t>(end - begin);
#else
  (void)data;
  (void)bytes;
  return 0;
#endif
}

}  // namespace
}  // namespace bitdecoding::capi

bd_status bd_advise_huge_pages(void* data, int64_t bytes, int64_t* advised_bytes) {
  namespace capi = bitdecoding::capi;
  return capi::guarded([&]() -> bitdecoding::Status {
    if (advised_bytes != nullptr) *advised_bytes = 0;
    if (bytes < 0) return capi::invalid("bytes is {}; expected a size", bytes);
    if (data == nullptr && bytes > 0) return capi::invalid("data is null, for {} bytes", bytes);
    const std::int64_t advised = bytes > 0 ? capi::advise(data, bytes) : 0;
    if (advised_bytes != nullptr) *advised_bytes = advised;
    return {};
  });
}
