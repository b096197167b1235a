// tessera/comm/awaitable.h — a result that is on its way.

#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace tessera::comm {

/// A result that has to be waited for. Copies refer to the same result.
///
/// `wait` runs the wait once; callbacks added before it transform the result in the order they were
/// added. Later waits return the same value. Not thread-safe.
template <class T>
class [[nodiscard]] Awaitable {
 public:
  using Callback = std::function<T(T)>;

  /// `is_here` tells whether `wait` would find the result there; without it nobody knows.
  explicit Awaitable(std::function<T()> wait, std::function<bool()> is_here = nullptr)
      : state_(std::make_shared<State>()) {
    state_->wait = std::move(wait);
    state_->is_here = std::move(is_here);
  }

  /// Adds a step applied to the result when it is waited for; applied at once if it has been.
  void add_callback(Callback callback) {
    if (state_->value) {
      state_->value = callback(std::move(*state_->value));
    } else {
      state_->callbacks.push_back(std::move(callback));
    }
  }

  /// Returns the result, waiting for it the first time. What the wait throws is thrown, and thrown
  /// again by later waits.
  const T& wait() const {
    if (state_->error) std::rethrow_exception(state_->error);
    if (!state_->value) {
      try {
        T value = state_->wait();
        for (auto& callback : state_->callbacks) value = callback(std::move(value));
        state_->value = std::move(value);
      } catch (...) {
        state_->error = std::current_exception();
        throw;
      }
      state_->wait = nullptr;
      state_->is_here = nullptr;
      state_->callbacks.clear();
    }
    return *state_->value;
  }

  bool has_value() const noexcept { return state_->value.has_value(); }

  /// Whether the first wait would not have to wait; false if that is not known. For callers that
  /// have other work to do until then.
  bool is_ready() const {
    return has_value() || state_->error || (state_->is_here && state_->is_here());
  }

 private:
  struct State {
    std::function<T()> wait;
    std::function<bool()> is_here;
    std::vector<Callback> callbacks;
    std::optional<T> value;
    std::exception_ptr error;
  };
  std::shared_ptr<State> state_;
};

/// An Awaitable whose result is there already.
template <class T>
class [[nodiscard]] NoWait : public Awaitable<T> {
 public:
  explicit NoWait(T value)
      : Awaitable<T>([value = std::move(value)]() mutable { return std::move(value); }) {}
};

/// An Awaitable that waits by itself when the result is first used.
template <class T>
class [[nodiscard]] LazyAwaitable : public Awaitable<T> {
 public:
  using Awaitable<T>::Awaitable;
  // Implicit: standing in for the value is what this type is for.
  operator const T&() const { return this->wait(); }  // NOLINT(google-explicit-constructor)
  const T& operator*() const { return this->wait(); }
  const T* operator->() const { return &this->wait(); }
};

/// A LazyAwaitable whose result is there already.
template <class T>
class [[nodiscard]] LazyNoWait : public LazyAwaitable<T> {
 public:
  explicit LazyNoWait(T value)
      : LazyAwaitable<T>([value = std::move(value)]() mutable { return std::move(value); }) {}
};

}  // namespace tessera::comm
