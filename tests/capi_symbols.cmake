# SPDX-License-Identifier: Apache-2.0
# Run as `cmake -DNM=... -DLIBRARY=... -P capi_symbols.cmake`: the shared library shows the C ABI and
# the public C++ API, and nothing of what it is built from.
execute_process(COMMAND ${NM} -D --defined-only --demangle ${LIBRARY}
                OUTPUT_VARIABLE text RESULT_VARIABLE code)
if(NOT code EQUAL 0)
  message(FATAL_ERROR "nm cannot read ${LIBRARY}")
endif()
string(REPLACE "\n" ";" lines "${text}")
set(c_functions 0)
set(foreign "")
foreach(line IN LISTS lines)
  if(line STREQUAL "")
    continue()
  elseif(line MATCHES "^[0-9a-f]* T bd_[a-z0-9_]+(@|$)")
    math(EXPR c_functions "${c_functions} + 1")
  elseif(NOT line MATCHES "^[0-9a-f]* [A-Za-z] (typeinfo for |typeinfo name for |vtable for |guard variable for )?bitdecoding::" AND
         NOT line MATCHES " A BITDECODING_0")
    string(APPEND foreign "  ${line}\n")
  endif()
endforeach()
if(foreign)
  message(FATAL_ERROR "foreign symbols are exported:\n${foreign}")
endif()
# Every function of bitdecoding.h is there: a missing one would only show in a caller.
file(STRINGS ${HEADER} declared REGEX "^BD_API ")
list(LENGTH declared declared_count)
if(NOT c_functions EQUAL declared_count)
  message(FATAL_ERROR "${c_functions} bd_ functions are exported, ${declared_count} are declared")
endif()
