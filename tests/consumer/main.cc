// SPDX-License-Identifier: Apache-2.0
#include <bitdecoding/backend.h>
#include <bitdecoding/bitdecoding.h>

#include <cstdio>

int main() {
  const auto geometry = bitdecoding::PageGeometry::make(
      bitdecoding::Format::kNvfp4, bitdecoding::FragmentOrder::kQuad, 128, 128);
  const auto backend = bitdecoding::make_backend("reference", {});
  std::printf("%s %lld\n", bd_version(), static_cast<long long>(geometry.value().head_bytes));
  return backend.ok() && geometry.value().head_bytes == 18432 ? 0 : 1;
}
