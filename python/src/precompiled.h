// LibTorch's and pybind11's headers cost seconds in every file; this pays them once.

#pragma once

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
