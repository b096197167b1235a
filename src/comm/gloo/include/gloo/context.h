// Declarations that ProcessGroupGloo.hpp needs; see src/comm/gloo/README.md.
#pragma once

#include <chrono>

namespace gloo {

// Known by pointer only: its layout is LibTorch's secret.
class Context {
 public:
  Context() = delete;
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
