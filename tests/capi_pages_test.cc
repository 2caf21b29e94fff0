// SPDX-License-Identifier: Apache-2.0
// Pages through the C ABI: from one backend's cache into another's, and what is refused.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "capi_engine.h"

namespace bitdecoding {
namespace {

// A layer whose page 3 is full (64 tokens) and whose page 1 has 36 of 64.
struct Source {
  Source() : runtime(kRecipe), engine(runtime.handle) {
    EXPECT_EQ(engine.build(100, 100), BD_OK) << bd_last_error();
    const bd_write_params write = engine.write_params(100);
    EXPECT_EQ(bd_write(&write), BD_OK) << bd_last_error();
    EXPECT_EQ(bd_page_export_bytes(engine.layer, &num_bytes), BD_OK) << bd_last_error();
    cache = engine.cache();
    file.resize(static_cast<std::size_t>(num_bytes));
    EXPECT_EQ(bd_page_export(engine.layer, &cache, 3, file.data(), num_bytes), BD_OK)
        << bd_last_error();
  }
  Runtime runtime;
  Engine engine;
  bd_cache cache{};
  std::int64_t num_bytes = 0;
  std::vector<std::uint8_t> file;
};

TEST(CapiPages, TheLengthIsTheTagsAndTheHeads) {
  const Source source;
  EXPECT_EQ(source.num_bytes, 32 + kHeads * source.engine.head_bytes);
  std::int64_t bytes = 0;
  EXPECT_EQ(bd_page_export_bytes(nullptr, &bytes), BD_INVALID_ARGUMENT);
  EXPECT_EQ(bd_page_export_bytes(source.engine.layer, nullptr), BD_INVALID_ARGUMENT);
}

// The cpu backend keeps pages in another order, and this cache has its heads outermost.
TEST(CapiPages, APageMovesToAnotherBackendAndBack) {
  const Source source;
  auto options = sized<bd_runtime_options>();
  options.recipe_json = kRecipe;
  options.backend = "cpu";
  options.num_threads = 1;
  bd_runtime* other = nullptr;
  ASSERT_EQ(bd_runtime_create(&options, &other), BD_OK) << bd_last_error();
  Engine target(other);
  bd_runtime_destroy(other);
  bd_cache cache = target.cache();
  cache.stride_page = target.head_bytes;
  cache.stride_head = kPages * target.head_bytes;
  ASSERT_EQ(bd_page_import(target.layer, &cache, 5, source.file.data(), source.num_bytes), BD_OK)
      << bd_last_error();
  // Both heads of page 5 are written and nothing else is.
  const auto untouched = [&](std::int64_t begin, std::int64_t end) {
    return std::all_of(target.pages.begin() + begin, target.pages.begin() + end,
                       [](std::uint8_t b) { return b == 0xA5; });
  };
  const std::int64_t head = target.head_bytes;
  EXPECT_TRUE(untouched(0, 5 * head));
  EXPECT_TRUE(untouched(6 * head, (kPages + 5) * head));
  EXPECT_TRUE(untouched((kPages + 6) * head, std::int64_t{2} * kPages * head));
  EXPECT_FALSE(untouched(5 * head, 6 * head));
  EXPECT_FALSE(
      std::equal(source.file.begin() + 32, source.file.begin() + 32 + head,
                 target.pages.begin() + 5 * head));  // another order, so another sequence of bytes
  std::vector<std::uint8_t> back(source.file.size());
  ASSERT_EQ(bd_page_export(target.layer, &cache, 5, back.data(), source.num_bytes), BD_OK);
  EXPECT_EQ(back, source.file);
}

// Two sequences of 66 tokens, of which the first 64 came from the file in one of them.
TEST(CapiPages, AnImportedPageIsRead) {
  Source source;
  Engine target(source.runtime.handle);
  target.rows[0] = 9.0F;  // its own page 3 is another one
  ASSERT_EQ(target.build(65, 65), BD_OK) << bd_last_error();
  bd_write_params write = target.write_params(65);
  ASSERT_EQ(bd_write(&write), BD_OK) << bd_last_error();
  target.rows[0] = source.engine.rows[0];
  const bd_cache cache = target.cache();
  ASSERT_EQ(bd_page_import(target.layer, &cache, 3, source.file.data(), source.num_bytes), BD_OK);
  for (Engine* engine : {&target, &source.engine}) {
    ASSERT_EQ(bd_steps_forget(engine->steps, 3), BD_OK);
    ASSERT_EQ(engine->build(66, 1), BD_OK) << bd_last_error();
    write = engine->write_params(1);
    ASSERT_EQ(bd_write(&write), BD_OK) << bd_last_error();
    const bd_attend_params attend = engine->attend_params(1);
    ASSERT_EQ(bd_attend(&attend), BD_OK) << bd_last_error();
  }
  EXPECT_NE(target.output[0], -77.0F);
  EXPECT_EQ(target.output, source.engine.output);
}

TEST(CapiPages, ExportRefusesBadArguments) {
  Source source;
  const auto refused = [&](auto change, bd_status status, const char* part) {
    const bd_layer* layer = source.engine.layer;
    bd_cache cache = source.cache;
    const bd_cache* view = &cache;
    std::int64_t page = 3;
    std::vector<std::uint8_t> out(source.file.size(), 0xEE);
    void* bytes = out.data();
    std::int64_t num_bytes = source.num_bytes;
    change(layer, view, cache, page, bytes, num_bytes);
    EXPECT_EQ(bd_page_export(layer, view, page, bytes, num_bytes), status) << part;
    EXPECT_HAS(bd_last_error(), part);
    EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](auto b) { return b == 0xEE; })) << part;
  };
