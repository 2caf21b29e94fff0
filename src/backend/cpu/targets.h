// Which Highway targets the kernels are compiled for. Include before any Highway header.
// x86: SSSE3 (the baseline: the kernels' files are compiled with -mssse3), AVX2, AVX3 (AVX-512).
// Arm: NEON. Others are left out: each costs compile time and gains little over its neighbour.
#pragma once

#define HWY_DISABLED_TARGETS (HWY_SSE4 | HWY_SSE2)
#include <hwy/detect_targets.h>
#ifndef HWY_SSE2  // Highway before 1.0.4 has no such target
#define HWY_SSE2 0
#endif
