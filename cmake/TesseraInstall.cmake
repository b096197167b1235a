# What `cmake --install` and `pip install .` put where.
#
# cmake --install:  include/, lib/libtessera.so, lib/cmake/tessera (find_package), bin/tessera,
#                   libexec/tessera/tessera-worker.
# pip install .:    TESSERA_WHEEL=ON, component "wheel": everything inside the package tessera, and the
#                   tessera program among the environment's own programs.

include(CMakePackageConfigHelpers)

# Where a wheel finds LibTorch: in the package torch, beside the package tessera.
if(TESSERA_WHEEL)
  # One file: a wheel holds no links, so each further name would be a copy.
  set_property(TARGET tessera PROPERTY VERSION)
  set_property(TARGET tessera PROPERTY SOVERSION)
  set_target_properties(tessera PROPERTIES INSTALL_RPATH "$ORIGIN:$ORIGIN/../../torch/lib")
  install(TARGETS tessera LIBRARY DESTINATION tessera/lib COMPONENT wheel)
  # METIS is no part of a bare system, and has no archive to link: it comes along, under the name that
  # libtessera.so asks for.
  if(TESSERA_METIS_LIBRARY)
    file(GLOB metis_file ${TESSERA_METIS_LIBRARY}.?)  # libmetis.so.5, a link
    get_filename_component(metis_name ${metis_file} NAME)
    file(REAL_PATH ${metis_file} metis_file)
    install(FILES ${metis_file} DESTINATION tessera/lib RENAME ${metis_name} COMPONENT wheel)
  endif()
  if(TARGET tessera_python)
    set_target_properties(tessera_python PROPERTIES
      INSTALL_RPATH "$ORIGIN/lib:$ORIGIN/../torch/lib")
    install(TARGETS tessera_python LIBRARY DESTINATION tessera COMPONENT wheel)
    install(FILES $<TARGET_FILE_DIR:tessera_python>/_built_for.py DESTINATION tessera COMPONENT wheel)
  endif()
  if(TARGET tessera_worker)
    set_target_properties(tessera_worker PROPERTIES
      INSTALL_RPATH "$ORIGIN/../lib:$ORIGIN/../../torch/lib")
    install(TARGETS tessera_worker RUNTIME DESTINATION tessera/bin COMPONENT wheel)
    install(TARGETS tessera_cli RUNTIME DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT wheel)
  endif()
  return()
endif()

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
