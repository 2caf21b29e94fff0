// SPDX-License-Identifier: Apache-2.0
// Bad arguments: each is a sentence, none is a crash, and nothing is written.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "world.h"

namespace bitdecoding::test {
namespace {

const std::vector<std::int32_t> kPages = {7, 3, 11, 1};

class Arguments : public testing::TestWithParam<std::string> {
 protected:
  Arguments() : world_(options()), id_(world_.add_sequence(kPages)) {
    EXPECT_TRUE(world_.step({{id_, iota_tokens(0, 70)}}).status.ok());
    EXPECT_TRUE(world_.plan_step({{id_, {70}}}).ok());
    EXPECT_TRUE(world_.write().ok());
    EXPECT_TRUE(world_.attend().status.ok());
    attend_ = world_.params;
    write_.layer = &world_.layer;
    write_.cache = world_.cache;
    write_.shadow = world_.shadow;
    write_.key = attend_.key;
    write_.value = attend_.value;
    write_.plan = &world_.plan;
  }

  WorldOptions options() const {
    WorldOptions o;
    o.backend = GetParam();
    o.num_q_heads = 6;
    return o;
  }

  void expect_attend(StatusCode code, const std::function<void(AttendParams&)>& change) {
    AttendParams p = attend_;
    change(p);
    const Status status = world_.backend->attend(p);
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_GT(status.message().size(), 20U);
  }
  void expect_write(StatusCode code, const std::function<void(WriteParams&)>& change) {
    WriteParams p = write_;
    change(p);
    const auto before = world_.page_bytes(kPages[1]);
    const Status status = world_.backend->write(p);
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_GT(status.message().size(), 20U);
    EXPECT_EQ(world_.page_bytes(kPages[1]), before);
  }
  void expect_layer(StatusCode code, const std::function<void(LayerConfig&)>& change) {
    LayerConfig layer = world_.layer;
    change(layer);
    expect_attend(code, [&](AttendParams& p) { p.layer = &layer; });
  }

