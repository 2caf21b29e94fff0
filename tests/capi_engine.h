// SPDX-License-Identifier: Apache-2.0
// One layer and its steps behind the C ABI, over poisoned memory, for the tests of the ABI.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "bitdecoding/bitdecoding.h"

namespace bitdecoding {

#define EXPECT_HAS(text, part)                               \
  EXPECT_NE(std::string(text).find(part), std::string::npos) \
      << "\"" << (text) << "\" lacks \"" << (part) << "\""

inline constexpr int kHeads = 2;
inline constexpr int kDim = 64;
inline constexpr int kPage = 64;
inline constexpr int kPages = 8;
inline constexpr int kSlots = 32;

template <class T>
T sized() {
  T value;
  std::memset(&value, 0, sizeof(value));
  value.struct_size = sizeof(value);
  return value;
}

struct Runtime {
  explicit Runtime(const char* recipe, const char* file = nullptr,
                   const char* backend = "reference") {
    auto options = sized<bd_runtime_options>();
    options.recipe_json = recipe;
    options.recipe_file = file;
    options.origin = "test";
    options.backend = backend;
    options.model = "tiny";
    status = bd_runtime_create(&options, &handle);
    error = bd_last_error();
  }
  ~Runtime() { bd_runtime_destroy(handle); }
  bd_runtime* handle = nullptr;
  bd_status status = BD_OK;
  std::string error;
};

inline bd_layer_options layer_options() {
  auto o = sized<bd_layer_options>();
  o.num_layers = 2;
  o.num_q_heads = 2 * kHeads;
  o.num_kv_heads = kHeads;
  o.total_kv_heads = kHeads;
  o.head_dim = kDim;
  o.page_size = kPage;
  o.sm_scale = 0.125F;
  o.window_left = -1;
  return o;
}

inline bd_steps_options steps_options() {
  auto o = sized<bd_steps_options>();
  o.head_dim = kDim;
  o.page_size = kPage;
  o.num_pages = kPages;
  o.num_slots = kSlots;
  o.max_requests = 2;
  return o;
}

// One layer and its steps over poisoned memory with canaries behind it.
struct Engine {
  explicit Engine(bd_runtime* runtime, bd_layer_options options = layer_options()) {
    auto info = sized<bd_page_info>();
    EXPECT_EQ(bd_page_info_get(runtime, kDim, kPage, 2, &info), BD_OK) << bd_last_error();
    EXPECT_EQ(bd_layer_create(runtime, &options, &layer), BD_OK) << bd_last_error();
    const bd_steps_options so = steps_options();
    EXPECT_EQ(bd_steps_create(runtime, &so, &steps), BD_OK) << bd_last_error();
    head_bytes = info.head_bytes;
    pages.assign(static_cast<std::size_t>(kPages * kHeads * info.head_bytes + 64), 0xA5);
    shadow.assign(static_cast<std::size_t>(kSlots * kHeads * info.slot_bytes_per_head / 2), 0x7FC0);
    rows.resize(300 * kHeads * kDim);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i] = std::sin(0.37F * static_cast<float>(i)) + 0.5F;
    }
    query.resize(2 * rows.size(), 0.25F);
    output.resize(query.size(), -77.0F);
  }
  ~Engine() {
    bd_layer_destroy(layer);
    bd_steps_destroy(steps);
  }

  bd_status build(int seq_len, int count) {
    std::vector<std::int32_t> table = {3, 1, 6, 2, 5};
    std::vector<std::int64_t> slots;
    for (int i = seq_len - count; i < seq_len; ++i) {
      slots.push_back(std::int64_t{table[static_cast<std::size_t>(i / kPage)]} * kPage + i % kPage);
    }
    const std::int32_t query_start[] = {0, count};
    const std::int32_t seq_lens[] = {seq_len};
    auto input = sized<bd_step_input>();
    input.num_requests = 1;
    input.block_table = table.data();
    input.block_table_stride = 5;
    input.query_start = query_start;
    input.seq_lens = seq_lens;
    input.slot_mapping = slots.data();
    input.num_tokens = count;
    return bd_steps_build(steps, &input);
  }

  bd_cache cache() {
    bd_cache c{};
    c.pages = pages.data();
    c.num_pages = kPages;
    c.stride_head = head_bytes;
    c.stride_page = kHeads * head_bytes;
    c.shadow = shadow.data();
    c.num_slots = kSlots;
    return c;
  }
  static bd_tensor tensor(const float* data, int heads) {
    bd_tensor t{};
    t.data = data;
    t.stride_token = heads * kDim;
    t.stride_head = kDim;
    t.dtype = BD_F32;
    return t;
  }
  bd_write_params write_params(int count) {
    auto p = sized<bd_write_params>();
    p.layer = layer;
    p.steps = steps;
    p.cache = cache();
    p.key = tensor(rows.data(), kHeads);
    p.value = tensor(rows.data() + 17, kHeads);
    p.num_tokens = count;
    return p;
  }
  bd_attend_params attend_params(int count) {
    auto p = sized<bd_attend_params>();
    p.layer = layer;
    p.steps = steps;
    p.cache = cache();
    p.query = tensor(query.data(), 2 * kHeads);
    p.key = tensor(rows.data(), kHeads);
    p.value = tensor(rows.data() + 17, kHeads);
    p.output = tensor(output.data(), 2 * kHeads);
    p.num_tokens = count;
    return p;
  }

  bd_layer* layer = nullptr;
  bd_steps* steps = nullptr;
  std::int64_t head_bytes = 0;
  std::vector<std::uint8_t> pages;
  std::vector<std::uint16_t> shadow;
  std::vector<float> rows, query, output;
};

inline constexpr const char* kRecipe = R"({"key_shift": false})";

}  // namespace bitdecoding
