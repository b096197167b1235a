#include "serving/batcher.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "core/start_threads.h"

namespace tessera::serving {
namespace {

// The requests of a batch behind each other.
struct Joined {
  std::vector<float> dense;
  std::vector<OwnedBags> features;
  std::int64_t num_samples = 0;

  explicit Joined(const std::vector<Job>& jobs) {
    features.resize(jobs.front().request.features.size());
    for (const Job& job : jobs) {
      num_samples += job.request.num_samples;
      dense.insert(dense.end(), job.request.dense.begin(), job.request.dense.end());
    }
    for (std::size_t f = 0; f < features.size(); ++f) {
      OwnedBags& all = features[f];
      bool has_weights = false;
      for (const Job& job : jobs) has_weights |= !job.request.features[f].weights.empty();
      for (const Job& job : jobs) {
        const OwnedBags& one = job.request.features[f];
        all.ids.insert(all.ids.end(), one.ids.begin(), one.ids.end());
        all.lengths.insert(all.lengths.end(), one.lengths.begin(), one.lengths.end());
        if (!has_weights) continue;
        if (one.weights.empty()) {
          all.weights.resize(all.ids.size(), 1.0F);  // a weight of 1 changes no bit
        } else {
          all.weights.insert(all.weights.end(), one.weights.begin(), one.weights.end());
        }
      }
    }
  }
};

}  // namespace

Room::~Room() { batcher_.give_back(*this); }

Batcher::Batcher(Model& model, const ServerOptions& options, Metrics& metrics,
                 ProcessGauges& gauges)
    : model_(model), options_(options), metrics_(metrics), gauges_(gauges) {
  const auto wanted = static_cast<std::size_t>(std::max(options.workers, 1));
  workers_ = core::start_threads(wanted, [this] { work(); });
  if (workers_.empty()) {
    throw std::runtime_error(
        "serving: the system gives no thread to compute answers. Raise its limit of processes "
        "(ulimit -u, pids.max), or end others.");
  }
}

void Batcher::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void Batcher::refuse_unless_in_time(std::int64_t num_samples, std::uint64_t num_bytes,
                                    Clock::time_point deadline, bool has_room) {
  if (!has_room) forget_late_rooms();
  const std::int64_t waiting = queued_samples_ + (has_room ? 0 : kept_samples_);
  const std::uint64_t bytes = queued_bytes_ + (has_room ? 0 : kept_bytes_);
  if (waiting + num_samples > options_.queue_samples || bytes + num_bytes > options_.queue_bytes) {
    metrics_.refused(Refusal::kQueueFull);
    throw HttpError(429, std::to_string(waiting) + " samples wait already");
  }
  // Who waits for nobody is computed whatever is thought of its time: nothing else would correct
  // that.
  const std::int64_t before = computed_samples_ + waiting;
  const double wait = before == 0
                          ? 0
                          : seconds_per_sample_ * static_cast<double>(before + num_samples) /
                                std::max(options_.workers, 1);
  if (Clock::now() +
          std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(wait)) >
      deadline) {
    metrics_.refused(Refusal::kDeadline);
    throw HttpError(429,
                    "the deadline cannot be met: " + std::to_string(waiting) + " samples wait");
  }
}

std::int64_t Batcher::samples_in(std::uint64_t num_bytes) const {
  return bytes_per_sample_ > 0
             ? static_cast<std::int64_t>(static_cast<double>(num_bytes) / bytes_per_sample_)
             : 0;
}

void Batcher::check_room(std::uint64_t num_bytes, Clock::time_point deadline, bool has_room) {
  const std::lock_guard lock(mutex_);
  refuse_unless_in_time(samples_in(num_bytes), num_bytes, deadline, has_room);
}

