# Recipes, files, calibration, the C ABI, the program.
bitdecoding_test(recipe_parse_test LABELS unit)
bitdecoding_test(io_file_test LABELS unit)
bitdecoding_test(io_calibrate_test LABELS unit)
bitdecoding_test(safetensors_reader_test LABELS unit)
bitdecoding_test(capi_errors_test LABELS unit)

# A real C program over the shared library.
add_executable(capi_c_test capi_c_test.c)
target_link_libraries(capi_c_test PRIVATE bitdecoding bitdecoding_flags m)
add_test(NAME capi_c_test.reference COMMAND capi_c_test reference)
add_test(NAME capi_symbols COMMAND ${CMAKE_COMMAND} -DNM=${CMAKE_NM} -DLIBRARY=$<TARGET_FILE:bitdecoding>
  -DHEADER=${CMAKE_SOURCE_DIR}/include/bitdecoding/bitdecoding.h
  -P ${CMAKE_CURRENT_SOURCE_DIR}/capi_symbols.cmake)
set_tests_properties(capi_c_test.reference capi_symbols PROPERTIES LABELS unit)
