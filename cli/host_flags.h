// cli/host_flags.h — flags of verbs that start ranks on several hosts.

#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "flags.h"
#include "tessera/launch/options.h"
#include "usage.h"

namespace tessera::cli {

// The words as given; they get their meaning, and their errors, in `read_hosts`.
struct HostWords {
  std::string num_nodes = "1";
  std::string node_rank = "0";
  std::string endpoint;
  std::string master_address;
  std::string master_port;
  std::string rendezvous_id;
  std::string rendezvous_timeout = "600";
  std::string rendezvous_backend = "c10d";
  std::string rendezvous_conf;
  std::string secret_file;
  bool is_standalone = false;
  bool goes_without_secret = false;
};

void define_host_flags(CLI::App& app, HostWords& words);

/// The flags of `tessera run` that say the same.
std::vector<std::string> run_words(const HostWords& words);

/// Throws UsageError, beginning with `verb`.
void read_hosts(const std::string& verb, const HostWords& words, launch::RunOptions& options);

/// Gives verb and flag to a message about a value.
template <class Parse>
auto parsed_value(const std::string& verb, const char* flag, const Parse& parse) {
  try {
    return parse();
  } catch (const std::invalid_argument& error) {
    throw UsageError(verb + ": " + flag + ": " + error.what());
  }
}

/// Takes the flags of hosts, with their values, out of `words`, which keep their order.
HostWords take_host_flags(const std::string& verb, std::vector<std::string>& words);

}  // namespace tessera::cli