std::shared_ptr<Room> Batcher::keep_room(std::uint64_t num_bytes, Clock::time_point deadline) {
  const std::lock_guard lock(mutex_);
  const std::int64_t num_samples = samples_in(num_bytes);
  refuse_unless_in_time(num_samples, num_bytes, deadline, /*has_room=*/false);
  rooms_[++last_room_] = {Clock::now() + options_.latency_budget, num_samples, num_bytes};
  kept_samples_ += num_samples;
  kept_bytes_ += num_bytes;
  return std::make_shared<Room>(*this, last_room_);
}

void Batcher::forget(std::map<std::uint64_t, Kept>::iterator room) {
  kept_samples_ -= room->second.num_samples;
  kept_bytes_ -= room->second.num_bytes;
  rooms_.erase(room);
}

void Batcher::forget_late_rooms() {
  const auto now = Clock::now();
  while (!rooms_.empty() && rooms_.begin()->second.until <= now) forget(rooms_.begin());
}

void Batcher::give_back(const Room& room) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = rooms_.find(room.number());
  if (found != rooms_.end()) forget(found);
}

void Batcher::add(Job job) {
  const bool has_room = job.room != nullptr;
  job.room.reset();  // what it was kept for is here
  {
    const std::lock_guard lock(mutex_);
    refuse_unless_in_time(job.request.num_samples, job.num_bytes, job.deadline, has_room);
    queued_samples_ += job.request.num_samples;
    queued_bytes_ += job.num_bytes;
    const double own = static_cast<double>(job.num_bytes) /
                       static_cast<double>(std::max<std::int64_t>(job.request.num_samples, 1));
    bytes_per_sample_ = bytes_per_sample_ == 0 ? own : 0.9 * bytes_per_sample_ + 0.1 * own;
    gauges_.queued_samples.store(queued_samples_);
    queue_.push_back(std::move(job));
  }
  changed_.notify_one();
}

Clock::time_point Batcher::latest_start() const {
  const auto compute = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(metrics_.compute.quantile(0.99)));
  auto until = queue_.front().arrived + options_.batch_wait;
  for (const Job& job : queue_) {
    // Nothing may have been measured yet, and workers wake late.
    const auto needed = std::max(compute, (job.deadline - job.arrived) / 8);
    until = std::min(until, job.deadline - needed);
  }
  return until;
}

std::vector<Job> Batcher::take() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return is_stopping_ || !queue_.empty(); });
  if (queue_.empty()) return {};
  while (options_.batch_wait.count() > 0 && !is_stopping_ && !queue_.empty() &&
         queued_samples_ < options_.max_batch) {
    const auto until = latest_start();
    if (Clock::now() >= until) break;
    changed_.wait_until(lock, until);  // or until another one comes, who may have less time
  }
  std::vector<Job> jobs;
  std::int64_t num_samples = 0;
  while (!queue_.empty()) {
    const std::int64_t more = queue_.front().request.num_samples;
    if (!jobs.empty() &&
        (num_samples + more > options_.max_batch || queue_.front().step != jobs.front().step)) {
      break;
    }
    num_samples += more;
    queued_bytes_ -= queue_.front().num_bytes;
    jobs.push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
  queued_samples_ -= num_samples;
  computed_samples_ += num_samples;
  gauges_.queued_samples.store(queued_samples_);
  return jobs;
}

void Batcher::work() {
  while (true) {
    std::vector<Job> jobs = take();
    if (jobs.empty()) {
      const std::lock_guard lock(mutex_);
      if (is_stopping_ && queue_.empty()) return;
      continue;
    }
    const auto now = Clock::now();
    std::vector<Job> in_time;
    std::int64_t num_samples = 0;
    for (Job& job : jobs) {
      num_samples += job.request.num_samples;
      metrics_.queue.add(now - job.arrived);
      if (now > job.deadline) {
        metrics_.refused(Refusal::kLate);
        finish(job, {504, "the deadline passed while the request waited", "", {}, 0});
      } else {
        in_time.push_back(std::move(job));
      }
    }
    if (!in_time.empty()) compute(in_time);
    const std::lock_guard lock(mutex_);
    computed_samples_ -= num_samples;
  }
}

