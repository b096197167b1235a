# Most of the time of a file goes into LibTorch's headers. This pays them once for many.

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
endfunction()
