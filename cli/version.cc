// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "bitdecoding/backend.h"
#include "bitdecoding/bitdecoding.h"
#include "bitdecoding/format.h"
#include "commands.h"
#include "output.h"

namespace bitdecoding::cli {

void add_version(CLI::App& app, int* /*exit_code*/) {
  CLI::App* command = app.add_subcommand("version", "Print the versions of program, ABI and pages");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print one JSON object");
  command->callback([json] {
    if (*json) {
      const nlohmann::ordered_json object = {{"version", bd_version()},
                                             {"abi", bd_abi_version()},
                                             {"page_format", FormatTag::kVersion},
                                             {"backends", backend_names()},
                                             {"isas", supported_isas()}};
      print(object.dump() + "\n");
      return;
    }
    print(fmt::format("bitdecoding {} (C ABI {}, page format {})\n", bd_version(), bd_abi_version(),
                      FormatTag::kVersion));
  });
}

}  // namespace bitdecoding::cli
