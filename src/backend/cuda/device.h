#pragma once

#include <string>

namespace bitdecoding::cuda {

// The folder whose decode kernels run on a compute capability; empty when none do.
std::string kernels_of(int major, int minor);

}  // namespace bitdecoding::cuda
