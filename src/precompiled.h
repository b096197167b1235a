// LibTorch's headers cost seconds in every file; this pays them once for the library, the workloads
// and the worker.

#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <string>
#include <vector>
