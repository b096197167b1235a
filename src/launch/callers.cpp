#include "callers.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <compare>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <utility>

#include "file_descriptor.h"
#include "socket.h"

namespace tessera::launch {
namespace {

// One end of a connection, IPv4 as IPv6 writes it: both tables may have one end each.
struct End {
  std::array<uint8_t, 16> address{};
  uint16_t port = 0;

  auto operator<=>(const End&) const = default;
  std::string host() const {
    SocketAddress form;
    form.storage.ss_family = AF_INET6;
    std::memcpy(&reinterpret_cast<sockaddr_in6&>(form.storage).sin6_addr, address.data(), 16);
    return plain_host(form.host());
  }
  bool is_loopback() const {
    in6_addr form{};
    std::memcpy(&form, address.data(), 16);
    return IN6_IS_ADDR_LOOPBACK(&form) || (IN6_IS_ADDR_V4MAPPED(&form) && address[12] == 127);
  }
};

struct Row {
  End local;
  End remote;
  int state = 0;
  size_t num_unread = 0;  // of a listening socket: how many wait
  uid_t user = 0;
  uint64_t inode = 0;  // 0: no process has it, as of those who wait
};

void map_v4(const uint8_t* bytes, End& end) {
  end.address[10] = end.address[11] = 0xff;
  std::memcpy(&end.address[12], bytes, 4);
}

// `0100007F:A563`: words of this machine's byte order.
bool read_end(const char* text, End& end) {
  const char* colon = std::strchr(text, ':');
  const size_t num_digits = colon == nullptr ? 0 : static_cast<size_t>(colon - text);
  if (num_digits != 8 && num_digits != 32) return false;
  for (size_t i = 0; i < num_digits / 8; ++i) {
    unsigned word = 0;
    if (std::sscanf(text + 8 * i, "%8x", &word) != 1) return false;
    const uint32_t bytes = word;
    if (num_digits == 8) {
      map_v4(reinterpret_cast<const uint8_t*>(&bytes), end);
    } else {
      std::memcpy(&end.address[4 * i], &bytes, 4);
    }
  }
  unsigned port = 0;
  if (std::sscanf(colon, ":%4x", &port) != 1) return false;
  end.port = static_cast<uint16_t>(port);
  return true;
}

bool read_row(const std::string& line, Row& row) {
  char local[64];
  char remote[64];
  unsigned state = 0;
  unsigned long unread = 0;
  unsigned user = 0;
  unsigned long long inode = 0;
  const int found = std::sscanf(line.c_str(), " %*d: %63s %63s %x %*x:%lx %*x:%*x %*x %u %*d %llu",
                                local, remote, &state, &unread, &user, &inode);
  if (found != 6 || !read_end(local, row.local) || !read_end(remote, row.remote)) return false;
  row.state = static_cast<int>(state);
  row.num_unread = unread;
  row.user = user;
  row.inode = inode;
  return true;
}

bool own_end(int listening, SocketAddress& own, End& end) {
  own.length = sizeof(own.storage);
  if (getsockname(listening, reinterpret_cast<sockaddr*>(&own.storage), &own.length) != 0) {
    return false;
  }
  end.port = own.port();
  if (own.storage.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(own.storage);
    map_v4(reinterpret_cast<const uint8_t*>(&v4.sin_addr), end);
  } else {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(own.storage);
    std::memcpy(end.address.data(), &v6.sin6_addr, 16);
  }
  return true;
}

// The rows of one address and port.
struct Table {
  std::optional<Row> listener;
  std::vector<Row> waiting;    // at the listener, and still there
  std::map<End, Row> callers;  // of this host, by their own end
};

// Adds what is in one of the kernel's tables. Those that listen come first, and tell how many wait
// before the others are looked at.
void read_rows(const char* path, const End& own, Table& table) {
  char port[8];
  std::snprintf(port, sizeof(port), ":%04X ", static_cast<unsigned>(own.port));
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    Row row;
    if (line.find(port) == std::string::npos || !read_row(line, row)) continue;
    if (row.remote == own) {
      table.callers.insert_or_assign(row.local, row);
    } else if (row.local == own && row.state == TCP_LISTEN) {
      table.listener = row;
    } else if (row.local == own && row.state == TCP_ESTABLISHED && row.inode == 0) {
      table.waiting.push_back(row);
    }
  }
}

}  // namespace

std::string Caller::text() const {
  return user ? host + " (user " + std::to_string(*user) + ")" : host;
}

std::optional<CallerQueue> callers_at(int listening) {
  SocketAddress address;
  End own;
  if (!own_end(listening, address, own)) return std::nullopt;
  // Both tables only if need be: each costs the kernel some milliseconds on a large machine.
  const char* tables[] = {"/proc/self/net/tcp", "/proc/self/net/tcp6"};
  if (address.storage.ss_family == AF_INET6) std::swap(tables[0], tables[1]);
  Table table;
  read_rows(tables[0], own, table);
  if (!table.listener) return std::nullopt;
  const bool is_complete =
      std::all_of(table.waiting.begin(), table.waiting.end(),
                  [&](const Row& waiting) { return table.callers.contains(waiting.remote); });
  if (!is_complete) read_rows(tables[1], own, table);
  CallerQueue queue{.length = table.listener->num_unread, .callers = {}};
  for (const Row& waiting : table.waiting) {
    const auto caller = table.callers.find(waiting.remote);
    if (caller == table.callers.end()) {
      // Of another host, then, or another network namespace. Programs of this one that have gone
      // this moment are nobody.
      if (waiting.remote.is_loopback() || waiting.remote.address == own.address) continue;
      queue.callers.push_back({waiting.remote.host(), std::nullopt});
    } else if (caller->second.state == TCP_ESTABLISHED && caller->second.inode != 0) {
      // A socket that no process has any more is told as root's.
      queue.callers.push_back({waiting.remote.host(), caller->second.user});
    }
  }
  return queue;
}

void turn_away(int listening, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const FileDescriptor caller(accept4(listening, nullptr, nullptr, SOCK_CLOEXEC));
    if (!caller.is_open()) {
      if (errno == ECONNABORTED || errno == EINTR) continue;
      return;
    }
    // Nothing of it stays in the kernel's tables, which are read anew for the next one.
    const linger at_once{.l_onoff = 1, .l_linger = 0};
    setsockopt(caller.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  }
}

}  // namespace tessera::launch
