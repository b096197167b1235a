#include "event_loop.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace tessera::launch {

void EventLoop::watch(int fd, short events, FileCallback callback) {
  watches_[fd] = Watch{events, next_id_++, std::move(callback)};
}

void EventLoop::unwatch(int fd) { watches_.erase(fd); }

EventLoop::TimerId EventLoop::after(std::chrono::nanoseconds delay,
                                    std::function<void()> callback) {
  const TimerId id = next_id_++;
  const Clock::time_point moment = now() + delay;
  timers_.emplace(std::pair(moment, id), std::move(callback));
  timer_moments_.emplace(id, moment);
  return id;
}

void EventLoop::cancel(TimerId id) {
  const auto found = timer_moments_.find(id);
  if (found == timer_moments_.end()) return;
  timers_.erase({found->second, id});
  timer_moments_.erase(found);
}

std::optional<Clock::time_point> EventLoop::next_moment() const {
  if (timers_.empty()) return std::nullopt;
  return timers_.begin()->first.first;
}

int EventLoop::wait_for_files(std::vector<pollfd>& files, std::chrono::nanoseconds limit) {
  const timespec timeout{limit.count() / 1'000'000'000, limit.count() % 1'000'000'000};
  return ppoll(files.data(), files.size(), &timeout, nullptr);
}

void EventLoop::run_once(std::chrono::nanoseconds limit) {
  std::vector<pollfd> files;
  std::vector<uint64_t> generations;
  files.reserve(watches_.size());
  generations.reserve(watches_.size());
  for (const auto& [fd, watch] : watches_) {
    files.push_back({fd, watch.events, 0});
    generations.push_back(watch.generation);
  }
  std::chrono::nanoseconds wait = limit;
  if (!timers_.empty()) wait = std::min(wait, timers_.begin()->first.first - now());
  wait = std::max(wait, std::chrono::nanoseconds(0));
  if (wait_for_files(files, wait) < 0) {
    if (errno == EINTR) return;
    throw std::system_error(errno, std::generic_category(), "launch.poll");
  }
  for (size_t i = 0; i < files.size(); ++i) {
    if (files[i].revents == 0) continue;
    const auto found = watches_.find(files[i].fd);
    // A callback before this one may have closed the file, and another may have got its number.
    if (found == watches_.end() || found->second.generation != generations[i]) continue;
    const FileCallback callback = found->second.callback;
    callback(files[i].revents);
  }
  const Clock::time_point moment = now();
  while (!timers_.empty() && timers_.begin()->first.first <= moment) {
    auto timer = timers_.extract(timers_.begin());
    timer_moments_.erase(timer.key().second);
    timer.mapped()();
  }
}

}  // namespace tessera::launch
