// SPDX-License-Identifier: Apache-2.0
// `eval` before anything is started: names, what is missing, what may be.
#include "cli_world.h"

namespace bitdecoding {
namespace {

TEST_F(Cli, EvalStageTellsWhatMayBeMissing) {
  fs::create_directories(folder_ / "data/longbench_pro");
  write("data/longbench_pro/rows.jsonl", "{}\n");
  const std::string stage =
      "eval stage " + path("model") + " --data " + path("data") + " --benchmark ";
  // Without an embedding model some scores are missing, and the rest is not.
  const Outcome optional = program(stage + "longbench_pro");
  EXPECT_EQ(optional.code, 0) << optional.out;
  EXPECT_HAS(optional.out, "an embedding model");
  EXPECT_HAS(optional.out, "Nothing else is missing.");
  const Outcome needed = program(stage + "longbench_pro,mrcr");
  EXPECT_EQ(needed.code, 4);
  EXPECT_HAS(needed.out, "mrcr/_filtered_le98048.jsonl");
  EXPECT_HAS(needed.out, "Licence: MIT");
}

TEST_F(Cli, EvalNamesWhatItDoesNotKnow) {
  const std::string data = " --data " + path("data");
  const Outcome benchmark = program("eval stage " + path("model") + data + " --benchmark mrrc");
  EXPECT_NE(benchmark.code, 0);
  EXPECT_HAS(benchmark.out, "did you mean 'mrcr'?");
  const Outcome mode = program("eval stage " + path("model") + data + " --mode nvfp5");
  EXPECT_NE(mode.code, 0);
  EXPECT_HAS(mode.out, "unknown mode 'nvfp5'");
  const Outcome model = program("eval stage " + path("none") + data);
  EXPECT_EQ(model.code, 4);
  EXPECT_HAS(model.out, "a folder with config.json");
  for (const char* command : {"calibrate ", "ablate "}) {
    const Outcome run = program(command + path("none"));
    EXPECT_EQ(run.code, 4) << run.out;
    EXPECT_HAS(run.out, "is no model");
  }
}

}  // namespace
}  // namespace bitdecoding
