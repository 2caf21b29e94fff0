// SPDX-License-Identifier: Apache-2.0
// Any bytes: a page that exports to the same bytes, or a sentence and nothing written.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bitdecoding/page.h"
#include "require.h"

namespace {

constexpr int kMaxHeads = 4;
constexpr std::uint8_t kPoison = 0xA5;

void import_and_export(const bitdecoding::PageGeometry& geometry, const bitdecoding::FormatTag& tag,
                       const std::uint8_t* data, std::size_t size) {
  using bitdecoding::require;
  std::vector<std::vector<std::uint8_t>> heads(
      tag.num_kv_heads,
      std::vector<std::uint8_t>(static_cast<std::size_t>(geometry.head_bytes), kPoison));
  std::vector<std::uint8_t*> pointers;
  for (auto& head : heads) pointers.push_back(head.data());
  const auto status = bitdecoding::import_page(geometry, {data, size}, pointers, tag.first_kv_head);
  if (!status.ok()) {
    for (const auto& head : heads) {
      require(std::all_of(head.begin(), head.end(), [](std::uint8_t b) { return b == kPoison; }),
              "a refused page writes nothing");
    }
    return;
  }
  const std::vector<const std::uint8_t*> views(pointers.begin(), pointers.end());
  const auto bytes = bitdecoding::export_page(geometry, views, tag.first_kv_head);
  require(bytes.ok(), "an imported page exports");
  require(bytes.value().size() == size && std::equal(data, data + size, bytes.value().begin()),
          "to the same bytes");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto read = bitdecoding::read_format_tag({data, size});
  if (!read.ok()) {
    bitdecoding::require(!read.status().message().empty(), "an error has a sentence");
    return 0;
  }
  const bitdecoding::FormatTag& tag = read.value();
  if (tag.num_kv_heads > kMaxHeads) return 0;
  for (const auto order :
       {bitdecoding::FragmentOrder::kFp4Mma, bitdecoding::FragmentOrder::kQuad}) {
    const auto geometry =
        bitdecoding::PageGeometry::make(tag.format, order, tag.head_dim, tag.page_size);
    if (geometry.ok()) import_and_export(geometry.value(), tag, data, size);
  }
  return 0;
}
