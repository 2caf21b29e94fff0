# SPDX-License-Identifier: Apache-2.0
# Recipes, files, calibration, the C ABI, the program.
bitdecoding_test(recipe_parse_test LABELS core)
bitdecoding_test(io_file_test LABELS core)
bitdecoding_test(io_calibrate_test LABELS core)
bitdecoding_test(calibrate_state_test LABELS core)
bitdecoding_test(io_key_shift_join_test LABELS core)
bitdecoding_test(io_outer_scale_test LABELS core)
bitdecoding_test(safetensors_reader_test LABELS core)
bitdecoding_test(capi_errors_test LABELS core)
bitdecoding_test(capi_verbs_test LABELS core)
bitdecoding_test(capi_pages_test LABELS core)
bitdecoding_test(capi_calibration_test LABELS core)
bitdecoding_test(capi_outer_scale_test LABELS core)
bitdecoding_test(capi_probe_test LABELS core)
bitdecoding_test(capi_device_test LABELS core)

# A real C program over the shared library.
add_executable(capi_c_test capi_c_test.c)
target_link_libraries(capi_c_test PRIVATE bitdecoding bitdecoding_flags m)
# A C program has no run time of clang's sanitizers for the C++ inside the library.
if(BITDECODING_SANITIZE)
  set_target_properties(capi_c_test PROPERTIES LINKER_LANGUAGE CXX)
endif()
add_test(NAME capi_c_test.reference COMMAND capi_c_test reference)
add_test(NAME capi_c_test.cpu COMMAND capi_c_test cpu)
add_test(NAME capi_symbols COMMAND ${CMAKE_COMMAND} -DNM=${CMAKE_NM} -DLIBRARY=$<TARGET_FILE:bitdecoding>
  -DHEADER=${CMAKE_SOURCE_DIR}/include/bitdecoding/bitdecoding.h
  -P ${CMAKE_CURRENT_SOURCE_DIR}/capi_symbols.cmake)
add_dependencies(bitdecoding_core_tests capi_c_test)
set_tests_properties(capi_c_test.reference capi_c_test.cpu PROPERTIES LABELS core)
set_tests_properties(capi_symbols PROPERTIES LABELS unit)

# A consumer of the installed tree. With a sanitizer the library only loads into programs that have
# it too.
if(NOT BITDECODING_SANITIZE)
  add_test(NAME consumer COMMAND ${CMAKE_COMMAND} -DBUILD_DIR=${CMAKE_BINARY_DIR}
    -DSOURCE_DIR=${CMAKE_CURRENT_SOURCE_DIR}/consumer -DWORK_DIR=${CMAKE_BINARY_DIR}/consumer
    -DLIBDIR=${CMAKE_INSTALL_LIBDIR} -DCXX=${CMAKE_CXX_COMPILER}
    -P ${CMAKE_CURRENT_SOURCE_DIR}/consumer/run.cmake)
  set_tests_properties(consumer PROPERTIES LABELS package)
endif()

if(BITDECODING_BUILD_CLI)
  foreach(room program serve bench gpu eval)
    bitdecoding_test(cli_${room}_test LABELS unit)
    target_compile_definitions(cli_${room}_test PRIVATE
      BITDECODING_PROGRAM="$<TARGET_FILE:bitdecoding_program>")
    add_dependencies(cli_${room}_test bitdecoding_program)
  endforeach()
  # Found instead of the driver's by the program when a test asks for that.
  add_library(bitdecoding_fake_libcuda SHARED fake_libcuda.c)
  set_target_properties(bitdecoding_fake_libcuda PROPERTIES OUTPUT_NAME cuda SOVERSION 1 C_VISIBILITY_PRESET default
                        LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/fake_cuda)
  add_dependencies(cli_gpu_test bitdecoding_fake_libcuda)
  target_compile_definitions(cli_gpu_test PRIVATE BITDECODING_FAKE_CUDA_DIR="${CMAKE_BINARY_DIR}/fake_cuda")
  if(BITDECODING_BUILD_CUDA)
    target_link_libraries(cli_gpu_test PRIVATE bitdecoding_cuda_static)
    target_compile_definitions(cli_gpu_test PRIVATE BITDECODING_WITH_CUDA)
  endif()
endif()
