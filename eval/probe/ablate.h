// SPDX-License-Identifier: Apache-2.0
// The ablation table: every element of the recipe off on its own, and what is beyond it.
#pragma once

#include <string>
#include <vector>

#include "probe/engine.h"
#include "report/table.h"

namespace bitdecoding::eval {

struct AblationRow {
  std::string name;
  std::string recipe;  // JSON
  std::string group;   // "neighbours", "off", "beyond", "fp4"
  ProbeResult result;
  double bits = 0;       // an element of the pages
  double bits_bf16 = 0;  // and with the BF16 tokens of one sequence of this length
  double write_ns = 0;   // a token and KV head
};

// The recipes of the table; `key_shift_file` is the calibration. With `fp4` also those of FP4
// arithmetic, which is an emulation on CPUs and slow.
std::vector<AblationRow> ablation_rows(const std::string& key_shift_file, bool fp4);

Result<std::vector<AblationRow>> run_ablation(ProbeEngine* engine, std::vector<AblationRow> rows,
                                              Progress* progress);
Table ablation_table(const std::vector<AblationRow>& rows);
Json ablation_json(const std::vector<AblationRow>& rows, const ProbeEngine& engine);

}  // namespace bitdecoding::eval
