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
endif()
