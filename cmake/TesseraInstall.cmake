# What `cmake --install` puts where: include/, lib/libtessera.so, lib/cmake/tessera (find_package),
# bin/tessera, libexec/tessera/tessera-worker. A wheel is a component of its own: cmake/TesseraWheel.cmake.

include(CMakePackageConfigHelpers)

# LibTorch stays where it was found at build time. By name: CMake leaves out link paths that lie in the
# source tree, as an environment there does.
set_target_properties(tessera PROPERTIES
  INSTALL_RPATH "$ORIGIN;${TESSERA_TORCH_DIR}/lib" INSTALL_RPATH_USE_LINK_PATH ON)
if(TARGET tessera_trainer_shared)
  set_target_properties(tessera_trainer_shared PROPERTIES
    INSTALL_RPATH "$ORIGIN;${TESSERA_TORCH_DIR}/lib" INSTALL_RPATH_USE_LINK_PATH ON)
endif()
install(TARGETS tessera EXPORT tesseraTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET tessera_serving_shared)
  install(TARGETS tessera_serving_shared EXPORT tesseraTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/include/tessera
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
if(TARGET tessera_worker)
  set_target_properties(tessera_worker PROPERTIES
    INSTALL_RPATH "$ORIGIN/../../${CMAKE_INSTALL_LIBDIR};${TESSERA_TORCH_DIR}/lib"
    INSTALL_RPATH_USE_LINK_PATH ON)
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
install(EXPORT tesseraTargets NAMESPACE tessera:: DESTINATION ${package_dir})
configure_package_config_file(
  ${CMAKE_CURRENT_SOURCE_DIR}/cmake/tesseraConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/tesseraConfig.cmake
  INSTALL_DESTINATION ${package_dir}
  NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(
  ${CMAKE_CURRENT_BINARY_DIR}/tesseraConfigVersion.cmake
  VERSION ${PROJECT_VERSION} COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/tesseraConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/tesseraConfigVersion.cmake
  ${CMAKE_CURRENT_SOURCE_DIR}/cmake/TesseraTorch.cmake
  DESTINATION ${package_dir})
