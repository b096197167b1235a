// launch/stranger_log.h — tells people about connections of those who are not of the job.

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "event_loop.h"

namespace tessera::launch {

/// The first stranger is told at once, the others are counted and told twice a minute at most. What
/// a stranger has sent is never repeated.
class StrangerLog {
 public:
  /// `deed` is what they did, told of one or many.
  StrangerLog(EventLoop& loop, std::function<void(const std::string&)> note,
              std::string deed = "did not prove the job's secret")
      : loop_(loop), note_(std::move(note)), deed_(std::move(deed)) {}
  StrangerLog(const StrangerLog&) = delete;
  StrangerLog& operator=(const StrangerLog&) = delete;
  ~StrangerLog() { loop_.cancel(timer_); }

  void add(const std::string& address);
  /// `3 connections did not prove the job's secret, the last from 10.0.0.7`; empty if there were
  /// none.
  std::string summary() const;

 private:
  void tell();

  EventLoop& loop_;
  std::function<void(const std::string&)> note_;
  std::string deed_;
  uint64_t count_ = 0;
  uint64_t told_ = 0;
  std::string last_;
  EventLoop::TimerId timer_ = 0;
};

/// `text` with everything but printable ASCII written as \xNN, and no longer than `most`.
std::string printable(const std::string& text, size_t most = 200);

}  // namespace tessera::launch
