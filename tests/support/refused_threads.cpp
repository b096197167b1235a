#include "support/refused_threads.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>

namespace {

std::atomic<std::int64_t> left = 0;  // until one is refused; none is while it is 0
std::atomic<bool> was_one_refused = false;
std::atomic<bool> is_every_thread = true;
thread_local bool is_the_one = false;

bool is_refused() {
  if (left <= 0 || (!is_every_thread && !is_the_one) || --left != 0) return false;
  was_one_refused = true;
  return true;
}

}  // namespace

// Before that of the C library, also for the libraries.
extern "C" __attribute__((visibility("default"))) int pthread_create(
    pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* argument) {
  static const auto create =
      reinterpret_cast<decltype(&pthread_create)>(::dlsym(RTLD_NEXT, "pthread_create"));
  return is_refused() ? EAGAIN : create(thread, attributes, body, argument);
}

namespace tessera::testing {

RefusedThread::RefusedThread(std::int64_t n, bool of_this_thread) {
  was_one_refused = false;
  is_every_thread = !of_this_thread;
  is_the_one = of_this_thread;
  left = n;
}

RefusedThread::~RefusedThread() {
  left = 0;
  is_the_one = false;
}

bool RefusedThread::was_refused() const { return was_one_refused; }

}  // namespace tessera::testing
