# What keeps the build short. Most of the time of a file goes into LibTorch's headers: even the
# precompiled ones leave seconds of templates to every file. Files of one folder are compiled a few at a
# time, so that they share them.

option(TESSERA_UNITY "Compile the files of a folder a few at a time" OFF)

# tessera_unite(<target>): cuts the target's sources, folder by folder, into groups of at most five of
# about the same size. Call it after the last target_sources. What has flags of its own stays alone.
function(tessera_unite target)
  if(NOT TESSERA_UNITY)
    return()
  endif()
  set(most 5)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cpp$")
  set(folders)
  foreach(source IN LISTS sources)
    get_filename_component(folder "${source}" DIRECTORY)
    string(MAKE_C_IDENTIFIER "${target}_${folder}" folder)
    list(APPEND folders ${folder})
    list(APPEND sources_${folder} "${source}")
  endforeach()
  list(REMOVE_DUPLICATES folders)
  foreach(folder IN LISTS folders)
    list(LENGTH sources_${folder} num_sources)
    if(num_sources EQUAL 1)
      continue()
    endif()
    math(EXPR num_groups "(${num_sources} + ${most} - 1) / ${most}")
    set(position 0)
    foreach(source IN LISTS sources_${folder})
      math(EXPR group "${position} * ${num_groups} / ${num_sources}")
      set_source_files_properties("${source}" PROPERTIES UNITY_GROUP ${folder}_${group})
      math(EXPR position "${position} + 1")
    endforeach()
  endforeach()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # It takes a file of a group for a header, where types of an unnamed namespace would be a mistake.
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()

# tessera_on_torch(<target>): links the library and takes its precompiled header, which GCC gives only to
# files that are compiled alike: position-independent, also in programs, and with OpenMP.
function(tessera_on_torch target)
  target_link_libraries(${target} PRIVATE tessera_openmp PUBLIC tessera)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  target_precompile_headers(${target} REUSE_FROM tessera_precompiled)
  tessera_unite(${target})
endfunction()

# LibTorch brings the shared C++ library into every process. A compiler that has only the static one at
# hand links a second copy into ours without a word, and the process crashes in its first stream: the
# two know each other's types but not each other's tables. So the shared one is named if need be.
function(tessera_share_standard_library)
  set(probe ${CMAKE_BINARY_DIR}/CMakeFiles/tessera_standard_library)
  file(WRITE ${probe}.cpp "#include <iostream>\nvoid print(unsigned long n) { std::cout << n; }\n")
  execute_process(
    COMMAND ${CMAKE_CXX_COMPILER} -shared -fPIC ${probe}.cpp -o ${probe}.so
    RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
  execute_process(COMMAND ${CMAKE_READELF} -d ${probe}.so OUTPUT_VARIABLE needs ERROR_QUIET)
  if(failed OR NOT needs OR needs MATCHES "lib(std)?c\\+\\+\\.so")
    return()
  endif()
  execute_process(
    COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so.6
    OUTPUT_VARIABLE shared OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT IS_ABSOLUTE "${shared}")
    find_library(TESSERA_STANDARD_LIBRARY libstdc++.so.6 PATHS /lib/${CMAKE_LIBRARY_ARCHITECTURE} /usr/lib64)
    set(shared ${TESSERA_STANDARD_LIBRARY})
  endif()
  if(NOT EXISTS "${shared}")
    message(FATAL_ERROR "${CMAKE_CXX_COMPILER} links the C++ library statically, and libstdc++.so.6 was "
                        "not found. LibTorch needs the shared one: install libstdc++6.")
  endif()
  message(STATUS "The compiler links the C++ library statically; ${shared} is linked instead")
  add_link_options(-nostdlib++)
  # -nostdlib++ drops the mathematics too. At the end of the line, behind what needs them.
  set(CMAKE_CXX_STANDARD_LIBRARIES "${CMAKE_CXX_STANDARD_LIBRARIES} ${shared} -lm" PARENT_SCOPE)
endfunction()
