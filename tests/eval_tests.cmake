# SPDX-License-Identifier: Apache-2.0
# The tests of the evaluation programs; they need no vLLM.
if(BITDECODING_BUILD_EVAL)
  foreach(room score report tasks engine)
    bitdecoding_test(eval_${room}_test LABELS unit)
    target_link_libraries(eval_${room}_test PRIVATE bitdecoding_eval)
  endforeach()
  target_link_libraries(eval_engine_test PRIVATE PkgConfig::HTTPLIB)
  foreach(room calibrate probe)
    bitdecoding_test(eval_${room}_test LABELS unit)
    target_link_libraries(eval_${room}_test PRIVATE bitdecoding_calibrate)
  endforeach()
  foreach(room protocol text ruler mrcr short longbench lcb sandbox data)
    bitdecoding_test(eval_bench_${room}_test LABELS unit)
    target_link_libraries(eval_bench_${room}_test PRIVATE bitdecoding_benchmarks)
  endforeach()
  target_link_libraries(eval_bench_longbench_test PRIVATE PkgConfig::HTTPLIB)
  # Skips itself where pyarrow is missing; BITDECODING_PYTHON names a Python that has it.
  add_test(NAME eval_tools
    COMMAND sh -c "exec \"\${BITDECODING_PYTHON:-python3}\" '${CMAKE_CURRENT_SOURCE_DIR}/eval_tools_test.py'")
  set_tests_properties(eval_tools PROPERTIES LABELS unit SKIP_RETURN_CODE 77)
endif()
