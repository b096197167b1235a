# What a Python wheel holds, as the component "wheel": `make wheel` packs that of build/release, and
# `pip install .` that of its own build. Everything lies inside the package tessera, but the tessera program,
# which lies among the environment's own programs. Plain `cmake --install` leaves it out.

if(NOT TARGET tessera_python OR NOT TARGET tessera_worker)
  if(SKBUILD)
    message(FATAL_ERROR "A package needs the bindings and the programs; what they lack is named above.")
  endif()
  return()
endif()
# scikit-build-core names a folder; cmake/make_wheel.py expects this one.
set(wheel_programs bin)
if(SKBUILD)
  set(wheel_programs ${SKBUILD_SCRIPTS_DIR})
endif()

# Installs a target's file as `name`, with a run path for the wheel. The build's own run path ends with that
# one, so that there is always room to write it; a file is copied as it is, links are not.
function(tessera_into_wheel target folder name)
  list(JOIN ARGN ":" run_path)
  set_property(TARGET ${target} APPEND PROPERTY BUILD_RPATH ${ARGN})
  install(PROGRAMS $<TARGET_FILE:${target}> DESTINATION ${folder} RENAME ${name}
    COMPONENT wheel EXCLUDE_FROM_ALL)
  cmake_path(ABSOLUTE_PATH folder BASE_DIRECTORY "\${CMAKE_INSTALL_PREFIX}" OUTPUT_VARIABLE place)
  install(CODE "file(RPATH_SET FILE \"\$ENV{DESTDIR}${place}/${name}\" NEW_RPATH [[${run_path}]])"
    COMPONENT wheel EXCLUDE_FROM_ALL)
endfunction()

# LibTorch is in the package torch, Arrow in the package pyarrow, both beside the package tessera.
tessera_into_wheel(tessera tessera/lib $<TARGET_SONAME_FILE_NAME:tessera> $ORIGIN $ORIGIN/../../torch/lib)
tessera_into_wheel(tessera_python tessera $<TARGET_FILE_NAME:tessera_python> $ORIGIN/lib $ORIGIN/../torch/lib)
tessera_into_wheel(tessera_worker tessera/bin tessera-worker $ORIGIN/../lib $ORIGIN/../../torch/lib)
tessera_into_wheel(tessera_data_shared tessera/lib libtessera_data.so $ORIGIN)
if(TARGET tessera_parquet)
  tessera_into_wheel(tessera_parquet tessera/lib $<TARGET_FILE_NAME:tessera_parquet> $ORIGIN/../../pyarrow)
endif()
# From an environment's programs to its packages, as pip lays them out, and for `pip install --target`.
execute_process(
  COMMAND ${TESSERA_PYTHON} -c "import sys; print('python%d.%d' % sys.version_info[:2])"
  OUTPUT_VARIABLE python_folder OUTPUT_STRIP_TRAILING_WHITESPACE)
tessera_into_wheel(tessera_cli ${wheel_programs} tessera
  $ORIGIN/../lib/${python_folder}/site-packages/tessera/lib
  $ORIGIN/../lib/${python_folder}/dist-packages/tessera/lib
  $ORIGIN/../tessera/lib)

# Not on every system, and without archives that a shared library could take in: they come along, under the
# names that ours ask for.
foreach(library ${TESSERA_METIS_LIBRARY} ${TESSERA_ZSTD_LIBRARY})
  file(GLOB file ${library}.?)  # libmetis.so.5, a link
  if(file)
    get_filename_component(name ${file} NAME)
    file(REAL_PATH ${file} file)
    install(FILES ${file} DESTINATION tessera/lib RENAME ${name} COMPONENT wheel EXCLUDE_FROM_ALL)
  endif()
endforeach()

install(DIRECTORY ${CMAKE_SOURCE_DIR}/python/tessera DESTINATION . COMPONENT wheel EXCLUDE_FROM_ALL
  FILES_MATCHING PATTERN "*.py" PATTERN "*.pyi" PATTERN "py.typed"
  PATTERN "__pycache__" EXCLUDE PATTERN "_built_for.py" EXCLUDE)
install(FILES $<TARGET_FILE_DIR:tessera_python>/_built_for.py DESTINATION tessera
  COMPONENT wheel EXCLUDE_FROM_ALL)
