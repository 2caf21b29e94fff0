# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` puts down: headers, the shared library, the program, and the files by which
# find_package(bitdecoding) and pkg-config find them.
include(CMakePackageConfigHelpers)

set(BITDECODING_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/bitdecoding)

# A header without its library would only puzzle.
set(BITDECODING_LEFT_OUT "")
if(NOT BITDECODING_BUILD_CUDA)
  set(BITDECODING_LEFT_OUT PATTERN "cuda.h" EXCLUDE)
endif()
install(DIRECTORY include/bitdecoding DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h" ${BITDECODING_LEFT_OUT})
if(BITDECODING_BUILD_CUDA)
  install(TARGETS bitdecoding_cuda EXPORT bitdecoding_targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(TARGETS bitdecoding EXPORT bitdecoding_targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT bitdecoding_targets NAMESPACE bitdecoding:: DESTINATION ${BITDECODING_CMAKE_DIR})
if(BITDECODING_BUILD_CLI)
  install(TARGETS bitdecoding_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

configure_package_config_file(cmake/bitdecoding-config.cmake.in
  ${CMAKE_BINARY_DIR}/bitdecoding-config.cmake INSTALL_DESTINATION ${BITDECODING_CMAKE_DIR})
# Before 1.0 a minor version may change the ABI.
write_basic_package_version_file(${CMAKE_BINARY_DIR}/bitdecoding-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/bitdecoding-config.cmake
  ${CMAKE_BINARY_DIR}/bitdecoding-config-version.cmake DESTINATION ${BITDECODING_CMAKE_DIR})

# The way from the .pc file's folder back to the prefix; the library folder may have two parts.
file(RELATIVE_PATH BITDECODING_PC_PREFIX /p/${CMAKE_INSTALL_LIBDIR}/pkgconfig /p)
string(REGEX REPLACE "/$" "" BITDECODING_PC_PREFIX "${BITDECODING_PC_PREFIX}")
configure_file(cmake/bitdecoding.pc.in ${CMAKE_BINARY_DIR}/bitdecoding.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/bitdecoding.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
