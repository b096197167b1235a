#include "short_jobs.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <stdexcept>

#include "comm/store/server.h"
#include "comm/store/wire.h"
#include "core/handshake.h"
#include "core/secret.h"
#include "tessera/comm/error.h"

namespace tessera::faults {
namespace {

int reports_to = -1;

std::int64_t monotonic_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

void tell_error() {
  try {
    throw;
  } catch (const comm::Error& error) {
    tell("error",
         {{"kind", comm::name_of(error.kind())}, {"ranks", error.ranks()}, {"text", error.what()}});
  } catch (const std::exception& error) {
    tell("error", {{"kind", "exception"}, {"text", error.what()}});
  }
}

std::string secret_of_jobs() { return std::string(48, 's'); }

}  // namespace

void tell(const std::string& event, Json fields) {
  fields["event"] = event;
  fields["ns"] = monotonic_ns();
  const std::string line = fields.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  static_cast<void>(!::write(reports_to, line.data(), line.size()));
}

// A connection of its own, in the few words that this takes: the ranks' clients are the library's.
void await_on_store(const std::string& key) {
  namespace store = comm::store;
  const std::string place = std::getenv("TESSERA_STORE");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  place.substr(place.find("=unix:") + 6).copy(address.sun_path, sizeof(address.sun_path) - 1);
  const int connection = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (::connect(connection, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    throw std::runtime_error("no connection to the store");
  }
  core::Handshake handshake(core::Handshake::Side::kConnects,
                            core::Secret::from_text(secret_of_jobs(), "the test"), store::kPurpose);
  std::string received;
  const auto send_all = [&](const std::string& text) {
    if (::send(connection, text.data(), text.size(), MSG_NOSIGNAL) !=
        static_cast<ssize_t>(text.size())) {
      throw std::runtime_error("the store does not read");
    }
  };
  const auto receive = [&] {
    char buffer[4096];
    const ssize_t size = ::recv(connection, buffer, sizeof(buffer), 0);
    if (size <= 0) throw std::runtime_error("the store does not answer");
    received.append(buffer, static_cast<std::size_t>(size));
  };
  while (handshake.state() == core::Handshake::State::kOpen) {
    receive();
    std::string answer;
    handshake.advance(received, answer);
    send_all(answer);
  }
  send_all(handshake.writer().frame(
      encode(store::Packet{static_cast<std::uint8_t>(store::Operation::kWait), {key}})));
  core::FrameReader reader = handshake.reader();
  while (!reader.next(received, store::kLongest)) receive();
  ::close(connection);
}

ShortJob::~ShortJob() {
  for (const Rank& rank : ranks_) {
    if (rank.pid > 0) {
      ::kill(rank.pid, SIGKILL);
      ::waitpid(rank.pid, nullptr, 0);
    }
    if (rank.reports >= 0) ::close(rank.reports);
  }
}

std::int64_t ShortJob::kill(int rank) const {
  const std::int64_t now = monotonic_ns();
  ::kill(pid(rank), SIGKILL);
  return now;
}

std::vector<Json> ShortJob::await(const std::string& event, const std::vector<int>& ranks,
                                  std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  std::vector<Json> found(ranks.size());
  while (true) {
    std::vector<pollfd> waits;
    std::vector<std::size_t> whose;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      Rank& rank = ranks_[static_cast<std::size_t>(ranks[i])];
      for (const Json& said : rank.said) {
        if (found[i].is_null() && said["event"] == event) found[i] = said;
      }
      if (!found[i].is_null() || rank.reports < 0) continue;
      waits.push_back({.fd = rank.reports, .events = POLLIN, .revents = 0});
      whose.push_back(static_cast<std::size_t>(ranks[i]));
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    if (waits.empty() || left.count() <= 0) return found;
    ::poll(waits.data(), waits.size(), static_cast<int>(left.count()));
    for (std::size_t i = 0; i < waits.size(); ++i) {
      if (waits[i].revents == 0) continue;
      Rank& rank = ranks_[whose[i]];
      char buffer[4096];
      const ssize_t count = ::read(rank.reports, buffer, sizeof(buffer));
      if (count <= 0) {
        ::close(std::exchange(rank.reports, -1));
        continue;
      }
      rank.unread.append(buffer, static_cast<std::size_t>(count));
      for (std::size_t line; (line = rank.unread.find('\n')) != std::string::npos;) {
        rank.said.push_back(Json::parse(rank.unread.substr(0, line)));
        rank.unread.erase(0, line + 1);
      }
    }
  }
}

std::vector<int> ShortJob::wait(std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  std::vector<int> statuses;
  for (Rank& rank : ranks_) {
    int status = 0;
    while (::waitpid(rank.pid, &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() >= end) ::kill(rank.pid, SIGKILL);
      ::usleep(1000);
    }
    rank.pid = -1;
    statuses.push_back(status);
  }
  return statuses;
}

ShortJobs::ShortJobs() {
  std::string name = (std::filesystem::temp_directory_path() / "tessera-jobs-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no folder for the store");
  folder_ = name;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  (folder_ + "/store").copy(address.sun_path, sizeof(address.sun_path) - 1);
  const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (::bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(listener, 1024) != 0) {
    throw std::runtime_error("no socket for the store");
  }
  store_ = ::fork();
  if (store_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    int never[2];
    static_cast<void>(!::pipe2(never, O_CLOEXEC));
    comm::store::Server(listener, core::Secret::from_text(secret_of_jobs(), "the test"))
        .run(never[0]);
    ::_exit(0);
  }
  ::close(listener);
}

ShortJobs::~ShortJobs() {
  ::kill(store_, SIGKILL);
  ::waitpid(store_, nullptr, 0);
  std::filesystem::remove_all(folder_);
}

ShortJob ShortJobs::start(int size, const std::function<int()>& body) {
  const std::string id = "short " + std::to_string(num_started_++);
  ShortJob job;
  for (int rank = 0; rank < size; ++rank) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    const pid_t child = ::fork();
    if (child != 0) {
      ::close(ends[1]);
      job.ranks_.push_back({.pid = child, .reports = ends[0], .unread = {}, .said = {}});
      continue;
    }
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    reports_to = ends[1];
    ::close(ends[0]);
    for (ShortJob::Rank& other : job.ranks_) ::close(other.reports);
    if (std::getenv("FAULT_SHOW") == nullptr) {
      const int nowhere = ::open("/dev/null", O_WRONLY);
      ::dup2(nowhere, STDERR_FILENO);
      ::close(nowhere);
    }
    ::setenv("RANK", std::to_string(rank).c_str(), 1);
    ::setenv("WORLD_SIZE", std::to_string(size).c_str(), 1);
    ::setenv("MASTER_ADDR", "127.0.0.1", 1);
    ::setenv("MASTER_PORT", "1", 1);  // nobody listens there: the store is elsewhere
    ::setenv("TESSERA_STORE", ("127.0.0.1:1=unix:" + folder_ + "/store").c_str(), 1);
    ::setenv("TESSERA_JOB_SECRET", secret_of_jobs().c_str(), 1);
    ::setenv("TORCHELASTIC_RUN_ID", id.c_str(), 1);
    ::setenv("TESSERA_TIMEOUT", "30", 0);
    int code = 1;
    try {
      code = body();
    } catch (...) {
      tell_error();
    }
    ::_exit(code);
  }
  return job;
}

}  // namespace tessera::faults
