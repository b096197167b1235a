#include "serving/verification.h"

#include <sys/resource.h>
#include <unistd.h>

#include <exception>
#include <system_error>

namespace tessera::serving {

void Verification::start(std::int64_t number) {
  const std::lock_guard lock(mutex_);
  end();
  is_stopping_ = false;
  try {
    thread_ = std::thread([this, number] { run(number); });
  } catch (const std::system_error& refusal) {
    log_(std::string("the package is not compared with its sums: no thread to do it: ") +
         refusal.what());
  }
}

void Verification::stop() {
  const std::lock_guard lock(mutex_);
  end();
}

void Verification::end() {
  is_stopping_ = true;
  if (thread_.joinable()) thread_.join();
}

void Verification::run(std::int64_t number) {
  // Of this thread alone; a wish.
  static_cast<void>(::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), 19));
  try {
    if (model_.verify([this] { return !is_stopping_; })) metrics_.verified_package = number;
  } catch (const std::exception& error) {
    metrics_.damaged_package = number;
    log_(std::string("the package is damaged, and answers nothing any more: ") + error.what());
  }
}

}  // namespace tessera::serving
