// SPDX-License-Identifier: Apache-2.0
// BITDECODING_PER_TARGET(target, function): returns function() of the namespace of `target`, if
// this build has it. Highway's own dynamic dispatch always takes the best target of the machine;
// here a caller may force one by name, so the choice is made once, explicitly.
#pragma once

#if HWY_TARGETS & HWY_AVX3_DL
#define BITDECODING_CASE_AVX3_DL(target, function) \
  if ((target) == HWY_AVX3_DL) return N_AVX3_DL::function()
#else
#define BITDECODING_CASE_AVX3_DL(target, function) (void)0
#endif
#if HWY_TARGETS & HWY_AVX3
#define BITDECODING_CASE_AVX3(target, function) \
  if ((target) == HWY_AVX3) return N_AVX3::function()
#else
#define BITDECODING_CASE_AVX3(target, function) (void)0
#endif
#if HWY_TARGETS & HWY_AVX2
#define BITDECODING_CASE_AVX2(target, function) \
  if ((target) == HWY_AVX2) return N_AVX2::function()
#else
#define BITDECODING_CASE_AVX2(target, function) (void)0
#endif
#if HWY_TARGETS & HWY_NEON
#define BITDECODING_CASE_NEON(target, function) \
  if ((target) == HWY_NEON) return N_NEON::function()
#else
#define BITDECODING_CASE_NEON(target, function) (void)0
#endif
#if HWY_TARGETS & HWY_SSSE3
#define BITDECODING_CASE_SSSE3(target, function) \
  if ((target) == HWY_SSSE3) return N_SSSE3::function()
#else
#define BITDECODING_CASE_SSSE3(target, function) (void)0
#endif

#define BITDECODING_PER_TARGET(target, function) \
  BITDECODING_CASE_AVX3_DL(target, function);    \
  BITDECODING_CASE_AVX3(target, function);       \
  BITDECODING_CASE_AVX2(target, function);       \
  BITDECODING_CASE_NEON(target, function);       \
  BITDECODING_CASE_SSSE3(target, function)
