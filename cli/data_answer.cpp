#include "data_answer.h"

#include <algorithm>
#include <cstdio>

#include "tessera/launch/exit_code.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const DataAnswer& answer) {
  return {{answer.unit, answer.num_read}, {"samples", answer.num_samples},
          {"bad_lines", answer.num_bad},  {"first_bad", answer.bad_for_machines},
          {"bytes", answer.num_bytes},    {"seconds", answer.seconds}};
}

void say_bad_lines(const DataAnswer& answer) {
  if (answer.num_bad == 0) return;
  std::printf("left out %lld bad lines\n", static_cast<long long>(answer.num_bad));
  for (const std::string& one : answer.first_bad) std::printf("  %s\n", one.c_str());
  const auto others = answer.num_bad - static_cast<std::int64_t>(answer.first_bad.size());
  if (others > 0) std::printf("  and %lld more\n", static_cast<long long>(others));
}

}  // namespace

void print(const Json& answer) {
  std::printf("%s\n", answer.dump(2, ' ', false, Json::error_handler_t::replace).c_str());
}

int say_converted(const DataAnswer& answer, const std::string& to, bool wants_json) {
  if (wants_json) {
    Json all = {{"path", to}};
    all.update(json_of(answer));
    print(all);
    return launch::kExitOk;
  }
  const double megabytes = static_cast<double>(answer.num_bytes) / 1e6;
  std::printf("wrote %lld samples to %s: %.1f MB in %.2f s, %.0f MB/s\n",
              static_cast<long long>(answer.num_samples), to.c_str(), megabytes, answer.seconds,
              megabytes / std::max(answer.seconds, 1e-9));
  say_bad_lines(answer);
  return launch::kExitOk;
}

int say_checked(const DataAnswer& answer, const std::string& path, bool wants_json) {
  const bool is_good = answer.num_bad == 0 && answer.num_samples > 0;
  if (wants_json) {
    Json all = {{"path", path}, {"good", is_good}};
    all.update(json_of(answer));
    print(all);
  } else {
    std::printf("%s %lld %s, %lld samples\n", is_good ? "good    " : "damaged ",
                static_cast<long long>(answer.num_read), answer.unit,
                static_cast<long long>(answer.num_samples));
    say_bad_lines(answer);
  }
  return is_good ? launch::kExitOk : launch::kExitData;
}

}  // namespace tessera::cli
