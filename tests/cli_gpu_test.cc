// SPDX-License-Identifier: Apache-2.0
// GPUs as `doctor` and `bench` see them, with a driver's library of the tests' own.
#include <string>

#include "cli_world.h"

namespace bitdecoding {
namespace {

std::string with_fake(const std::string& what, const std::string& arguments) {
  return "LD_LIBRARY_PATH=" BITDECODING_FAKE_CUDA_DIR ":$LD_LIBRARY_PATH FAKE_CUDA=" + what + " " +
         BITDECODING_PROGRAM + " " + arguments;
}

nlohmann::json finding(const nlohmann::json& report, const std::string& name) {
  for (const auto& f : report["findings"]) {
    if (f["name"] == name) return f;
  }
  return nlohmann::json::object();
}

nlohmann::json doctor(const std::string& what) {
  const Outcome run = shell(with_fake(what, "doctor --json 2>/dev/null"));
  const nlohmann::json report = nlohmann::json::parse(run.out, nullptr, false);
  EXPECT_TRUE(report.is_object()) << run.out;
  return report;
}

TEST(CliGpu, DoctorNamesEachGpu) {
  const nlohmann::json report = doctor("two");
  EXPECT_HAS(finding(report, "CUDA").value("value", ""), "CUDA 13.1");
  const nlohmann::json first = finding(report, "GPU 0");
  EXPECT_EQ(first.value("value", ""), "Model X, compute capability 9.0, 96.0 GiB");
  EXPECT_EQ(finding(report, "GPU 1").value("value", ""),
            "Model Y, compute capability 12.0, 24.0 GiB");
#ifdef BITDECODING_CUDA_SM90
  EXPECT_EQ(first.value("verdict", ""), "good");
  EXPECT_HAS(finding(report, "GPU 1").value("advice", ""), "fp4 arithmetic");
#elif defined(BITDECODING_WITH_CUDA)
  EXPECT_HAS(first.value("advice", ""), "BITDECODING_CUDA_ARCHITECTURES");
#else
  EXPECT_EQ(first.value("verdict", ""), "note");
  EXPECT_HAS(first.value("advice", ""), "-DBITDECODING_BUILD_CUDA=ON");
#endif
}

TEST(CliGpu, NoGpuIsALineAndNoError) {
  const nlohmann::json none = doctor("none");
  EXPECT_EQ(finding(none, "CUDA").value("verdict", ""), "note");
  EXPECT_HAS(finding(none, "CUDA").value("value", ""), "it shows no GPU");
  EXPECT_HAS(finding(doctor("broken"), "CUDA").value("value", ""), "unknown error of the fake");
  EXPECT_EQ(finding(none, "GPU 0"), nlohmann::json::object());
}

TEST(CliGpu, BenchOnAGpuNeedsTheBackendAndADevice) {
  const Outcome decode = program("bench decode --backend cuda --context 128 --seconds 0");
  const Outcome write = program("bench write --backend cuda --context 128 --seconds 0");
#ifndef BITDECODING_WITH_CUDA
  for (const Outcome* run : {&decode, &write}) {
    EXPECT_EQ(run->code, 3) << run->out;
    EXPECT_HAS(run->out, "-DBITDECODING_BUILD_CUDA=ON");
  }
#else
  // A row where there is a GPU, a sentence where there is none.
  EXPECT_TRUE(decode.code == 0 || decode.code == 3) << decode.out;
  EXPECT_TRUE(write.code == decode.code) << write.out;
#endif
  const Outcome prefill = program("bench prefill --backend cuda");
  EXPECT_EQ(prefill.code, 3);
  EXPECT_HAS(prefill.out, "no prefill kernel");
}

}  // namespace
}  // namespace bitdecoding
