// tessera serve — answers HTTP requests with a package.

#include <sys/stat.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <system_error>

#include <nlohmann/json.hpp>

#include "flags.h"
#include "tessera/checkpoint/error.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "tessera/serving/model.h"
#include "tessera/serving/server.h"
#include "usage.h"
#include "verb.h"

namespace tessera::cli {
namespace {

using launch::LaunchError;

constexpr std::string_view kHelp = R"(tessera serve PKG [flags]

  tessera serve pkg                                   on 127.0.0.1:8000, this machine only
  tessera serve pkg --watch published                 take over what a training publishes
  tessera serve pkg --listen 10.0.0.5 --token-file token --tls-cert cert.pem --tls-key key.pem

Answers the Open Inference Protocol, version 2, with a package of tessera export: health,
metadata, POST /v2/models/dlrm/infer in JSON or binary, and /metrics. The admin port has a page with
live figures. SIGTERM finishes what was accepted and ends with 0; SIGHUP opens the package again.

  --listen HOST             address (127.0.0.1), or unix:PATH; one that other machines reach needs
                            a token and TLS, or --insecure
  --port N --admin-port N   8000, 8001 on 127.0.0.1; 0: a free one; admin -1: none
  --token-file FILE         who sends another Authorization: Bearer is sent away; mode 0600
  --tls-cert F --tls-key F  certificates and key, PEM: TLS 1.2 or later
  --tls-client-ca FILE      only clients with a certificate of this authority
  --insecure                no TLS or no token, and other machines reach the port all the same
  --watch DIR               take over checkpoints that are published there
  --keep-versions N         earlier versions to go back to (2)
  --canary FILE             requests, one JSON a line, that a new version must answer with finite
  --canary-bound X          numbers, moved by no more than this (1)
  --processes N             that answer, over one copy of the tables (1)
  --unknown W               ids without a row, in tables that grow: default, as in training, or
                            zero
  --verify, --no-verify     compare all sums of the package first, or not at all; otherwise while
                            it serves, and one that is wrong ends the answers with 503
  --warm-bytes N            of tables that are read into memory before it is ready (1073741824)
  --threads N --workers N   for connections (1), to compute (1)
  --max-batch N             samples that are computed together (256)
  --batch-wait US           microseconds for the first to be joined; 0: those that wait (0)
  --latency-budget MS       a request without Request-Timeout-Ms has so long (20)
  --queue N                 samples that may wait (65536)
  --max-body BYTES --max-header BYTES   of a request (16777216, 16384)
  --max-samples N --max-ids N --max-ids-per-sample N   in one (65536, 1048576, 100000)
  --max-connections N       at a time (1024)
  --header-timeout MS --idle-timeout MS --request-timeout MS   to send headers (5000), between
                            requests (60000), to send a body or take an answer (30000)
  --drain-timeout MS        after SIGTERM (10000)
  --json                    one JSON line when ready

Exit codes: 0 drained, 2 wrong usage, 65 the package cannot be used, 69 the port is taken, 70
processes die as soon as they start, or a request was lost, 75 not drained in time, 78 refused to
listen so, or with these files. More: docs/serving.md
)";

struct ServeWords {
  serving::ServerOptions options;
  std::string token_file;
  int keep_versions = 2;
  std::int64_t batch_wait = 0;
  std::int64_t latency_budget = 20;
  std::string unknown = "default";
  std::int64_t drain_timeout = 10'000;
  std::int64_t header_time = 5'000;
  std::int64_t idle_time = 60'000;
  std::int64_t request_time = 30'000;
  bool is_insecure = false;
  bool verifies = false;
  bool verifies_never = false;
  bool wants_json = false;
  bool wants_help = false;
};

void define_flags(CLI::App& app, ServeWords& words) {
  serving::ServerOptions& options = words.options;
  app.set_help_flag();
  app.add_option("--listen", options.host);
  app.add_option("--port", options.port)->check(CLI::Range(0, 65535));
  app.add_option("--admin-port", options.admin_port)->check(CLI::Range(-1, 65535));
  app.add_option("--token-file", words.token_file);
  app.add_option("--tls-cert", options.tls.certificate);
  app.add_option("--tls-key", options.tls.key);
  app.add_option("--tls-client-ca", options.tls.client_authority);
  app.add_flag("--insecure", words.is_insecure);
  app.add_option("--watch", options.watched);
  app.add_option("--keep-versions", words.keep_versions)->check(CLI::Range(1, 64));
  app.add_option("--canary", options.canary);
  app.add_option("--canary-bound", options.canary_bound)->check(CLI::NonNegativeNumber);
  app.add_option("--processes", options.processes)->check(CLI::Range(1, 30));
  app.add_option("--unknown", words.unknown)->check(CLI::IsMember({"default", "zero"}));
  app.add_flag("--verify", words.verifies);
  app.add_flag("--no-verify", words.verifies_never)->excludes("--verify");
  app.add_option("--warm-bytes", options.warm_bytes)->check(CLI::NonNegativeNumber);
  app.add_option("--threads", options.io_threads)->check(CLI::Range(1, 256));
  app.add_option("--workers", options.workers)->check(CLI::Range(1, 256));
  app.add_option("--max-batch", options.max_batch)->check(CLI::Range(1, 1 << 20));
  app.add_option("--batch-wait", words.batch_wait)->check(CLI::Range(0, 1'000'000));
  app.add_option("--latency-budget", words.latency_budget)->check(CLI::Range(1, 3'600'000));
  app.add_option("--queue", options.queue_samples)->check(CLI::Range(1, 1 << 30));
  app.add_option("--max-body", options.limits.body_bytes)->check(CLI::Range(1, 1 << 30));
  app.add_option("--max-header", options.limits.header_bytes)->check(CLI::Range(256, 1 << 24));
  app.add_option("--max-connections", options.limits.connections)->check(CLI::Range(1, 1 << 20));
  app.add_option("--max-ids", options.limits.ids_per_request)->check(CLI::Range(1, 1 << 30));
  app.add_option("--max-ids-per-sample", options.limits.ids_per_sample)
      ->check(CLI::Range(1, 1 << 30));
  app.add_option("--max-samples", options.limits.samples_per_request)
      ->check(CLI::Range(1, 1 << 24));
  app.add_option("--header-timeout", words.header_time)->check(CLI::Range(1, 3'600'000));
  app.add_option("--idle-timeout", words.idle_time)->check(CLI::Range(1, 3'600'000));
  app.add_option("--request-timeout", words.request_time)->check(CLI::Range(1, 3'600'000));
  app.add_option("--drain-timeout", words.drain_timeout)->check(CLI::Range(1, 3'600'000));
  app.add_flag("--json", words.wants_json);
  app.add_flag("--help,-h", words.wants_help);
}

std::string read_token(const std::string& path) {
  struct stat facts{};
  if (::stat(path.c_str(), &facts) != 0) {
    throw LaunchError(launch::kExitConfiguration, "serve: there is no file " + path,
                      "--token-file names it", "write the token into it: one line, mode 0600");
  }
  if ((facts.st_mode & 077) != 0) {
    throw LaunchError(launch::kExitConfiguration, "serve: others may read " + path,
                      "its mode gives the token away", "chmod 600 " + path);
  }
  std::ifstream file(path);
  std::string token;
  std::getline(file, token);
  while (!token.empty() && (token.back() == '\r' || token.back() == ' ')) token.pop_back();
  if (token.size() < 16) {
    throw LaunchError(launch::kExitConfiguration, "serve: the token of " + path + " is too short",
                      "it has " + std::to_string(token.size()) + " characters, 16 are the least",
                      "openssl rand -hex 32 > " + path);
  }
  return token;
}

// Who listens to other machines says so: without TLS, tokens and answers can be read on the way.
void check_doors(const ServeWords& words) {
  const serving::ServerOptions& options = words.options;
  const std::string& host = options.host;
  const bool has_tls = !options.tls.certificate.empty();
  if (has_tls != !options.tls.key.empty()) {
    throw UsageError("serve: --tls-cert and --tls-key go together");
  }
  if (!has_tls && !options.tls.client_authority.empty()) {
    throw UsageError("serve: --tls-client-ca needs --tls-cert and --tls-key");
  }
  if (has_tls && !serving::has_tls()) {
    throw LaunchError(launch::kExitConfiguration, "serve: this build speaks no TLS",
                      "OpenSSL was missing when it was built", "install libssl-dev, build again");
  }
  if (host.starts_with("127.") || host == "::1" || host.starts_with("unix:")) return;
  if (words.is_insecure || (has_tls && !options.token.empty())) return;
  throw LaunchError(
      launch::kExitConfiguration, "serve: --listen " + host + " lets other machines in",
      std::string("there is no ") + (options.token.empty() ? "--token-file" : "") +
          (options.token.empty() && !has_tls ? ", and no " : "") + (has_tls ? "" : "--tls-cert"),
      "add what is missing, listen on 127.0.0.1, or say --insecure");
}

void log_line(const std::string& line) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  std::fprintf(stderr, "serve: %s\n", line.c_str());
}