#define WITH(change)                                                                           \
  [&]([[maybe_unused]] auto& layer, [[maybe_unused]] auto& view, [[maybe_unused]] auto& cache, \
      [[maybe_unused]] auto& page, [[maybe_unused]] auto& bytes,                               \
      [[maybe_unused]] auto& num_bytes) { change; }
  refused(WITH(layer = nullptr), BD_INVALID_ARGUMENT, "the layer is null");
  refused(WITH(view = nullptr), BD_INVALID_ARGUMENT, "the cache is null");
  refused(WITH(cache.pages = nullptr), BD_INVALID_ARGUMENT, "pages of the cache are null");
  refused(WITH(cache.stride_head -= 1), BD_INVALID_ARGUMENT, "must be at least");
  refused(WITH(cache.stride_page = cache.stride_head), BD_INVALID_ARGUMENT, "overlaps itself");
  refused(WITH(page = -1), BD_OUT_OF_RANGE, "page is -1");
  refused(WITH(page = kPages), BD_OUT_OF_RANGE, "expected 0 to 7");
  refused(WITH(cache.num_pages = 0), BD_OUT_OF_RANGE, "the cache has 0");
  refused(WITH(bytes = nullptr), BD_INVALID_ARGUMENT, "are null");
  refused(WITH(num_bytes -= 1), BD_OUT_OF_RANGE, "ask bd_page_export_bytes");
  refused(WITH(num_bytes += 1), BD_OUT_OF_RANGE, "ask bd_page_export_bytes");
  refused(WITH(num_bytes = -1), BD_OUT_OF_RANGE, "num_bytes is -1");
}

