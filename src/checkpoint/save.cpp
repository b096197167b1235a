#include "tessera/checkpoint/save.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

#include "checkpoint/exchange.h"
#include "checkpoint/open_file.h"
#include "checkpoint/snapshot.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"

namespace tessera::checkpoint {
namespace {

constexpr const char* kSave = "checkpoint.save";
constexpr double kProgressSeconds = 5;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

int rank_of(const std::optional<comm::Group>& group) { return group ? group->rank() : 0; }
int size_of(const std::optional<comm::Group>& group) { return group ? group->size() : 1; }

void log_line(const SaveOptions& options, const std::string& line) {
  if (options.log) {
    options.log(line);
  } else {
    std::fprintf(stderr, "[tessera] %s\n", line.c_str());
  }
}

std::string rate_text(std::uint64_t num_bytes, double seconds) {
  char text[80];
  std::snprintf(text, sizeof(text), "%.1f MB in %.2f s, %.0f MB/s",
                static_cast<double>(num_bytes) / 1e6, seconds,
                static_cast<double>(num_bytes) / 1e6 / std::max(seconds, 1e-9));
  return text;
}

// Puts the values of all ranks together; those of one name must agree.
void merge_values(Values& all, const Values& part, int rank) {
  for (const auto& [name, value] : part) {
    const auto [known, is_new] = all.emplace(name, value);
    if (!is_new && known->second != value) {
      throw Error(ErrorKind::kInvalid,
                  "checkpoint.save: the value '" + name + "' of rank " + std::to_string(rank) +
                      " is not that of an earlier rank. Put it into rank_values.");
    }
  }
}

}  // namespace

SaveReport write_snapshot(const std::string& root, std::int64_t step, const Snapshot& snapshot,
                          const std::optional<comm::Group>& group, const SaveOptions& options) {
  const auto begin = Clock::now();
  const int rank = rank_of(group);
  const int size = size_of(group);
  Disk& disk = options.disk != nullptr ? *options.disk : Disk::real();
  std::optional<PendingFolder> folder;  // of rank 0
  const auto started = together(group, kSave, [&]() -> std::string {
    if (rank != 0) return "";
    folder.emplace(root, step, disk, options.replaces);
    return folder->path();
  });
  const std::string& path = started[0];

  std::uint64_t total = 0;
  for (const Part& part : snapshot.parts) total += part.num_bytes();
  SaveReport report{.step = step, .folder = root + "/" + folder_name(step), .rank_bytes = total};
  double told = 0;
  const auto progress = [&](std::uint64_t done) {
    const double seconds = seconds_since(begin);
    if (rank != 0 || seconds - told < kProgressSeconds) return;
    told = seconds;
    log_line(options, "checkpoint step " + std::to_string(step) + ": " +
                          std::to_string(100 * done / std::max<std::uint64_t>(total, 1)) +
                          " % of rank 0, " + rate_text(done, seconds));
  };
  const auto written = together(group, kSave, [&] {
    Manifest part = write_shard(path, rank, size, snapshot.parts, disk, progress);
    part.deltas = snapshot.deltas;
    part.lists = snapshot.lists;
    part.values = snapshot.values;
    part.rank_values.resize(static_cast<std::size_t>(size));
    part.rank_values[static_cast<std::size_t>(rank)] = snapshot.rank_values;
    return encode_fragment(part);
  });

  // Rank 0 has the pieces put together; the others read what it wrote. They see it only if all
  // ranks share the folder, and only then does it get its name.
  Manifest manifest;
  const auto sums = together(group, kSave, [&]() -> std::string {
    if (rank != 0) return "";
    manifest.step = step;
    manifest.world = size;
    manifest.plan = options.plan;
    manifest.rank_values.resize(static_cast<std::size_t>(size));
    if (options.base) {
      const std::string base = folder_name(*options.base);
      manifest.base = Base{base, read_manifest(root + "/" + base).sha256};
    }
    for (int other = 0; other < size; ++other) {
      Manifest part = decode_fragment(written[other], "checkpoint.save");
      manifest.rank_values[other] = std::move(part.rank_values[other]);
      merge_values(manifest.values, part.values, other);
      merge(manifest, std::move(part));
    }
    for (const auto& file : manifest.files) report.total_bytes += file.num_bytes;
    folder->write_manifest(manifest);
    return manifest.sha256 + std::to_string(report.total_bytes);
  });
  together(group, kSave, [&]() -> std::string {
    if (rank == 0) return "";
    report.total_bytes = std::stoull(sums[0].substr(64));
    if (read_manifest(path).sha256 != sums[0].substr(0, 64)) {
      throw Error(ErrorKind::kCorrupt, path +
                                           ": this rank reads another manifest than was written. "
                                           "All ranks must share the folder.");
    }
    return "";
  });
  together(group, kSave, [&]() -> std::string {
    if (rank == 0) folder->commit(options.keep);
    return "";
  });
  report.seconds = seconds_since(begin);
  if (rank == 0) {
    log_line(options, "checkpoint step " + std::to_string(step) + ": " +
                          rate_text(report.total_bytes, report.seconds) + ", " + report.folder);
  }
  return report;
}

SaveReport save(const std::string& root, std::int64_t step, const State& state,
                const std::optional<comm::Group>& group, const SaveOptions& options) {
  Snapshot snapshot;
  together(group, kSave, [&]() -> std::string {
    snapshot =
        take_snapshot(state, rank_of(group), size_of(group), options.base.has_value(), nullptr);
    return "";
  });
  return write_snapshot(root, step, snapshot, group, options);
}

struct AsyncSaver::Worker {
  std::string root;
  std::optional<comm::Group> group;
  SaveOptions options;
  Staging staging;
  std::thread thread;
  const pid_t owner = ::getpid();

