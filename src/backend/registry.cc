// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "backend/cpu/cpu_backend.h"
#include "backend/reference/reference.h"
#include "bitdecoding/backend.h"

namespace bitdecoding {

const std::vector<std::string>& backend_names() {
  static const std::vector<std::string> names = {"cpu", "reference"};
  return names;
}

std::vector<std::string> supported_isas() { return cpu_supported_isas(); }

Result<std::unique_ptr<Backend>> make_backend(std::string_view name,
                                              const BackendOptions& options) {
  if (name == "reference") return make_reference_backend(options, FragmentOrder::kQuad);
  if (name == "cpu") return make_cpu_backend(options);
  return Status(StatusCode::kInvalidArgument,
                fmt::format("unknown backend '{}'; expected one of {}", name,
                            fmt::join(backend_names(), ", ")));
}

}  // namespace bitdecoding
