// planner/patience.h — whether there is time left for what could still be done.

#pragma once

#include <functional>

namespace tessera::planner {

class Patience {
 public:
  explicit Patience(const std::function<bool()>& is_late) : is_late_(is_late) {}

  /// Asked only where there is more to do, which is then left out. Once it is over it stays so.
  bool is_over() {
    is_over_ = is_over_ || (is_late_ && is_late_());
    return is_over_;
  }

  /// Whether anything was left out.
  bool was_lost() const { return is_over_; }

 private:
  const std::function<bool()>& is_late_;
  bool is_over_ = false;
};

}  // namespace tessera::planner