int run_server(const std::string& package, ServeWords& words) {
  serving::ServerOptions& options = words.options;
  using std::chrono::milliseconds;
  options.package = package;
  options.batch_wait = std::chrono::microseconds(words.batch_wait);
  options.latency_budget = milliseconds(words.latency_budget);
  options.drain_time = milliseconds(words.drain_timeout);
  options.limits.header_time = milliseconds(words.header_time);
  options.limits.idle_time = milliseconds(words.idle_time);
  options.limits.request_time = milliseconds(words.request_time);
  if (!words.token_file.empty()) options.token = read_token(words.token_file);
  check_doors(words);
  if (!options.canary.empty() && options.watched.empty()) {
    throw UsageError("serve: --canary judges what --watch brings; name a folder with it");
  }
  options.verifies_later = !words.verifies && !words.verifies_never;
  options.model = {.verifies = words.verifies,
                   .keep_versions = words.keep_versions,
                   .unknown = words.unknown == "zero" ? serving::UnknownIds::kZero
                                                      : serving::UnknownIds::kDefault};
  serving::Model model(package, options.model);
  const auto ready = [&](const serving::ServerPorts& ports) {
    auto lease = model.lease();
    const serving::ModelInfo& info = lease.model();
    const std::string scheme = options.tls.certificate.empty() ? "http://" : "https://";
    const std::string address = ports.data == 0 ? options.host
                                                : scheme +
                                                      (options.host.find(':') == std::string::npos
                                                           ? options.host
                                                           : "[" + options.host + "]") +
                                                      ":" + std::to_string(ports.data);
    if (words.wants_json) {
      const nlohmann::ordered_json line = {
          {"address", address},        {"port", ports.data},
          {"admin_port", ports.admin}, {"processes", options.processes},
          {"model", info.name},        {"version", info.step}};
      std::printf("%s\n", line.dump().c_str());
    } else {
      std::printf("model    %s, step %lld, %zu features, %zu tables\nserving  %s/v2/models/%s\n",
                  info.name.c_str(), static_cast<long long>(info.step), info.features.size(),
                  info.tables.size(), address.c_str(), info.name.c_str());
      if (!options.watched.empty()) std::printf("updates  %s\n", options.watched.c_str());
      if (ports.admin > 0) std::printf("admin    http://127.0.0.1:%d\n", ports.admin);
    }
    std::fflush(stdout);
  };
  return serving::serve(model, options, ready, log_line);
}

int run(const std::vector<std::string>& words) {
  CLI::App app("", "serve");
  ServeWords given;
  define_flags(app, given);
  const auto [names, flags] = names_and_flags(app, words);
  read_flags(app, flags);
  if (given.wants_help) return print_help(kHelp);
  if (names.size() != 1) throw UsageError("serve: name one package, as in tessera serve pkg");
  try {
    return run_server(names[0], given);
  } catch (const checkpoint::Error& error) {
    throw LaunchError(launch::kExitData, "serve: " + names[0], error.what(),
                      "make a package with tessera export RUN --out PKG");
  } catch (const std::invalid_argument& error) {
    throw LaunchError(launch::kExitConfiguration, "serve: cannot start", error.what(),
                      "name files of this server: PEM for TLS, requests for --canary");
  } catch (const std::system_error& error) {
    throw LaunchError(launch::kExitRendezvous, "serve: cannot listen", error.what(),
                      "name another --port, or 0 for a free one");
  }
}

std::vector<std::string> flags() {
  CLI::App app("", "serve");
  ServeWords words;
  define_flags(app, words);
  return long_flags(app);
}

}  // namespace

const Verb kServeVerb{"serve", "answer HTTP requests with a package", kHelp, run, flags};

}  // namespace tessera::cli
