// tessera/launch/options.h — what a job is: how many ranks, where, running what.
//
// Plain values with defaults. The text forms of the command line are parsed here too, so that a
// program that starts jobs by itself accepts the same words as `tessera run`.

#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::launch {

/// A host (name or address) and a port, as written on the command line.
struct Endpoint {
  std::string host;
  uint16_t port = 0;

  /// Returns `host:port`, with brackets around an IPv6 address.
  std::string text() const;
};

/// Which of the two output streams of each rank a rule covers: bit 0 is stdout, bit 1 is stderr.
struct StreamRule {
  int for_all = 0;
  std::map<int, int> for_local_rank;

  int of(int local_rank) const;
  bool is_empty() const;
};

/// One job on this host, and its place among the other hosts.
struct RunOptions {
  int num_local_ranks = 1;
  /// The first rank of a host gets this program's standard input though there are several; one rank
  /// alone always does. A terminal is never passed on.
  bool passes_stdin = false;
  int num_nodes = 1;
  int node_rank = 0;

  // One host: where the store listens (default 127.0.0.1, a free port). Several hosts: where the
  // launcher of node 0 listens and the others knock.
  std::optional<Endpoint> endpoint;
  std::string rendezvous_id;  // hosts with different ids refuse each other
  std::chrono::milliseconds rendezvous_timeout{600'000};

  // What the hosts prove to each other: a file of mode 0600, the same everywhere. Empty: that of
  // TESSERA_JOB_SECRET_FILE, or TESSERA_JOB_SECRET itself; on one host a new one otherwise.
  std::string secret_file;
  bool goes_without_secret = false;  // anyone who reaches the endpoint may join

  int max_restarts = 0;
  std::string role = "default";

  std::string log_dir;                 // empty: no files
  StreamRule tee;                      // to the console and to a file
  StreamRule redirects;                // to a file only
  std::vector<int> shown_local_ranks;  // whose output reaches the console; empty: all
  bool prefix_lines = true;
  bool can_keep_output = true;  // the command line knows --log-dir, so that reports may name it

  std::chrono::milliseconds shutdown_timeout{10'000};  // from SIGTERM to SIGKILL
  // How long the other ranks may end by themselves after a failure, before SIGTERM. Unset: 30 ms
  // when the ranks use the store, because they then report what they saw; else 0.
  std::optional<std::chrono::milliseconds> failure_grace;

  bool json_report = false;  // the failure report as one JSON line instead of a table

  std::vector<std::string> command;  // program and arguments
  bool is_module = false;            // command[0] is a Python module name
  bool use_python = true;            // a program named *.py is given to Python
};

/// Parses `0..3`, or `rank:0..3` pairs separated by commas. Throws std::invalid_argument.
StreamRule parse_stream_rule(std::string_view text);

/// Parses `host:port` or `[address]:port`; `default_port` stands in for a missing port. Throws
/// std::invalid_argument.
Endpoint parse_endpoint(std::string_view text, std::optional<uint16_t> default_port = {});

/// Parses numbers separated by commas. Throws std::invalid_argument.
std::vector<int> parse_rank_list(std::string_view text);

/// Parses a rank count: a positive number, `cpu`, `gpu`, or `auto` (GPUs if there are any, else
/// CPUs this process may use). Throws std::invalid_argument.
int parse_rank_count(std::string_view text);

/// Parses seconds, with a fraction if wished. Throws std::invalid_argument.
std::chrono::milliseconds parse_seconds(std::string_view text);

/// Parses a whole number in [low, high]. Throws std::invalid_argument.
int parse_integer(std::string_view text, int low, int high);

}  // namespace tessera::launch
