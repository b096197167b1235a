# The modules of libtessera: each is a target of its own, and names the modules below it.

# tessera_without_libtorch(<target>): the headers of ours and of JSON, for a library that has no LibTorch.
function(tessera_without_libtorch target)
  target_include_directories(${target} PUBLIC ${CMAKE_SOURCE_DIR}/include PRIVATE ${CMAKE_SOURCE_DIR}/src)
  target_include_directories(${target} SYSTEM PRIVATE ${TESSERA_JSON_INCLUDE})
endfunction()

# tessera_module(<name> [USES <module>...] [LINKS <library>...] [SYSTEM <folder>...] SOURCES <file>...):
# tessera_module_<name>, the objects of the module's files that stand on LibTorch.
#   USES    the modules it may call; tests/structure/test_arrows.py has the same arrows
#   LINKS   libraries it stands on that are no modules, and its own parts without LibTorch
#   SYSTEM  folders with headers of others
function(tessera_module name)
  cmake_parse_arguments(arg "" "" "USES;LINKS;SYSTEM;SOURCES" ${ARGN})
  set(target tessera_module_${name})
  add_library(${target} OBJECT ${arg_SOURCES})
  target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src)
  target_include_directories(${target} SYSTEM PRIVATE ${arg_SYSTEM})
  target_link_libraries(${target} PRIVATE tessera::torch tessera_openmp Threads::Threads ${arg_LINKS})
  target_precompile_headers(${target} REUSE_FROM tessera_precompiled)
  tessera_unite(${target})

  set(below ${arg_USES})
  set(links ${arg_LINKS})
  foreach(other IN LISTS arg_USES)
    get_target_property(others_below tessera_module_${other} TESSERA_BELOW)
    get_target_property(others_links tessera_module_${other} TESSERA_LINKS)
    list(APPEND below ${others_below})
    list(APPEND links ${others_links})
  endforeach()
  list(REMOVE_DUPLICATES below)
  list(REMOVE_DUPLICATES links)
  set_target_properties(${target} PROPERTIES TESSERA_BELOW "${below}" TESSERA_LINKS "${links}")
  set_property(GLOBAL APPEND PROPERTY TESSERA_MODULES ${name})

  # The module with what lies below it and nothing else: a call that points up or sideways does not
  # link. Nobody loads the result.
  if(TESSERA_BUILD_TESTS AND NOT TESSERA_SANITIZE)
    set(objects $<TARGET_OBJECTS:${target}>)
    foreach(other IN LISTS below)
      list(APPEND objects $<TARGET_OBJECTS:tessera_module_${other}>)
    endforeach()
    add_library(tessera_arrows_${name} MODULE ${objects})
    target_link_libraries(tessera_arrows_${name} PRIVATE tessera::torch tessera_openmp Threads::Threads ${links})
    target_link_options(tessera_arrows_${name} PRIVATE LINKER:-z,defs)
    set_target_properties(tessera_arrows_${name} PROPERTIES
      LINKER_LANGUAGE CXX LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/arrows)
  endif()
endfunction()
