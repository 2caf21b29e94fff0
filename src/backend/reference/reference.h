// SPDX-License-Identifier: Apache-2.0
// The oracle: plain loops, double accumulation, every format and fragment order, one thread. Never
// optimised; other backends are compared with it.
#pragma once

#include <memory>

#include "bitdecoding/backend.h"

namespace bitdecoding {

// Obeys each layer's geometry.order; `order` is only what fragment_order() answers.
Result<std::unique_ptr<Backend>> make_reference_backend(const BackendOptions& options,
                                                        FragmentOrder order);

}  // namespace bitdecoding
