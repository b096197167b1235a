// src/sharding/exchange.h — a collective and its conjugate, as two autograd nodes.

#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/awaitable.h"

namespace tessera::sharding {

/// What is exchanged forward and back. Made for one call; shared by its nodes.
class Exchange {
 public:
  using Parts = std::vector<at::Tensor>;

  /// Waits for a collective under way, decodes and shapes what arrived: one tensor, or several.
  class Pending {
   public:
    Pending() = default;
    template <typename Finish>
      requires std::is_invocable_r_v<at::Tensor, Finish>
    Pending(Finish finish,  // NOLINT(google-explicit-constructor): a lambda is one
            std::function<bool()> is_ready = nullptr, std::function<void()> own_work = nullptr)
        : finish_([finish = std::move(finish)] { return Parts{finish()}; }),
          is_ready_(std::move(is_ready)),
          own_work_(std::move(own_work)) {}
    template <typename Finish>
      requires std::is_same_v<Parts, std::invoke_result_t<Finish>>
    Pending(Finish finish,  // NOLINT(google-explicit-constructor): a lambda is one
            std::function<bool()> is_ready = nullptr, std::function<void()> own_work = nullptr)
        : finish_(std::move(finish)),
          is_ready_(std::move(is_ready)),
          own_work_(std::move(own_work)) {}

    /// What this rank has to do itself for the result, once, before it is waited for.
    void do_own_work() const {
      if (own_work_) own_work_();
    }
    at::Tensor operator()() const { return finish_().front(); }
    Parts parts() const { return finish_(); }
    /// Whether it has arrived; false if that is not known.
    bool is_ready() const { return is_ready_ && is_ready_(); }
    explicit operator bool() const noexcept { return static_cast<bool>(finish_); }

   private:
    std::function<Parts()> finish_;
    std::function<bool()> is_ready_;
    std::function<void()> own_work_;
  };
  /// Does a piece of other work and returns true, or returns false because none is left.
  using Meanwhile = std::function<bool()>;

  Exchange() = default;
  virtual ~Exchange() = default;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  /// Starts the collective on a detached input.
  virtual Pending start(const at::Tensor& input) = 0;
  /// Starts the conjugate on the gradient of the result; pending is the gradient of the input.
  virtual Pending start_backward(const at::Tensor& gradient) = 0;
  /// The same for a result of several parts.
  virtual Pending start_backward_of(const Parts& gradients) {
    return start_backward(gradients.front());
  }
};

/// One exchange on its way, in its steps: each once, in this order. Gradients are not
/// differentiable again.
class Journey {
 public:
  /// Whoever waits, for the result or for its gradient, does pieces of `meanwhile` until it is
  /// there.
  explicit Journey(std::shared_ptr<Exchange> exchange, Exchange::Meanwhile meanwhile = nullptr)
      : exchange_(std::move(exchange)), meanwhile_(std::move(meanwhile)) {}

  void start(const at::Tensor& input) { forward_ = exchange_->start(input.detach()); }
  Exchange::Parts wait() { return finish(forward_); }
  /// Throws ValueError if the backward pass is to be differentiated.
  void start_backward(const Exchange::Parts& gradients);
  at::Tensor wait_backward();

 private:
  Exchange::Parts finish(Exchange::Pending& pending) const;

  std::shared_ptr<Exchange> exchange_;
  Exchange::Meanwhile meanwhile_;
  Exchange::Pending forward_;
  Exchange::Pending backward_;
};

// Note [Two nodes]
// The first node starts the exchange and returns a token; the second takes the token, waits and
// returns the result. Backward, the second node starts the reverse exchange and hands a token to
// the first, which waits for it. Autograd runs other nodes between the two, by order of creation:
// what was recorded between start and wait computes while the gradient travels.

/// Starts `exchange` on `input`, recorded by autograd.
comm::Awaitable<at::Tensor> run(std::shared_ptr<Exchange> exchange, const at::Tensor& input,
                                Exchange::Meanwhile meanwhile = nullptr);
/// The same for a result of several parts.
comm::Awaitable<Exchange::Parts> run_in_parts(std::shared_ptr<Exchange> exchange,
                                              const at::Tensor& input,
                                              Exchange::Meanwhile meanwhile = nullptr);

}  // namespace tessera::sharding
