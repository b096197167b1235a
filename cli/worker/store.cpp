// tessera-worker store — serves a job's key-value store on a socket the launcher has bound.

#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <exception>
#include <string>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "worker_verb.h"

namespace tessera::cli {
namespace {

constexpr int kBadWords = 2;
constexpr int kUnavailable = 69;  // something is lacking that strangers may have taken
constexpr int kUnusable = 70;

struct StoreWords {
  int fd = -1;
  std::string host;
};

bool read_words(const std::vector<std::string>& words, StoreWords& store) {
  for (size_t i = 0; i + 1 < words.size(); i += 2) {
    const std::string& value = words[i + 1];
    if (words[i] == "--fd") {
      std::from_chars(value.data(), value.data() + value.size(), store.fd);
    } else if (words[i] == "--host") {
      store.host = value;
    } else {
      return false;
    }
  }
  return words.size() == 4 && store.fd >= 0 && !store.host.empty();
}

uint16_t port_of(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

// The launcher holds the other end of stdin for as long as the store is wanted.
void wait_for_end_of_input() {
  char byte = 0;
  while (true) {
    const ssize_t size = read(STDIN_FILENO, &byte, 1);
    if (size == 0 || (size < 0 && errno != EINTR)) return;
  }
}

int serve_store(const std::vector<std::string>& words) {
  StoreWords given;
  if (!read_words(words, given)) {
    std::fputs("error: store: needs --fd NUMBER --host ADDRESS; it is started by tessera run\n",
               stderr);
    return kBadWords;
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const uint16_t port = port_of(given.fd);
  if (port == 0) {
    std::fprintf(stderr, "error: store: file %d is not a listening socket\n", given.fd);
    return kBadWords;
  }
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = true;
  options.waitWorkers = false;
  options.useLibUV = true;  // the other backend is stopped by one malformed packet
  options.masterListenFd = given.fd;
  try {
    const c10d::TCPStore store(given.host, options);
    if (!store.isLibUvBackend()) {
      std::fputs("error: store: this LibTorch has no libuv store, and no other is safe\n", stderr);
      return kUnusable;
    }
    wait_for_end_of_input();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    std::fprintf(stderr, "error: store: %s\n", text.substr(0, text.find('\n')).c_str());
    return kUnavailable;
  }
  // Clients may still be connected; there is nothing to save, so no orderly end is awaited.
  _exit(0);
}

}  // namespace

const WorkerVerb kStoreVerb{"store", serve_store};

}  // namespace tessera::cli
