// SPDX-License-Identifier: Apache-2.0
// A TCP port of the loopback address that nothing uses now.
#pragma once

#include "bitdecoding/status.h"

namespace bitdecoding::eval {

Result<int> free_loopback_port();

}  // namespace bitdecoding::eval
