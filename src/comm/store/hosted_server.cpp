#include "comm/store/hosted_server.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <string>
#include <utility>

#include "comm/start_thread.h"

namespace tessera::comm::store {
namespace {

// Signals are for the program's own threads: one that starts meanwhile gets none.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

HostedServer::HostedServer(int listener, core::Secret secret) {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    const int error = errno;
    ::close(listener);
    throw Error(ErrorKind::kUnavailable, {},
                std::string("comm.init: this rank cannot host the store of the job: ") +
                    std::strerror(error) +
                    ". If too many files are open, raise the limit: ulimit -n 65536.");
  }
  stop_ = Socket(ends[1]);
  ::fcntl(listener, F_SETFL, ::fcntl(listener, F_GETFL) | O_NONBLOCK);
  const NoSignals guard;
  try {
    thread_ = start_thread("comm.init", [listener, secret = std::move(secret), stop = ends[0]] {
      const Socket closes_itself(stop);
      Server(listener, secret).run(stop);
    });
  } catch (const Error&) {
    ::close(listener);
    ::close(ends[0]);
    throw;
  }
}

HostedServer::~HostedServer() {
  if (maker_ != own_pid()) {
    new std::thread(std::move(thread_));  // never joined
    return;
  }
  // Not by closing: forked children have that end of the pipe too.
  while (::write(stop_.get(), "", 1) < 0 && errno == EINTR) {
  }
  thread_.join();
}

}  // namespace tessera::comm::store
