// SPDX-License-Identifier: Apache-2.0
// What the C ABI says of GPUs where there is none, or a library without the CUDA backend.
#include "capi_engine.h"

namespace bitdecoding {
namespace {

const char* const kRecipe = R"({"mode": "bitdecoding-nvfp4", "key_shift": false})";

TEST(CapiDevice, WithoutAGpuARuntimeIsASentence) {
  const Runtime runtime(kRecipe, nullptr, "cuda");
  if (runtime.status == BD_OK) GTEST_SKIP() << "there is a GPU";
  EXPECT_NE(runtime.status, BD_INTERNAL);
  EXPECT_EQ(runtime.handle, nullptr);
  EXPECT_FALSE(runtime.error.empty());
}

TEST(CapiDevice, RecipesThatGpusDoNotServeAreRefusedFirst) {
  const Runtime rows(R"({"mode": "bf16"})", nullptr, "cuda");
  EXPECT_EQ(rows.status, BD_UNSUPPORTED);
  EXPECT_HAS(rows.error, "recipe's format is 'bf16'");
  EXPECT_HAS(rows.error, "bitdecoding-nvfp4");
  const Runtime observed(
      R"({"mode": "bitdecoding-nvfp4", "key_shift": false, "calibrate_file": "k.safetensors"})",
      nullptr, "cuda");
  EXPECT_EQ(observed.status, BD_UNSUPPORTED);
  EXPECT_HAS(observed.error, "calibrate with the backend cpu");
}

TEST(CapiDevice, ADeviceIsForTheCudaBackendAlone) {
  auto options = sized<bd_runtime_options>();
  options.recipe_json = kRecipe;
  options.device = 1;
  bd_runtime* runtime = nullptr;
  EXPECT_EQ(bd_runtime_create(&options, &runtime), BD_INVALID_ARGUMENT);
  EXPECT_HAS(bd_last_error(), "device is 1, and the backend cpu has none");
}

TEST(CapiDevice, CallsWithoutHandlesAreSentences) {
  auto gather = sized<bd_gather_params>();
  auto merge = sized<bd_merge_params>();
  auto write = sized<bd_write_params>();
  auto attend = sized<bd_attend_params>();
  auto steps = sized<bd_cuda_steps_options>();
  auto memory = sized<bd_cuda_memory>();
  auto input = sized<bd_step_input>();
  bd_steps* made = nullptr;
  const bd_status all[] = {bd_cuda_memory_get(nullptr, &steps, &memory),
                           bd_cuda_steps_create(nullptr, &steps, &made),
                           bd_cuda_steps_build(nullptr, &input, 1, nullptr),
                           bd_cuda_steps_forget(nullptr, 0, nullptr),
                           bd_cuda_write(&write, nullptr),
                           bd_cuda_attend(&attend, nullptr),
                           bd_cuda_gather(&gather, nullptr),
                           bd_cuda_merge(&merge, nullptr)};
  for (const bd_status status : all) {
    EXPECT_TRUE(status == BD_UNSUPPORTED || status == BD_INVALID_ARGUMENT) << status;
  }
  const std::string said = bd_last_error();
  EXPECT_TRUE(said.find("is null") != std::string::npos ||
              said.find("BITDECODING_BUILD_CUDA") != std::string::npos)
      << said;
}

TEST(CapiDevice, AHostRuntimeHasNoStepsOnAGpu) {
  const Runtime runtime(kRecipe);
  auto options = sized<bd_cuda_steps_options>();
  options.steps.struct_size = sizeof(options.steps);
  bd_steps* steps = nullptr;
  EXPECT_EQ(bd_cuda_steps_create(runtime.handle, &options, &steps), BD_UNSUPPORTED);
  EXPECT_EQ(steps, nullptr);
}

}  // namespace
}  // namespace bitdecoding
