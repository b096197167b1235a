// launch/callers.h — who waits at a TCP port, seen before anybody is taken.
//
// A socket that waits to be accepted says nothing of the process at its other end. The kernel's
// tables of connections do: a program of this host has a row of its own there, with its user.

#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

namespace tessera::launch {

/// Somebody who has connected, has not been taken, and is still there.
struct Caller {
  std::string host;  // numeric, an IPv4 address in its own form
  std::optional<uid_t>
      user;  // of a program in this network namespace, as this process counts users

  /// `10.0.0.7`, or `127.0.0.1 (user 65534)`.
  std::string text() const;
};

struct CallerQueue {
  std::size_t length = 0;  // who left again included; the callers have come up to a moment later
  std::vector<Caller> callers;
};

/// Who waits at a listening TCP socket. None if the kernel does not show its tables, as where /proc
/// is restricted, or shows those of another network.
std::optional<CallerQueue> callers_at(int listening);

/// Takes at most `count` of those who wait, oldest first, and resets their connections.
void turn_away(int listening, std::size_t count);

}  // namespace tessera::launch
