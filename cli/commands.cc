// SPDX-License-Identifier: Apache-2.0
#include "commands.h"

#include "bench.h"

namespace bitdecoding::cli {

const std::vector<AddCommand>& commands() {
  static const std::vector<AddCommand> list = {
      add_doctor,  //
      add_serve,   //
#ifdef BITDECODING_WITH_EVAL
      add_calibrate,  add_ablate, add_eval,
#endif
      add_bench,    //
      add_inspect,  //
      add_recipe,   //
      add_version,  //
      add_completion,
  };
  return list;
}

}  // namespace bitdecoding::cli