void Batcher::count(const PredictFigures& figures, std::int64_t num_samples) {
  metrics_.lookup.add(figures.lookup);
  metrics_.dense.add(figures.dense);
  metrics_.unknown_ids += static_cast<std::uint64_t>(figures.num_unknown);
  metrics_.batch_samples.add(num_samples);
}

void Batcher::finish(Job& job, Outcome outcome) {
  job.done(std::move(job.request), std::move(outcome));
}

void Batcher::compute(std::vector<Job>& jobs) {
  const auto begin = Clock::now();
  if (jobs.size() == 1) {
    compute_alone(jobs.front());
  } else {
    std::vector<float> logits;
    std::int64_t step = 0;
    try {
      const Joined joined(jobs);
      std::vector<FeatureBags> bags;
      for (const OwnedBags& own : joined.features) {
        bags.push_back({own.ids, own.lengths, own.weights});
      }
      logits.resize(static_cast<std::size_t>(joined.num_samples));
      auto lease = lease_for(jobs.front());
      lease.predict({joined.num_samples, joined.dense, bags}, logits);
      count(lease.figures(), joined.num_samples);
      step = lease.step();
    } catch (const std::exception&) {
      // One of them does not fit the version that is served now: each for itself.
      for (Job& job : jobs) compute_alone(job);
      return;
    }
    std::size_t place = 0;
    for (Job& job : jobs) {
      const auto count = static_cast<std::size_t>(job.request.num_samples);
      Outcome outcome;
      outcome.logits.assign(logits.begin() + static_cast<std::ptrdiff_t>(place),
                            logits.begin() + static_cast<std::ptrdiff_t>(place + count));
      outcome.step = step;
      place += count;
      metrics_.samples += count;
      metrics_.ids += static_cast<std::uint64_t>(job.request.num_ids);
      finish(job, std::move(outcome));
    }
  }
  const auto time = Clock::now() - begin;
  metrics_.compute.add(time);
  ++metrics_.batches;
  std::int64_t num_samples = 0;
  for (const Job& job : jobs) num_samples += std::max<std::int64_t>(job.request.num_samples, 1);
  const double own = std::chrono::duration<double>(time).count() / static_cast<double>(num_samples);
  const std::lock_guard lock(mutex_);
  seconds_per_sample_ = seconds_per_sample_ == 0 ? own : 0.9 * seconds_per_sample_ + 0.1 * own;
}

Model::Lease Batcher::lease_for(const Job& job) {
  if (!job.step) return model_.lease();
  auto lease = model_.lease(*job.step);
  if (!lease) throw HttpError(404, "version " + std::to_string(*job.step) + " is gone");
  return std::move(*lease);
}

void Batcher::compute_alone(Job& job) {
  Outcome outcome;
  try {
    auto lease = lease_for(job);
    const std::vector<FeatureBags> bags = job.request.bags();
    outcome.logits.resize(static_cast<std::size_t>(job.request.num_samples));
    lease.predict({job.request.num_samples, job.request.dense, bags}, outcome.logits);
    count(lease.figures(), job.request.num_samples);
    outcome.step = lease.step();
    metrics_.samples += static_cast<std::uint64_t>(job.request.num_samples);
    metrics_.ids += static_cast<std::uint64_t>(job.request.num_ids);
  } catch (const HttpError& error) {
    outcome.code = error.code();
    outcome.error = error.what();
  } catch (const BadRequest& error) {
    outcome.code = error.is_malformed() ? 400 : 422;
    outcome.error = error.what();
    outcome.where = error.where();
  } catch (const std::exception& error) {
    outcome.code = 500;
    outcome.error = error.what();
  }
  finish(job, std::move(outcome));
}

}  // namespace tessera::serving