  World world_;
  int id_;
  AttendParams attend_;
  WriteParams write_;
};

constexpr StatusCode kBad = StatusCode::kInvalidArgument;
constexpr StatusCode kRange = StatusCode::kOutOfRange;

TEST_P(Arguments, Pointers) {
  expect_write(kBad, [](WriteParams& p) { p.layer = nullptr; });
  expect_write(kBad, [](WriteParams& p) { p.plan = nullptr; });
  expect_write(kBad, [](WriteParams& p) { p.cache.pages = nullptr; });
  expect_write(kBad, [](WriteParams& p) { p.key.data = nullptr; });
  expect_write(kBad, [](WriteParams& p) { p.value.data = nullptr; });
  expect_write(kRange, [](WriteParams& p) { p.shadow.rows = nullptr; });
  expect_write(kRange, [](WriteParams& p) { p.shadow.num_slots = 0; });
  expect_attend(kBad, [](AttendParams& p) { p.layer = nullptr; });
  expect_attend(kBad, [](AttendParams& p) { p.plan = nullptr; });
  expect_attend(kBad, [](AttendParams& p) { p.query.data = nullptr; });
  expect_attend(kBad, [](AttendParams& p) { p.output = nullptr; });
  expect_attend(kRange, [](AttendParams& p) { p.shadow.rows = nullptr; });
  auto misaligned = [](const void* p) { return static_cast<const char*>(p) + 1; };
  expect_write(kBad, [&](WriteParams& p) { p.key.data = misaligned(p.key.data); });
  expect_attend(kBad, [&](AttendParams& p) { p.query.data = misaligned(p.query.data); });
  expect_attend(kBad, [&](AttendParams& p) {
    p.lse = reinterpret_cast<float*>(reinterpret_cast<char*>(p.lse) + 2);
  });
}

TEST_P(Arguments, StridesAndSizes) {
  const std::int64_t head_bytes = world_.layer.geometry.head_bytes;
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max() / 2;
  expect_write(kBad, [&](WriteParams& p) { p.cache.stride_page = 2 * head_bytes - 1; });
  expect_write(kBad, [&](WriteParams& p) { p.cache.stride_head = head_bytes - 1; });
  expect_write(kBad, [&](WriteParams& p) { p.cache.stride_page = -2 * head_bytes; });
  expect_write(kBad, [&](WriteParams& p) { p.cache.stride_page = huge; });
  expect_write(kBad, [](WriteParams& p) { p.cache.num_pages = 0; });
  expect_write(kRange, [](WriteParams& p) { p.cache.num_pages = 3; });
  expect_write(kBad, [](WriteParams& p) { p.key.stride_head = 63; });
  expect_write(kBad, [](WriteParams& p) { p.value.stride_head = 0; });
  expect_attend(kBad, [](AttendParams& p) { p.query.stride_head = 1; });
  expect_attend(kBad, [](AttendParams& p) { p.stride_output_head = 63; });
  expect_write(kBad, [](WriteParams& p) { p.key.dtype = static_cast<DType>(9); });
  expect_attend(kBad, [](AttendParams& p) { p.query.dtype = static_cast<DType>(0); });
  expect_attend(kBad, [](AttendParams& p) { p.output_dtype = static_cast<DType>(4); });
}

TEST_P(Arguments, Layers) {
  expect_layer(kBad, [](LayerConfig& l) { l.num_kv_heads = 0; });
  expect_layer(kBad, [](LayerConfig& l) { l.num_q_heads = 5; });
  expect_layer(kBad, [](LayerConfig& l) { l.num_q_heads = 0; });
  for (const int group : {17, 20, 33, 48, 128}) {
    expect_layer(StatusCode::kUnsupported, [group](LayerConfig& l) { l.num_q_heads = 2 * group; });
  }
  expect_layer(kBad, [](LayerConfig& l) { l.geometry.head_dim = 80; });
  expect_layer(kBad, [](LayerConfig& l) { l.geometry.head_bytes += 64; });
  expect_layer(kBad, [](LayerConfig& l) { l.geometry.page_size = 100; });
  expect_layer(kBad, [](LayerConfig& l) { l.key_rule = ScaleRule::kMxfp4Search; });
  const std::int8_t outer[2] = {0, 100};
  expect_layer(kBad, [&](LayerConfig& l) { l.value_outer = outer; });
  expect_layer(kBad, [](LayerConfig& l) {
    l.geometry = PageGeometry::make(Format::kNvfp4, FragmentOrder::kQuad, 64, 128).take();
  });
}

TEST_P(Arguments, Scalars) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  for (const float scale : {nan, inf, 3e38F, 65537.0F, 0.0F, -0.125F, 1e-40F}) {
    expect_attend(kBad, [&](AttendParams& p) { p.sm_scale = scale; });
  }
  for (const float softcap : {nan, inf, 3e38F, -1.0F, 1e-40F}) {
    expect_attend(kBad, [&](AttendParams& p) { p.softcap = softcap; });
  }
  expect_attend(kBad, [&](AttendParams& p) { p.window_left = -2; });
  const float sinks[6] = {0, 0, 0, nan, 0, 0};
  expect_attend(kBad, [&](AttendParams& p) { p.attn_sink = sinks; });
  expect_attend(kBad, [&](AttendParams& p) { p.arithmetic = static_cast<Arithmetic>(0); });
  auto fp4 = [&](const std::function<void(AttendParams&)>& change) {
    expect_attend(kBad, [&](AttendParams& p) {
      p.arithmetic = Arithmetic::kFp4;
      change(p);
    });
  };
  fp4([](AttendParams& p) { p.query_terms = 3; });
  fp4([](AttendParams& p) { p.query_terms = 0; });
  fp4([](AttendParams& p) { p.probability_c = 0.0F; });
  fp4([&](AttendParams& p) { p.probability_c = nan; });
  fp4([](AttendParams& p) { p.probability_c = 4000.0F; });
  fp4([](AttendParams& p) { p.probability_tau = 449.0F; });
  fp4([](AttendParams& p) { p.probability_tau = -1.0F; });
}

TEST_P(Arguments, Gather) {
  std::vector<float> k(71 * 64);
  std::vector<float> v(71 * 64);
  auto gather = [&](int request, int head, std::int64_t begin, std::int64_t end) {
    return world_.backend->gather(attend_, request, head, begin, end, k.data(), v.data()).code();
  };
  EXPECT_EQ(gather(0, 0, 0, 71), StatusCode::kOk);
  EXPECT_EQ(gather(0, 0, 5, 5), StatusCode::kOk);
  EXPECT_EQ(gather(1, 0, 0, 1), kRange);
  EXPECT_EQ(gather(-1, 0, 0, 1), kRange);
  EXPECT_EQ(gather(0, 2, 0, 1), kRange);
  EXPECT_EQ(gather(0, 0, 0, 72), kRange);
  EXPECT_EQ(gather(0, 0, -1, 1), kRange);
  EXPECT_EQ(gather(0, 0, 3, 2), kRange);
  EXPECT_EQ(world_.backend->gather(attend_, 0, 0, 0, 1, nullptr, v.data()).code(), kBad);
}

INSTANTIATE_TEST_SUITE_P(Backends, Arguments, testing::ValuesIn(backend_names()));

TEST(Registry, NamesAndErrors) {
  EXPECT_EQ(make_backend("reference", {}).take()->name(), "reference");
  const auto unknown = make_backend("metal", {});
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.status().code(), kBad);
  EXPECT_NE(unknown.status().message().find("reference"), std::string::npos);
  BackendOptions options;
  options.isa = "AVX9000";
  for (const std::string& name : backend_names()) {
    EXPECT_EQ(make_backend(name, options).status().code(), kBad) << name;
  }
}

TEST(RowFormats, RefuseWhatTheyHaveNot) {
  for (const Format f : {Format::kBf16, Format::kFp8E4m3, Format::kNvfp4Rows}) {
    WorldOptions o;
    o.format = f;
    World w(o);
    const int s = w.add_sequence(kPages);
    ASSERT_TRUE(w.step({{s, iota_tokens(0, 20)}}).status.ok());
    w.params.arithmetic = Arithmetic::kFp4;
    EXPECT_EQ(w.attend().status.code(), StatusCode::kUnsupported);
    w.params.arithmetic = Arithmetic::kWide;
    const std::vector<float> shift(128, 1.0F);
    w.layer.key_shift = shift.data();
    EXPECT_EQ(w.attend().status.code(), kBad);
    w.layer.key_shift = nullptr;
    const std::int8_t outer[2] = {1, 1};
    w.layer.key_outer = outer;
    EXPECT_EQ(w.attend().status.code(), f == Format::kNvfp4Rows ? StatusCode::kOk : kBad);
  }
}

}  // namespace
}  // namespace bitdecoding::test
