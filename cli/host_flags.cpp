#include "host_flags.h"

#include <algorithm>

namespace tessera::cli {
namespace {

struct ValueFlag {
  const char* name;
  std::string HostWords::* word;
};
constexpr ValueFlag kValueFlags[] = {{"--nnodes", &HostWords::num_nodes},
                                     {"--node-rank", &HostWords::node_rank},
                                     {"--rdzv-endpoint", &HostWords::endpoint},
                                     {"--master-addr", &HostWords::master_address},
                                     {"--master-port", &HostWords::master_port},
                                     {"--rdzv-id", &HostWords::rendezvous_id},
                                     {"--secret-file", &HostWords::secret_file},
                                     {"--rdzv-timeout", &HostWords::rendezvous_timeout},
                                     {"--rdzv-backend", &HostWords::rendezvous_backend},
                                     {"--rdzv-conf", &HostWords::rendezvous_conf}};

// torchrun writes MIN:MAX for a changing number of hosts, which tessera run does not offer.
std::string fixed_node_count(const std::string& text) {
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return text;
  if (text.substr(0, colon) == text.substr(colon + 1)) return text.substr(0, colon);
  throw std::invalid_argument("the number of hosts is fixed; write one number, not " + text);
}

void read_rendezvous_conf(const std::string& text, launch::RunOptions& options) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string entry = text.substr(begin, end - begin);
    const std::string key = entry.substr(0, entry.find('='));
    if ((key != "timeout" && key != "join_timeout") || entry.size() <= key.size()) {
      throw std::invalid_argument("'" + entry + "' is not timeout=SECONDS or join_timeout=SECONDS");
    }
    options.rendezvous_timeout = launch::parse_seconds(entry.substr(key.size() + 1));
    begin = end + 1;
  }
}

std::string checked_id(const std::string& text) {
  constexpr char kAllowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  if (text.find_first_not_of(kAllowed) == std::string::npos && !text.starts_with('.') &&
      text.size() <= 128) {
    return text;
  }
  throw std::invalid_argument("'" + text + "' may hold letters, digits, '.', '_' and '-' only");
}

}  // namespace

void define_host_flags(CLI::App& app, HostWords& words) {
  for (const ValueFlag& flag : kValueFlags) {
    app.add_option(flag.name, words.*(flag.word))->capture_default_str()->take_last();
  }
  app.add_flag("--standalone", words.is_standalone);
  app.add_flag("--insecure-no-auth", words.goes_without_secret);
}

std::vector<std::string> run_words(const HostWords& words) {
  std::vector<std::string> list;
  for (const ValueFlag& flag : kValueFlags) {
    const std::string& word = words.*(flag.word);
    if (!word.empty()) list.insert(list.end(), {flag.name, word});
  }
  if (words.is_standalone) list.emplace_back("--standalone");
  if (words.goes_without_secret) list.emplace_back("--insecure-no-auth");
  return list;
}

void read_hosts(const std::string& verb, const HostWords& words, launch::RunOptions& options) {
  const auto parsed = [&](const char* flag, const auto& parse) {
    return parsed_value(verb, flag, parse);
  };
  options.num_nodes = parsed("--nnodes", [&] {
    return launch::parse_integer(fixed_node_count(words.num_nodes), 1, 4096);
  });
  options.node_rank =
      parsed("--node-rank", [&] { return launch::parse_integer(words.node_rank, 0, 1 << 20); });
  if (options.node_rank >= options.num_nodes) {
    throw UsageError(verb + ": --node-rank: " + words.node_rank + " is not one of the " +
                     std::to_string(options.num_nodes) + " hosts; they are counted from 0 to " +
                     std::to_string(options.num_nodes - 1));
  }
  if (!words.endpoint.empty()) {
    options.endpoint =
        parsed("--rdzv-endpoint", [&] { return launch::parse_endpoint(words.endpoint); });
  } else if (!words.master_address.empty() || !words.master_port.empty()) {
    options.endpoint = launch::Endpoint{
        words.master_address.empty() ? "127.0.0.1" : words.master_address,
        words.master_port.empty() ? uint16_t{29500} : parsed("--master-port", [&] {
          return static_cast<uint16_t>(launch::parse_integer(words.master_port, 0, 65535));
        })};
  }
  if (options.num_nodes > 1) {
    if (words.is_standalone) {
      throw UsageError(verb + ": --standalone means one host, not --nnodes " + words.num_nodes);
    }
    if (!options.endpoint || options.endpoint->port == 0) {
      throw UsageError(verb + ": --nnodes " + words.num_nodes +
                       " needs --rdzv-endpoint HOST:PORT, the same on every host");
    }
  }
  if (words.rendezvous_backend != "c10d" && words.rendezvous_backend != "static") {
    throw UsageError(verb + ": --rdzv-backend: '" + words.rendezvous_backend +
                     "' is not offered; leave the flag out");
  }
  if (words.goes_without_secret && !words.secret_file.empty()) {
    throw UsageError(verb + ": --insecure-no-auth and --secret-file exclude each other");
  }
  options.secret_file = words.secret_file;
  options.goes_without_secret = words.goes_without_secret;
  options.rendezvous_id = parsed("--rdzv-id", [&] { return checked_id(words.rendezvous_id); });
  options.rendezvous_timeout =
      parsed("--rdzv-timeout", [&] { return launch::parse_seconds(words.rendezvous_timeout); });
  parsed("--rdzv-conf", [&] {
    read_rendezvous_conf(words.rendezvous_conf, options);
    return 0;
  });
}

HostWords take_host_flags(const std::string& verb, std::vector<std::string>& words) {
  HostWords hosts;
  CLI::App app("", verb);
  app.set_help_flag();
  define_host_flags(app, hosts);
  std::vector<std::string> taken;
  std::vector<std::string> left;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string name = words[i].substr(0, words[i].find('='));
    const CLI::Option* flag = name.starts_with("--") ? app.get_option_no_throw(name) : nullptr;
    (flag != nullptr ? taken : left).push_back(words[i]);
    const bool has_value = flag != nullptr && flag->get_items_expected_max() > 0;
    if (has_value && name.size() == words[i].size() && i + 1 < words.size()) {
      taken.push_back(words[++i]);
    }
  }
  read_flags(app, taken);
  words = std::move(left);
  return hosts;
}

}  // namespace tessera::cli
