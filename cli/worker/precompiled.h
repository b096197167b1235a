// LibTorch's headers cost seconds in every file; this pays them once for the worker and the
// examples.

#pragma once

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
