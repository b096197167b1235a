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
