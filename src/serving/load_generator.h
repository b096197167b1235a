// src/serving/load_generator.h — asks a server at times that do not depend on its answers.
//
// Requests are due at random times (a Poisson process). A request's time counts from when it was
// due, not from when a connection was free for it: a server that stalls is charged for all that was
// due meanwhile. Without a rate, every connection asks again as soon as it has its answer.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::serving {

struct LoadOptions {
  std::string host = "127.0.0.1";
  int port = 8000;
  std::vector<std::string> requests;  // whole HTTP requests, asked in turn
  double rate = 0;                    // a second; 0: as fast as answers come
  double seconds = 10;
  double warmup_seconds = 1;  // asked, but not counted
  int connections = 64;
  std::chrono::milliseconds patience{10'000};  // for what is asked last
  std::uint64_t seed = 1;
  /// Called with every answer, counted or not: which of `requests`, its code (-1: the connection
  /// ended before it), all of it. Nothing more is asked once it has returned false.
  std::function<bool(std::size_t request, int code, std::string_view answer)> on_answer;
};

struct LoadReport {
  double seconds = 0;
  std::uint64_t num_due = 0;         // requests that were to be asked
  std::uint64_t num_unanswered = 0;  // no answer, or a connection that ended before it
  std::map<int, std::uint64_t> codes;
  std::vector<float> times;       // seconds from due to answered, of all answers
  std::vector<float> good_times;  // of those with 200

  double rate_of(int code) const;
  /// The time within which a share of `times` lies; it sorts them.
  static double quantile(std::vector<float>& times, double share);
};

/// Throws std::system_error naming an address that does not answer.
LoadReport generate_load(const LoadOptions& options);

}  // namespace tessera::serving
