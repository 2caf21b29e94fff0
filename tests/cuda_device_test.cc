// SPDX-License-Identifier: Apache-2.0
// What is said of devices; no GPU is needed.
#include <gtest/gtest.h>

#include "backend/cuda/cuda_plan.h"
#include "backend/cuda/device.h"

namespace bitdecoding {
namespace {

CudaDevice device(int major, int minor) {
  CudaDevice d;
  d.name = "Model X";
  d.major = major;
  d.minor = minor;
  return d;
}

TEST(CudaDevices, KernelsAreThoseOfTheBuild) {
  for (const auto& [major, minor] : {std::pair(7, 5), {9, 1}, {10, 0}, {12, 0}}) {
    EXPECT_EQ(cuda::kernels_of(major, minor), "");
  }
#ifdef BITDECODING_CUDA_SM80
  EXPECT_EQ(cuda::kernels_of(8, 0), "sm80");
  EXPECT_EQ(cuda::kernels_of(8, 9), "sm80");
#else
  EXPECT_EQ(cuda::kernels_of(8, 0), "");
#endif
#ifdef BITDECODING_CUDA_SM90
  EXPECT_EQ(cuda::kernels_of(9, 0), "sm90");
#else
  EXPECT_EQ(cuda::kernels_of(9, 0), "");
#endif
}

TEST(CudaDevices, MissingDecodeKernelsAreASentence) {
  const auto expect = [](const CudaDevice& d, const std::string& words) {
    const Status status = cuda::no_decode_kernels(d);
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_NE(status.message().find("Model X"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
  };
  expect(device(8, 6), "add 80 to BITDECODING_CUDA_ARCHITECTURES");
  expect(device(9, 0), "add 90a to BITDECODING_CUDA_ARCHITECTURES");
  expect(device(10, 0), "compute capability 10.0");
  expect(device(12, 0), "fp4 arithmetic run on it");
}

TEST(CudaDevices, ABackendNeedsADevice) {
  const auto devices = cuda_devices();
  if (!devices.ok()) {
    EXPECT_NE(devices.status().code(), StatusCode::kInternal) << devices.status().message();
    EXPECT_FALSE(CudaBackend::make({0, 128}).ok());
    return;
  }
  const auto beyond = static_cast<int>(devices.value().size());
  for (const int ordinal : {-1, beyond}) {
    EXPECT_EQ(CudaBackend::make({ordinal, 128}).status().code(), StatusCode::kOutOfRange);
  }
}

// A launch may begin before its predecessor only where one has already waited for the plan.
TEST(CudaPlans, LaunchesFollowWhereTheFirstWent) {
  const cuda::Plan plan({});
  int stream = 0;
  const cuda::Plan::Place eager{};
  const cuda::Plan::Place other{&stream, 0};
  const cuda::Plan::Place captured{nullptr, 7};
  EXPECT_FALSE(plan.followed(eager));
  plan.launched(eager);
  EXPECT_TRUE(plan.followed(eager));
  EXPECT_FALSE(plan.followed(other));
  EXPECT_FALSE(plan.followed(captured));
  plan.launched(captured);
  EXPECT_TRUE(plan.followed(captured));
  EXPECT_FALSE(plan.followed(eager));
}

}  // namespace
}  // namespace bitdecoding
