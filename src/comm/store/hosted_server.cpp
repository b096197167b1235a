#include "comm/store/hosted_server.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <system_error>
#include <utility>

namespace tessera::comm::store {

HostedServer::HostedServer(int listener, core::Secret secret) {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    const int error = errno;
    ::close(listener);
    throw std::system_error(error, std::generic_category(), "pipe");
  }
  stop_ = Socket(ends[1]);
  ::fcntl(listener, F_SETFL, ::fcntl(listener, F_GETFL) | O_NONBLOCK);
  // Signals are for the program's own threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([listener, secret = std::move(secret), stop = ends[0]] {
    const Socket closes_itself(stop);
    Server(listener, secret).run(stop);
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
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
