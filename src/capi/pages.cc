// SPDX-License-Identifier: Apache-2.0
// Pages that leave the process and come back.
#include <algorithm>
#include <span>

#include "capi/cuda.h"

namespace bitdecoding::capi {
namespace {

std::int64_t export_bytes(const bd_layer& layer) {
  return static_cast<std::int64_t>(sizeof(FormatTag)) +
         layer.config.num_kv_heads * layer.config.geometry.head_bytes;
}

Status check_page(const bd_layer* layer, const bd_cache* cache, std::int64_t page) {
  if (layer == nullptr) return invalid("the layer is null");
  if (Status s = refuse_device(*layer->runtime, "an export or import",
                               "copy its pages to host memory, for a layer of the backend cpu");
      !s.ok()) {
    return s;
  }
  if (cache == nullptr) return invalid("the cache is null");
  if (Status s = check_pages(*layer, *cache); !s.ok()) return s;
  if (page >= 0 && page < cache->num_pages) return {};
  return {StatusCode::kOutOfRange, fmt::format("page is {}, and the cache has {}; expected 0 to {}",
                                               page, cache->num_pages, cache->num_pages - 1)};
}

// Where the heads of a page begin.
std::vector<std::uint8_t*> heads_of(const bd_layer& layer, const bd_cache& cache,
                                    std::int64_t page) {
  auto* at = static_cast<std::uint8_t*>(cache.pages) + page * cache.stride_page;
  std::vector<std::uint8_t*> heads;
  heads.reserve(static_cast<std::size_t>(layer.config.num_kv_heads));
  for (int h = 0; h < layer.config.num_kv_heads; ++h) heads.push_back(at + h * cache.stride_head);
  return heads;
}

Result<std::span<const std::uint8_t>> byte_span(const void* bytes, std::int64_t num_bytes) {
  if (num_bytes < 0) return invalid("num_bytes is {}; expected the page's length", num_bytes);
  if (bytes == nullptr) return invalid("the bytes of the page are null, for {} bytes", num_bytes);
  return std::span(static_cast<const std::uint8_t*>(bytes), static_cast<std::size_t>(num_bytes));
}

Status export_to(const bd_layer* layer, const bd_cache* cache, std::int64_t page, void* bytes,
                 std::int64_t num_bytes) {
  if (Status s = check_page(layer, cache, page); !s.ok()) return s;
  if (bytes == nullptr) return invalid("the bytes to write the page to are null");
  if (num_bytes != export_bytes(*layer)) {
    return {StatusCode::kOutOfRange,
            fmt::format("an exported page of this layer has {} bytes, and num_bytes is {}; ask "
                        "bd_page_export_bytes",
                        export_bytes(*layer), num_bytes)};
  }
  const std::vector<std::uint8_t*> heads = heads_of(*layer, *cache, page);
  const std::vector<const std::uint8_t*> views(heads.begin(), heads.end());
  Result<std::vector<std::uint8_t>> file =
      export_page(layer->config.geometry, views, layer->first_kv_head);
  if (!file.ok()) return file.status();
  std::copy(file.value().begin(), file.value().end(), static_cast<std::uint8_t*>(bytes));
  return {};
}

Status import_from(const bd_layer* layer, const bd_cache* cache, std::int64_t page,
                   const void* bytes, std::int64_t num_bytes) {
  if (Status s = check_page(layer, cache, page); !s.ok()) return s;
  const Result<std::span<const std::uint8_t>> file = byte_span(bytes, num_bytes);
  if (!file.ok()) return file.status();
  return import_page(layer->config.geometry, file.value(), heads_of(*layer, *cache, page),
                     layer->first_kv_head);
}

Status read_tag(const void* bytes, std::int64_t num_bytes, bd_page_tag* out) {
  const Result<std::span<const std::uint8_t>> file = byte_span(bytes, num_bytes);
  if (!file.ok()) return file.status();
  const Result<FormatTag> tag = read_format_tag(file.value());
  if (!tag.ok()) return tag.status();
  out->format = format_name(tag.value().format).data();  // a literal, so it ends in a zero
  out->version = tag.value().version;
  out->head_dim = tag.value().head_dim;
  out->page_size = tag.value().page_size;
  out->num_kv_heads = tag.value().num_kv_heads;
  out->first_kv_head = tag.value().first_kv_head;
  return {};
}

}  // namespace
}  // namespace bitdecoding::capi

using bitdecoding::Status;
namespace capi = bitdecoding::capi;

bd_status bd_page_export_bytes(const bd_layer* layer, int64_t* num_bytes) {
  return capi::guarded([&]() -> Status {
    if (layer == nullptr) return capi::invalid("the layer is null");
    if (num_bytes == nullptr) return capi::invalid("the pointer to num_bytes is null");
    *num_bytes = capi::export_bytes(*layer);
    return {};
  });
}

bd_status bd_page_export(const bd_layer* layer, const bd_cache* cache, int64_t page, void* bytes,
                         int64_t num_bytes) {
  return capi::guarded([&] { return capi::export_to(layer, cache, page, bytes, num_bytes); });
}

bd_status bd_page_import(const bd_layer* layer, const bd_cache* cache, int64_t page,
                         const void* bytes, int64_t num_bytes) {
  return capi::guarded([&] { return capi::import_from(layer, cache, page, bytes, num_bytes); });
}

bd_status bd_page_tag_read(const void* bytes, int64_t num_bytes, bd_page_tag* tag) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_struct(tag, "bd_page_tag"); !s.ok()) return s;
    return capi::read_tag(bytes, num_bytes, tag);
  });
}
