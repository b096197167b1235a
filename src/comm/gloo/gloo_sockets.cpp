#include "comm/gloo/gloo_sockets.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <charconv>
#include <filesystem>
#include <sstream>
#include <system_error>
#include <vector>

#include "core/own_files.h"

namespace tessera::comm {
namespace {

struct OpenSocket {
  int descriptor = -1;
  std::uint64_t number = 0;  // in the kernel's books
};

std::vector<OpenSocket> open_sockets() {
  std::vector<OpenSocket> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const std::string name = entry.path().filename().string();
    int descriptor = -1;
    std::from_chars(name.data(), name.data() + name.size(), descriptor);
    struct stat status{};
    if (::fstat(descriptor, &status) == 0 && S_ISSOCK(status.st_mode)) {
      found.push_back({.descriptor = descriptor, .number = status.st_ino});
    }
  }
  return found;
}

struct Place {
  std::string host;
  int port = 0;
};

// Where one end of a TCP socket is; nothing for other sockets.
using NameOf = int (*)(int, sockaddr*, socklen_t*);
Place place_of(int descriptor, NameOf name_of) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  char text[INET6_ADDRSTRLEN] = "";
  if (name_of(descriptor, reinterpret_cast<sockaddr*>(&address), &length) != 0) return {};
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    ::inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
    return {text, ntohs(v4.sin_port)};
  }
  if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    ::inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
    return {text, ntohs(v6.sin6_port)};
  }
  return {};
}

bool has(int descriptor, int option, int value) {
  int found = -1;
  socklen_t length = sizeof(found);
  return ::getsockopt(descriptor, SOL_SOCKET, option, &found, &length) == 0 && found == value;
}

std::string listener_key(int rank) { return "gloo listens/" + std::to_string(rank); }

}  // namespace

GlooSockets::GlooSockets() {
  for (const OpenSocket& socket : open_sockets()) before_.insert(socket.number);
}

void GlooSockets::keep_from_children(c10d::Store& store, int rank, int size,
                                     const std::string& address) const {
  std::vector<int> connections;
  std::set<int> own_ports;
  for (const auto& [descriptor, number] : open_sockets()) {
    if (before_.contains(number) || !has(descriptor, SO_TYPE, SOCK_STREAM)) continue;
    const Place here = place_of(descriptor, ::getsockname);
    if (here.host != address) continue;
    if (has(descriptor, SO_ACCEPTCONN, 1)) {
      own_ports.insert(here.port);
      core::keep_from_children(descriptor);
    } else {
      connections.push_back(descriptor);
    }
  }
  std::ostringstream said;
  for (const int port : own_ports) said << address << ' ' << port << ' ';
  store.set(listener_key(rank), said.str());
  std::vector<std::string> keys;
  for (int peer = 0; peer < size; ++peer) keys.push_back(listener_key(peer));
  std::set<std::pair<std::string, int>> listeners;
  for (const auto& bytes : store.multiGet(keys)) {
    std::istringstream text(std::string(bytes.begin(), bytes.end()));
    for (Place place; text >> place.host >> place.port;) listeners.emplace(place.host, place.port);
  }
  for (const int descriptor : connections) {
    const Place there = place_of(descriptor, ::getpeername);
    const Place here = place_of(descriptor, ::getsockname);
    if (own_ports.contains(here.port) || listeners.contains({there.host, there.port})) {
      core::keep_from_children(descriptor);
    }
  }
}

}  // namespace tessera::comm
