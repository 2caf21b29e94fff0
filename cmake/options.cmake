# SPDX-License-Identifier: Apache-2.0
# Options and the flags that every target of the project shares.
option(BITDECODING_BUILD_CLI "Build the bitdecoding program" ON)
option(BITDECODING_BUILD_EVAL "Build the evaluation and demo programs" ON)
option(BITDECODING_BUILD_TESTS "Build the tests" ON)
option(BITDECODING_BUILD_BENCH "Build the benchmarks" ON)
option(BITDECODING_BUILD_FUZZ "Build the fuzz targets (needs clang)" OFF)
option(BITDECODING_BUILD_CUDA "Build the CUDA backend (needs the CUDA toolkit, 13.0 or later)" OFF)
set(BITDECODING_CUDA_ARCHITECTURES "80;90a" CACHE STRING
    "GPU architectures of the CUDA backend; 80 to 90a have decode kernels, 100a and 120a all others")
option(BITDECODING_CUDA_FAIL_ON_SPILLS "Fail when a decode kernel spills (needs Python)" ON)
option(BITDECODING_WERROR "Treat warnings as errors" ON)
set(BITDECODING_SANITIZE "" CACHE STRING "Sanitizers for all targets, e.g. address,undefined or thread")
set(BITDECODING_CPU_LEAVE_OUT "" CACHE STRING
    "Instruction sets that the cpu backend is not compiled for, e.g. HWY_AVX3|HWY_AVX2")

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 11)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

# An interface target instead of global flags, so that a consumer's flags stay its own.
add_library(bitdecoding_flags INTERFACE)
# nvcc has its own.
set(host_languages "$<COMPILE_LANGUAGE:C,CXX>")
target_compile_options(bitdecoding_flags INTERFACE "$<${host_languages}:-Wall;-Wextra;-Wshadow;-Wno-psabi>")
if(BITDECODING_WERROR)
  target_compile_options(bitdecoding_flags INTERFACE $<${host_languages}:-Werror>)
endif()
# Codes and scales are bit-equal on every backend only if a * b + c keeps its two roundings.
target_compile_options(bitdecoding_flags INTERFACE $<${host_languages}:-ffp-contract=off>)
if(BITDECODING_SANITIZE)
  target_compile_options(bitdecoding_flags INTERFACE -fsanitize=${BITDECODING_SANITIZE}
                                                     -fno-omit-frame-pointer
                                                     -fno-sanitize-recover=all)
  target_link_options(bitdecoding_flags INTERFACE -fsanitize=${BITDECODING_SANITIZE})
endif()
