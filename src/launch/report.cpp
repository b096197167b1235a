#include <csignal>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <numeric>
#include <tuple>

#include "process.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/failure.h"

namespace tessera::launch {
namespace {

constexpr size_t kMostRows = 16;      // the rest is counted, not listed
constexpr size_t kMostTailLines = 8;  // of a rank the console has not shown

// The first line that is not empty, shortened to `limit` bytes at a character's border.
std::string one_line(const std::string& text, size_t limit) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string::npos) return "";
  std::string line = text.substr(begin, text.find('\n', begin) - begin);
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  if (line.size() <= limit) return line;
  size_t end = limit > 3 ? limit - 3 : 0;
  while (end > 0 && (static_cast<unsigned char>(line[end]) & 0xc0) == 0x80) --end;
  return line.substr(0, end) + "...";
}

std::string clock_time(int64_t ns) {
  const time_t seconds = ns / 1'000'000'000;
  tm parts{};
  localtime_r(&seconds, &parts);
  char text[32];
  const size_t length = std::strftime(text, sizeof(text), "%H:%M:%S", &parts);
  std::snprintf(text + length, sizeof(text) - length, ".%03d",
                static_cast<int>(ns / 1'000'000 % 1000));
  return text;
}

std::string name_of(const RankFailure& failure) {
  if (failure.rank < 0) return "node " + std::to_string(failure.node);
  return "rank " + std::to_string(failure.rank);
}

std::string message_of(const RankFailure& failure) {
  if (!failure.message.empty()) return failure.message;
  if (failure.was_stopped) return "stopped by the launcher";
  return "";
}

std::string place_of(const RankFailure& failure, const ReportContext& context) {
  std::string place = "pid " + std::to_string(failure.pid);
  if (context.num_nodes > 1) {
    place += ", node " + std::to_string(failure.node) + " " + failure.host;
  }
  return place;
}

std::string why_line(const RankFailure& root, const ReportContext& context) {
  if (root.rank < 0) return "its launcher is gone or cannot be reached, and its ranks with it";
  std::string why = name_of(root) + " (" + place_of(root, context) + ") ended with " +
                    how_ended(root) + " at " + clock_time(root.ended_ns);
  if (root.signal_number == SIGKILL && !root.was_stopped) {
    why += context.memory_kill_seen
               ? "; the kernel's out-of-memory killer was at work meanwhile: likely out of memory"
               : "; nobody but a user or the out-of-memory killer sends this signal";
  }
  if (context.max_restarts > 0) {
    why += "; restart " + std::to_string(context.attempt) + " of " +
           std::to_string(context.max_restarts);
  }
  return why;
}

std::string try_line(const RankFailure& root, const ReportContext& context) {
  if (root.rank < 0) return "look at the output of tessera run on that host";
  if (!root.error_file.empty()) return "read " + root.error_file;
  if (root.signal_number == SIGKILL) {
    return "watch memory on this host (dmesg | grep -i oom), use fewer ranks or smaller batches";
  }
  if (root.signal_number == SIGSEGV || root.signal_number == SIGABRT ||
      root.signal_number == SIGBUS || root.signal_number == SIGILL ||
      root.signal_number == SIGFPE) {
    return "run it under a debugger: gdb --args program arguments, or allow core files (ulimit -c)";
  }
  if (!root.tail.empty()) return "see the last lines of its stderr below";
  if (!context.can_keep_output) return "read its output above";
  return "read its output above; --log-dir DIR keeps the output and error of every rank";
}

std::string last_lines(const std::string& text, size_t count) {
  size_t begin = text.size();
  while (begin > 0 && text[begin - 1] == '\n') --begin;
  const size_t end = begin;
  for (size_t lines = 0; begin > 0; --begin) {
    if (text[begin - 1] == '\n' && ++lines == count) break;
  }
  return text.substr(begin, end - begin);
}

std::string table(const std::vector<RankFailure>& failures, const std::vector<size_t>& rows,
                  const ReportContext& context) {
  char line[160];
  std::string text;
  std::snprintf(line, sizeof(line), "  %6s  %8s  %-14s  %-12s  %s\n", "rank", "pid", "ended by",
                "time", "message");
  text += line;
  for (size_t i = 0; i < std::min(rows.size(), kMostRows); ++i) {
    const RankFailure& failure = failures[rows[i]];
    const std::string rank = failure.rank < 0 ? "-" : std::to_string(failure.rank);
    const std::string pid = failure.rank < 0 ? "-" : std::to_string(failure.pid);
    const int length =
        std::snprintf(line, sizeof(line), "  %6s  %8s  %-14s  %-12s  ", rank.c_str(), pid.c_str(),
                      how_ended(failure).c_str(), clock_time(failure.ended_ns).c_str());
    const int room = std::max(context.width - length, 20);
    text += line + one_line(message_of(failure), static_cast<size_t>(room)) + "\n";
  }
  if (rows.size() > kMostRows) {
    text += "  and " + std::to_string(rows.size() - kMostRows) + " more\n";
  }
  return text;
}

}  // namespace

std::string how_ended(const RankFailure& failure) {
  if (failure.rank < 0) return "lost";
  // The launcher's signal met it on its way out, after it had told its error.
  if (failure.was_stopped && failure.has_error_file) {
    return "exit code " + std::to_string(exit_code_of(failure));
  }
  if (failure.signal_number != 0) return signal_name(failure.signal_number);
  return "exit code " + std::to_string(failure.exit_code);
}

std::string format_report(const std::vector<RankFailure>& failures, const ReportContext& context) {
  const size_t first = root_cause(failures);
  const RankFailure& root = failures[first];
  std::string what = one_line(message_of(root), 400);
  // The same mistake on all ranks: often one of them says it for all.
  for (const RankFailure& other : failures) {
    if (!what.empty()) break;
    const bool is_alike = other.signal_number == 0 && other.exit_code == root.exit_code;
    if (root.signal_number == 0 && is_alike && !other.is_secondary) {
      what = one_line(other.message, 400);
    }
  }
  if (what.empty()) what = how_ended(root);
  const char* red = context.use_color ? "\x1b[1;31m" : "";
  const char* plain = context.use_color ? "\x1b[0m" : "";
  std::string text = std::string(red) + "error:" + plain + " " + name_of(root) +
                     " failed first: " + what + "\n  why: " + why_line(root, context) +
                     "\n  try: " + try_line(root, context) + "\n";
  if (!root.tail.empty()) {
    text += "  stderr of " + name_of(root) + " ends with:\n";
    const std::string tail = last_lines(root.tail, kMostTailLines);
    for (size_t begin = 0; begin < tail.size();) {
      const size_t end = std::min(tail.find('\n', begin), tail.size());
      text += "    | " + tail.substr(begin, end - begin) + "\n";
      begin = end + 1;
    }
  }
  if (context.world_size == 1) return text;
  std::vector<size_t> rows(failures.size());
  std::iota(rows.begin(), rows.end(), size_t{0});
  std::sort(rows.begin(), rows.end(), [&](size_t a, size_t b) {
    return std::tuple(a != first, failures[a].ended_ns, a) <
           std::tuple(b != first, failures[b].ended_ns, b);
  });
  return text + table(failures, rows, context);
}

}  // namespace tessera::launch
