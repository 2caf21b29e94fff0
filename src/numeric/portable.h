// SPDX-License-Identifier: Apache-2.0
// Marks for code that runs on the host and on devices.
#pragma once

// Reciprocals instead of divisions, fused and reordered sums change codes and scales, and NaN is no
// longer told from numbers: pages would differ from those of every other build.
#if defined(__FAST_MATH__) || defined(__USE_FAST_MATH__)
#error "bitdecoding does not compile with -ffast-math: its pages are defined by IEEE arithmetic"
#endif

#if defined(__CUDACC__)
#define BD_HOST_DEVICE __host__ __device__
#else
#define BD_HOST_DEVICE
#endif
