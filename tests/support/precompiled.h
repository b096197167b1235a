// LibTorch's and GoogleTest's headers cost seconds in every test; this pays them once.

#pragma once

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
