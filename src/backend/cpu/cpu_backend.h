// SPDX-License-Identifier: Apache-2.0
// The SIMD backend: AVX-512, AVX2, SSSE3 or NEON, chosen when it is made.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bitdecoding/backend.h"

namespace bitdecoding {

Result<std::unique_ptr<Backend>> make_cpu_backend(const BackendOptions& options);
// Names of the instruction sets that this build has and this machine runs, best first.
std::vector<std::string> cpu_supported_isas();

}  // namespace bitdecoding