TEST(CapiPages, ImportRefusesBadArgumentsAndWritesNothing) {
  Source source;
  Engine target(source.runtime.handle);
  const std::vector<std::uint8_t> before = target.pages;
  const auto refused = [&](auto change, bd_status status, const char* part) {
    const bd_layer* layer = target.layer;
    bd_cache cache = target.cache();
    const bd_cache* view = &cache;
    std::int64_t page = 3;
    std::vector<std::uint8_t> file = source.file;
    const void* bytes = file.data();
    std::int64_t num_bytes = source.num_bytes;
    change(layer, view, file, page, bytes, num_bytes);
    EXPECT_EQ(bd_page_import(layer, view, page, bytes, num_bytes), status) << part;
    EXPECT_HAS(bd_last_error(), part);
    EXPECT_EQ(target.pages, before) << part;
  };
#define FILE_WITH(change)                                                                     \
  [&]([[maybe_unused]] auto& layer, [[maybe_unused]] auto& view, [[maybe_unused]] auto& file, \
      [[maybe_unused]] auto& page, [[maybe_unused]] auto& bytes,                              \
      [[maybe_unused]] auto& num_bytes) { change; }
  refused(FILE_WITH(layer = nullptr), BD_INVALID_ARGUMENT, "the layer is null");
  refused(FILE_WITH(view = nullptr), BD_INVALID_ARGUMENT, "the cache is null");
  refused(FILE_WITH(page = kPages), BD_OUT_OF_RANGE, "expected 0 to 7");
  refused(FILE_WITH(page = std::numeric_limits<std::int64_t>::min()), BD_OUT_OF_RANGE,
          "page is -9");
  refused(FILE_WITH(bytes = nullptr), BD_INVALID_ARGUMENT, "the bytes of the page are null");
  refused(FILE_WITH(num_bytes = -1), BD_INVALID_ARGUMENT, "num_bytes is -1");
  refused(FILE_WITH(num_bytes = 0), BD_CORRUPT, "only 0 bytes");
  refused(FILE_WITH(num_bytes -= 1), BD_CORRUPT, "cut or padded");
  refused(FILE_WITH(file[0] ^= 1), BD_CORRUPT, "no exported page");
  refused(FILE_WITH(file[4] = 2), BD_UNSUPPORTED, "layout version 2");
  refused(FILE_WITH(file[14] = 1), BD_INVALID_ARGUMENT, "first KV head");
  refused(FILE_WITH(file[6] = 5), BD_CORRUPT, "cut or padded");  // MXFP4 pages are shorter
  refused(FILE_WITH(file[32 + 2048] = 0x7F), BD_CORRUPT, "no writer produces");

  auto tag = sized<bd_page_tag>();
  EXPECT_EQ(bd_page_tag_read(source.file.data(), source.num_bytes, nullptr), BD_INVALID_ARGUMENT);
  EXPECT_EQ(bd_page_tag_read(nullptr, 32, &tag), BD_INVALID_ARGUMENT);
  EXPECT_EQ(bd_page_tag_read(source.file.data(), 32, &tag), BD_CORRUPT);
  tag.struct_size = 8;
  EXPECT_EQ(bd_page_tag_read(source.file.data(), source.num_bytes, &tag), BD_INVALID_ARGUMENT);
  EXPECT_HAS(bd_last_error(), "bd_page_tag.struct_size is 8");
}

// A rank's page does not fit another rank's layer.
TEST(CapiPages, TheTagNamesTheRanksHeads) {
  const Runtime runtime(kRecipe);
  bd_layer_options options = layer_options();
  options.total_kv_heads = 8;
  options.first_kv_head = 4;
  Engine rank(runtime.handle, options);
  std::fill(rank.pages.begin(), rank.pages.end(), std::uint8_t{0});
  const bd_cache cache = rank.cache();
  std::vector<std::uint8_t> file(static_cast<std::size_t>(32 + kHeads * rank.head_bytes));
  const auto num_bytes = static_cast<std::int64_t>(file.size());
  ASSERT_EQ(bd_page_export(rank.layer, &cache, 0, file.data(), num_bytes), BD_OK);
  auto tag = sized<bd_page_tag>();
  ASSERT_EQ(bd_page_tag_read(file.data(), num_bytes, &tag), BD_OK) << bd_last_error();
  EXPECT_EQ(tag.first_kv_head, 4);
  EXPECT_EQ(tag.num_kv_heads, 2);
  EXPECT_EQ(tag.page_size, kPage);
  EXPECT_EQ(tag.head_dim, kDim);
  EXPECT_STREQ(tag.format, "nvfp4");
  const Engine other(runtime.handle);
  EXPECT_EQ(bd_page_import(other.layer, &cache, 0, file.data(), num_bytes), BD_INVALID_ARGUMENT);
  EXPECT_HAS(bd_last_error(), "the page's first KV head is 4");
}

}  // namespace
}  // namespace bitdecoding
