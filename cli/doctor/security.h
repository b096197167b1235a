// cli/doctor/security.h — who could reach a job on this machine.

#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace tessera::cli {

/// A socket that some process of the self-test job waited on for others.
struct OpenSocket {
  std::string holder;    // launcher, store or rank
  std::string protocol;  // tcp, udp or unix
  std::string address;   // without the port, which changes; a path for unix
  int mode = 0;          // of a Unix socket's file

  /// Whether other hosts could reach it.
  bool is_open_to_hosts() const;
  /// Whether other users of this host could.
  bool is_open_to_users() const;
  /// Whether it has a name that is in no file system.
  bool is_abstract() const;
};

/// An address of this host beside loopback, on which a job over several hosts may meet the others.
struct HostAddress {
  std::string interface;
  std::string address;
  bool is_private = false;  // the internet does not reach it
  bool is_chosen = false;   // by TESSERA_INTERFACE or GLOO_SOCKET_IFNAME
};

struct Security {
  bool job_ran = false;
  std::vector<HostAddress> addresses;
  std::vector<OpenSocket> sockets;  // each kind once
  std::string folder;               // of all launchers of this user
  int folder_mode = 0;
  std::string secret;        // where the secret of a job over several hosts would come from, or ""
  std::string secret_error;  // why it cannot be used
  std::vector<std::string> problems;
};

/// Runs a job of two ranks, on shared memory and on Gloo, and looks at what its processes listen
/// on.
Security examine_security();

std::string as_text(const Security& security);
nlohmann::ordered_json as_json(const Security& security);

}  // namespace tessera::cli
