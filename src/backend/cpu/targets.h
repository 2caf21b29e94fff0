// SPDX-License-Identifier: Apache-2.0
// Which Highway targets the kernels are compiled for. Include before any Highway header.
// x86: SSSE3 (the baseline: the kernels' files are compiled with -mssse3), AVX2, AVX3 (AVX-512);
// decode also AVX3_DL (with dot products of bytes: Ice Lake, Zen 4). Arm: NEON. Others are left
// out: each costs compile time and gains little over its neighbour. A build may leave out more
// (BITDECODING_CPU_LEAVE_OUT in cmake/options.cmake): sanitized kernels take a minute and more a
// target to compile.
#pragma once

#ifndef BITDECODING_CPU_LEAVE_OUT
#define BITDECODING_CPU_LEAVE_OUT 0
#endif
#ifdef BITDECODING_CPU_WITH_DOTS  // a file whose kernels use what AVX3_DL has and AVX3 has not
#ifndef HWY_WANT_AVX3_DL
#define HWY_WANT_AVX3_DL 1
#endif
#define BITDECODING_CPU_DOTS 0
#else
#define BITDECODING_CPU_DOTS HWY_AVX3_DL
#endif
// SVE's vectors have no size that a compiler knows, so the kernels' arrays of vectors cannot be.
#define HWY_DISABLED_TARGETS                                                               \
  (HWY_SSE4 | HWY_SSE2 | HWY_AVX3_ZEN4 | HWY_AVX3_SPR | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | \
   HWY_SVE2_128 | BITDECODING_CPU_DOTS | BITDECODING_CPU_LEAVE_OUT)
#include <hwy/detect_targets.h>
// Highway before 1.0.4 has no such targets.
#ifndef HWY_SSE2
#define HWY_SSE2 0
#endif
#ifndef HWY_AVX3_ZEN4
#define HWY_AVX3_ZEN4 0
#endif
#ifndef HWY_AVX3_SPR
#define HWY_AVX3_SPR 0
#endif
