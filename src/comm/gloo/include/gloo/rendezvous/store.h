// Declarations that ProcessGroupGloo.hpp needs; see src/comm/gloo/README.md.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace gloo::rendezvous {

// ProcessGroupGloo.hpp derives an all-inline class from this one. Making an object of it here would
// emit a vtable that could replace LibTorch's own, so the constructor stops the build instead.
class Store {
 public:
  __attribute__((error("a GlooStore must never be made outside LibTorch"))) Store();
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::vector<char>& data) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys,
                    const std::chrono::milliseconds& timeout) = 0;
};

}  // namespace gloo::rendezvous
