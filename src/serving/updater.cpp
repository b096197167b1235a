#include "serving/updater.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <exception>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <utility>

#include <nlohmann/json.hpp>

#include "serving/infer_request.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/reader.h"

namespace tessera::serving {
namespace {

constexpr int kPollMilliseconds = 200;

// Since the manifest got its last byte.
std::uint64_t microseconds_since_commit(const std::string& folder) {
  struct stat facts{};
  if (::stat((folder + "/" + checkpoint::kManifestName).c_str(), &facts) != 0) return 0;
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  const auto lag = (now.tv_sec - facts.st_mtim.tv_sec) * 1'000'000 +
                   (now.tv_nsec - facts.st_mtim.tv_nsec) / 1000;
  return static_cast<std::uint64_t>(std::max<std::int64_t>(lag, 0));
}

std::uint64_t number_of_folder(const std::string& folder) {
  struct stat facts{};
  return ::stat(folder.c_str(), &facts) == 0 ? facts.st_ino : 0;
}

// A folder's changes, if the system tells of them.
class Changes {
 public:
  explicit Changes(const std::string& folder)
      : fd_(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK)), folder_(folder) {
    watch();
  }
  Changes(const Changes&) = delete;
  Changes& operator=(const Changes&) = delete;
  ~Changes() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd() const { return fd_; }
  // The folder may not be there yet.
  void watch() {
    if (fd_ >= 0 && watched_ < 0) {
      watched_ = ::inotify_add_watch(fd_, folder_.c_str(), IN_MOVED_TO | IN_CREATE);
    }
  }
  void forget() const {
    char events[4096];
    while (fd_ >= 0 && ::read(fd_, events, sizeof(events)) > 0) {
    }
  }

 private:
  int fd_;
  std::string folder_;
  int watched_ = -1;
};

}  // namespace

Updater::Updater(Model& model, UpdateFigures& figures, std::string folder, Model::Canary canary,
                 Log log)
    : model_(model),
      figures_(figures),
      folder_(std::move(folder)),
      canary_(std::move(canary)),
      log_(std::move(log)) {
  figures_.is_watching = true;
}

Updater::~Updater() {
  if (thread_.joinable()) {
    const char end = 'e';
    if (::write(wake_[1], &end, 1) == 1) thread_.join();
  }
  for (const int fd : wake_) {
    if (fd >= 0) ::close(fd);
  }
}

void Updater::start() {
  if (::pipe2(wake_, O_CLOEXEC) != 0) throw std::runtime_error("serving: no pipe for the updater");
  thread_ = std::thread([this] { run(); });
}

void Updater::run() {
  Changes changes(folder_);
  while (true) {
    try {
      look();
    } catch (const std::exception& error) {
      // For now: the disk, or requests that hold all versions. It is tried again.
      figures_.set_error(error.what());
    }
    pollfd waits[2] = {{wake_[0], POLLIN, 0}, {changes.fd(), POLLIN, 0}};
    changes.watch();
    ::poll(waits, changes.fd() >= 0 ? 2 : 1, kPollMilliseconds);
    if (waits[0].revents != 0) return;
    changes.forget();
  }
}

void Updater::refuse(const std::string& sum, const std::string& why) {
  if (!refused_.insert(sum).second) return;
  ++figures_.refused;
  const std::string text = "a published version was refused, step " +
                           std::to_string(model_.current().step) + " goes on: " + why;
  figures_.set_error(text);
  log_(text);
}

bool Updater::look() {
  if (figures_.is_held.load()) {
    seen_.second = -1;
    return false;
  }
  const std::int64_t newest = checkpoint::last_commit(folder_);
  const std::pair now_there(number_of_folder(folder_), newest);
  if (now_there == seen_ || newest == 0) return false;
  auto found = checkpoint::find_newest(folder_, INT64_MAX, refused_);
  for (const std::string& warning : found.warnings) refuse(warning, warning);
  const VersionInfo now = model_.current();
  if (found.reader == nullptr || found.reader->manifest().sha256 == now.source ||
      // Commits of a folder only grow; fewer than there were are those of another training.
      (now.commit > 0 && now.commit <= newest && found.reader->manifest().commit <= now.commit) ||
      // What was refused is no reason to go back.
      (now.commit == 0 && !refused_.empty() && found.reader->manifest().step <= now.step)) {
    seen_ = now_there;
    return false;
  }
  const checkpoint::Manifest& manifest = found.reader->manifest();
  try {
    const UpdateReport report = model_.update(*found.reader, canary_);
    figures_.last_lag_us = microseconds_since_commit(found.reader->folder());
    figures_.rows += static_cast<std::uint64_t>(report.rows_updated);
    if (report.is_whole) ++figures_.whole;
    ++figures_.applied;
    figures_.set_error("");
    seen_ = now_there;
    if (report.is_whole) {
      log_("no deltas lead from step " + std::to_string(now.step) + " to step " +
           std::to_string(report.step) + ": all rows were read");
    }
    return true;
  } catch (const checkpoint::Error& error) {
    if (error.kind() == checkpoint::ErrorKind::kRead) throw;
    // Removed meanwhile: there are newer ones.
    if (error.kind() == checkpoint::ErrorKind::kMissing) return false;
    refuse(manifest.sha256, error.what());
  } catch (const CanaryError& error) {
    refuse(manifest.sha256, error.what());
  }
  return false;
}

Model::Canary canary_of(const std::string& file, double bound, const ModelInfo& model) {
  std::ifstream stream(file);
  std::stringstream text;
  text << stream.rdbuf();
  if (!stream) throw std::runtime_error(file + " cannot be read");
  const InferParser parser(model, ServerLimits{});
  auto requests = std::make_shared<std::vector<InferRequest>>();
  const auto add = [&](const std::string& body) {
    try {
      requests->push_back(parser.parse(body, std::nullopt));
    } catch (const HttpError& error) {
      throw std::runtime_error(file + ": request " + std::to_string(requests->size()) + ": " +
                               error.what() + " (" + error.where() + ")");
    }
  };
  const auto list = nlohmann::json::parse(text.str(), nullptr, /*allow_exceptions=*/false);
  if (list.is_array()) {
    for (const auto& body : list) add(body.dump());
  } else {
    for (std::string line; std::getline(text, line);) {
      if (!line.empty()) add(line);
    }
  }
  if (requests->empty()) throw std::runtime_error(file + " holds no requests");
  return [requests, bound](Model::Lease& next, Model::Lease& now) {
    for (std::size_t i = 0; i < requests->size(); ++i) {
      const InferRequest& request = (*requests)[i];
      const std::vector<FeatureBags> bags = request.bags();
      std::vector<float> after(static_cast<std::size_t>(request.num_samples));
      std::vector<float> before(after.size());
      next.predict({request.num_samples, request.dense, bags}, after);
      now.predict({request.num_samples, request.dense, bags}, before);
      for (std::size_t s = 0; s < after.size(); ++s) {
        const float change = std::abs(sigmoid(after[s]) - sigmoid(before[s]));
        if (std::isfinite(after[s]) && change <= bound) continue;
        throw CanaryError("request " + std::to_string(i) + " of the canary, sample " +
                          std::to_string(s) + ": probability " +
                          std::to_string(sigmoid(before[s])) + " becomes " +
                          std::to_string(sigmoid(after[s])));
      }
    }
  };
}

}  // namespace tessera::serving
