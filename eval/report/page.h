// SPDX-License-Identifier: Apache-2.0
// The report as one HTML file that needs nothing else.
#pragma once

#include <string>

#include "bitdecoding/status.h"
#include "report/summary.h"

namespace bitdecoding::eval {

std::string report_page(const Summary& summary);
// Written beside the target and renamed, so a reader never sees half a page.
Status write_report(const std::string& path, const Summary& summary);

}  // namespace bitdecoding::eval