  mutable std::mutex mutex;
  bool is_running = false;
  std::exception_ptr error;
  std::optional<SaveReport> report;

  bool is_ours() const noexcept { return owner == ::getpid(); }
  void join() {
    if (!is_ours()) {
      throw Error(ErrorKind::kInvalid, "checkpoint.save: this AsyncSaver is of process " +
                                           std::to_string(owner) + ", which forked process " +
                                           std::to_string(::getpid()) + ". Make one of its own.");
    }
    if (thread.joinable()) thread.join();
  }
  void throw_error() {
    std::exception_ptr thrown;
    {
      const std::lock_guard lock(mutex);
      std::swap(thrown, error);
    }
    if (thrown) std::rethrow_exception(thrown);
  }
};

AsyncSaver::AsyncSaver(std::string root, const std::optional<comm::Group>& group,
                       SaveOptions options)
    : worker_(std::make_unique<Worker>()) {
  worker_->root = std::move(root);
  worker_->options = std::move(options);
  if (group && group->size() > 1) {
    // Numbered by the store: a group's name must not come back.
    const auto numbers = together(group, kSave, [&]() -> std::string {
      return group->rank() == 0 ? std::to_string(group->store()->add("checkpoint/savers", 1)) : "";
    });
    std::vector<int> ranks(static_cast<std::size_t>(group->size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    worker_->group = *group->subgroup(ranks, "checkpoint" + numbers[0]);
  }
}

AsyncSaver::~AsyncSaver() {
  if (!worker_->is_ours()) {  // the thread is the parent's; so is what it works on
    if (worker_->thread.joinable()) worker_->thread.detach();
    worker_.release();
    return;
  }
  worker_->join();
  try {
    worker_->throw_error();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[tessera] a checkpoint was not saved: %s\n", error.what());
  }
}

void AsyncSaver::save(std::int64_t step, const State& state,
                      const std::optional<std::int64_t>& base) {
  Worker& worker = *worker_;
  worker.join();
  worker.throw_error();
  // Errors of the copy are local; they surface here, and the writers of the other ranks learn of
  // them instead of waiting.
  auto snapshot = std::make_shared<Snapshot>();
  std::string problem;
  std::exception_ptr thrown;
  try {
    *snapshot = take_snapshot(state, rank_of(worker.group), size_of(worker.group), base.has_value(),
                              &worker.staging);
  } catch (const c10::Error& error) {
    thrown = std::current_exception();
    problem = error.what_without_backtrace();
  } catch (const std::exception& error) {
    thrown = std::current_exception();
    problem = error.what();
  }
  {
    const std::lock_guard lock(worker.mutex);
    worker.is_running = true;
    worker.report.reset();
  }
  SaveOptions options = worker.options;
  options.base = base;
  const auto write = [&worker, step, options, snapshot, problem] {
    std::exception_ptr error;
    std::optional<SaveReport> report;
    try {
      together(worker.group, kSave, [&]() -> std::string {
        if (!problem.empty()) throw Error(ErrorKind::kInvalid, problem);
        return "";
      });
      report = write_snapshot(worker.root, step, *snapshot, worker.group, options);
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(worker.mutex);
    worker.is_running = false;
    worker.error = problem.empty() ? error : nullptr;
    worker.report = std::move(report);
  };
  try {
    worker.thread = std::thread(write);
  } catch (const std::exception& refused) {
    // The writers of the other ranks wait for this one.
    log_line(options, "checkpoint step " + std::to_string(step) +
                          ": training waits for it, as there is no thread to write it beside (" +
                          refused.what() + ")");
    write();
  }
  if (thrown) std::rethrow_exception(thrown);
}

void AsyncSaver::check() {
  if (!worker_->is_ours()) return;
  if (!is_saving()) worker_->throw_error();
}

std::optional<SaveReport> AsyncSaver::wait() {
  worker_->join();
  worker_->throw_error();
  const std::lock_guard lock(worker_->mutex);
  return worker_->report;
}

bool AsyncSaver::is_saving() const {
  if (!worker_->is_ours()) return false;
  const std::lock_guard lock(worker_->mutex);
  return worker_->is_running;
}

}  // namespace tessera::checkpoint
