# Header-only and test dependencies. They come from the distribution; TESSERA_DEPS_PREFIX names a
# folder with unpacked packages for machines without them. What is missing is left out, with a word.

set(TESSERA_DEPS_PREFIX "" CACHE PATH "Folder holding unpacked Debian packages (its usr/include is searched)")
if(TESSERA_DEPS_PREFIX)
  list(PREPEND CMAKE_PREFIX_PATH ${TESSERA_DEPS_PREFIX}/usr)
  include_directories(SYSTEM ${TESSERA_DEPS_PREFIX}/usr/include)
endif()

# at::parallel_for runs on one thread, without a word, in a file that is compiled without OpenMP.
# The library is the one that LibTorch itself loads: a second one would be a second pool of threads.
# GCC's code is for that library; Clang's is not.
file(GLOB TESSERA_OPENMP ${TESSERA_TORCH_DIR}/lib/libgomp*.so* ${TESSERA_TORCH_DIR}/../torch.libs/libgomp*.so*)
if(NOT TESSERA_OPENMP)
  set(TESSERA_OPENMP gomp)
endif()
add_library(tessera_openmp INTERFACE)
target_link_libraries(tessera_openmp INTERFACE ${TESSERA_OPENMP})
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(tessera_openmp INTERFACE -fopenmp)
endif()

find_path(TESSERA_JSON_INCLUDE nlohmann/json.hpp)
if(NOT TESSERA_JSON_INCLUDE)
  message(WARNING "nlohmann-json is missing (nlohmann-json3-dev): checkpoints are left out.")
endif()
if(TESSERA_BUILD_CLI)
  find_path(TESSERA_CLI11_INCLUDE CLI/CLI.hpp)
  find_path(TESSERA_TOML_INCLUDE toml++/toml.h)
  if(NOT TESSERA_CLI11_INCLUDE OR NOT TESSERA_JSON_INCLUDE OR NOT TESSERA_TOML_INCLUDE)
    message(WARNING "CLI11, nlohmann-json or toml++ is missing (libcli11-dev, nlohmann-json3-dev, "
                    "libtomlplusplus-dev): the tessera program is not built.")
    set(TESSERA_BUILD_CLI OFF)
  endif()
endif()
if(TESSERA_BUILD_TESTS)
  find_package(GTest)
  if(NOT GTest_FOUND)
    message(WARNING "GoogleTest is missing (libgtest-dev): the tests are not built.")
    set(TESSERA_BUILD_TESTS OFF)
  endif()
endif()
