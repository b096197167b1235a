# Finds LibTorch inside an installed torch wheel and offers it as the target tessera::torch.
#
# Looks at TESSERA_TORCH_DIR first, then asks TESSERA_PYTHON (default: python3) where torch lives.
# The wheel's own TorchConfig.cmake is not used: with a CUDA build of torch it insists on a matching
# CUDA toolkit and its compilers even for code that never touches them.

if(TARGET tessera::torch)
  return()
endif()

if(NOT TESSERA_PYTHON)
  if(SKBUILD)
    set(TESSERA_PYTHON ${Python_EXECUTABLE})  # the interpreter that pip builds for
  else()
    # Not TESSERA_PYTHON itself, which CMake would remember as if somebody had asked for it.
    find_program(TESSERA_DEFAULT_PYTHON NAMES python3 python)
    set(TESSERA_PYTHON ${TESSERA_DEFAULT_PYTHON})
  endif()
endif()
# tessera_find_python_package(<variable> <name>): the folder of an installed package; empty if there is none.
# Found through the file system: importing torch takes a second and is not needed. pip hides what is
# installed from an isolated build by variables of Python's, which -E does not look at: the environment that
# is installed into is the one to build for.
function(tessera_find_python_package variable name)
  foreach(flag -B -E)
    execute_process(
      COMMAND ${TESSERA_PYTHON} ${flag} -c
              "import importlib.util, os; print(os.path.dirname(os.path.realpath(importlib.util.find_spec('${name}').origin)))"
      OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(folder)
      break()
    endif()
  endforeach()
  set(${variable} "${folder}" PARENT_SCOPE)
endfunction()

if(NOT TESSERA_TORCH_DIR)
  tessera_find_python_package(TESSERA_TORCH_DIR torch)
endif()
if(NOT EXISTS "${TESSERA_TORCH_DIR}/include/torch/csrc/api/include/torch/version.h")
  message(FATAL_ERROR
    "LibTorch was not found. Install the torch wheel and point TESSERA_PYTHON at its interpreter, "
    "or set TESSERA_TORCH_DIR to the folder of the torch package (the one that holds include/ and lib/).")
endif()

file(STRINGS "${TESSERA_TORCH_DIR}/version.py" TESSERA_TORCH_VERSION REGEX "^__version__")
string(REGEX REPLACE ".*'([^']+)'.*" "\\1" TESSERA_TORCH_VERSION "${TESSERA_TORCH_VERSION}")
# The CUDA that it is built for; empty for a build for CPUs.
file(STRINGS "${TESSERA_TORCH_DIR}/version.py" TESSERA_TORCH_CUDA REGEX "^cuda[ :=].*'")
string(REGEX REPLACE ".*'([^']+)'.*" "\\1" TESSERA_TORCH_CUDA "${TESSERA_TORCH_CUDA}")

add_library(tessera::torch INTERFACE IMPORTED GLOBAL)
target_include_directories(tessera::torch SYSTEM INTERFACE
  ${TESSERA_TORCH_DIR}/include ${TESSERA_TORCH_DIR}/include/torch/csrc/api/include)
target_compile_definitions(tessera::torch INTERFACE
  USE_DISTRIBUTED USE_C10D_GLOO FMT_HEADER_ONLY=1)
target_link_libraries(tessera::torch INTERFACE
  ${TESSERA_TORCH_DIR}/lib/libtorch_cpu.so ${TESSERA_TORCH_DIR}/lib/libc10.so)
set(TESSERA_TORCH_HAS_CUDA OFF)
if(EXISTS ${TESSERA_TORCH_DIR}/lib/libtorch_cuda.so)
  set(TESSERA_TORCH_HAS_CUDA ON)
  # Nothing of ours refers to these by name, yet they must be loaded for CUDA tensors to work.
  target_link_libraries(tessera::torch INTERFACE
    -Wl,--no-as-needed ${TESSERA_TORCH_DIR}/lib/libtorch_cuda.so ${TESSERA_TORCH_DIR}/lib/libc10_cuda.so
    -Wl,--as-needed)
endif()
message(STATUS "LibTorch ${TESSERA_TORCH_VERSION} in ${TESSERA_TORCH_DIR}")
