#include "doctor/report.h"

#include <algorithm>
#include <cstdio>

#include "tessera/core/version.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint64_t kMebi = std::uint64_t{1} << 20;
constexpr std::uint64_t kGibi = std::uint64_t{1} << 30;

template <class... Values>
std::string format(const char* pattern, Values... values) {
  char text[256];
  std::snprintf(text, sizeof(text), pattern, values...);
  return text;
}

std::string program_version() {
  return format("%d.%d.%d", kVersionMajor, kVersionMinor, kVersionPatch);
}

std::string compiler() {
#if defined(__clang__)
  return format("clang %d.%d.%d", __clang_major__, __clang_minor__, __clang_patchlevel__);
#else
  return format("GCC %d.%d.%d", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#endif
}

std::string size_text(std::uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= kGibi) return format("%.1f GiB", value / static_cast<double>(kGibi));
  return format("%.0f MiB", value / static_cast<double>(kMebi));
}

std::string limit_text(const std::optional<std::uint64_t>& limit) {
  return limit ? std::to_string(*limit) : "unlimited";
}

std::string joined(const std::vector<std::string>& words, const char* between) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

std::string speed_text(double bytes_per_second) {
  return format("%.1f GB/s", bytes_per_second / 1e9);
}

std::string time_text(double microseconds) {
  return microseconds < 1000 ? format("%.1f us", microseconds)
                             : format("%.1f ms", microseconds / 1000);
}

const char* state_name(double ping) {
  return ping == 0.0 ? "unknown" : is_far(ping) ? "far" : "near";
}

bool is_loopback_up(const Machine& machine) {
  return std::any_of(machine.interfaces.begin(), machine.interfaces.end(),
                     [](const NetworkInterface& one) {
                       return one.is_up && (one.address == "127.0.0.1" || one.address == "::1");
                     });
}

/// The lines of the text form: a mark, a name, a sentence.
class Lines {
 public:
  Lines(const std::vector<Warning>& warnings, bool use_color)
      : warnings_(warnings), use_color_(use_color) {}

  void title(const char* text) { text_ += std::string(text) + "\n"; }

  void add(const std::string& name, const std::string& sentence) {
    const bool warns = std::any_of(warnings_.begin(), warnings_.end(),
                                   [&](const Warning& one) { return one.about == name; });
    add(warns ? "warn" : "ok", name, sentence);
    for (const Warning& warning : warnings_) {
      if (warning.about != name) continue;
      text_ += format("%25s", "") + warning.text + "; try: " + warning.try_next + "\n";
    }
  }

  void fail(const std::string& name, const std::string& sentence, const std::string& try_next) {
    add("FAIL", name, sentence);
    text_ += format("%25s", "") + "try: " + try_next + "\n";
  }

  std::string text() && { return std::move(text_); }

 private:
  void add(const std::string& mark, const std::string& name, const std::string& sentence) {
    std::string shown = format("%-4s", mark.c_str());
    if (use_color_) {
      const char* color = mark == "ok" ? "32" : mark == "warn" ? "33" : "1;31";
      shown = std::string("\x1b[") + color + "m" + shown + "\x1b[0m";
    }
    text_ += "  " + shown + "  " + format("%-17s", name.c_str()) + sentence + "\n";
  }

  const std::vector<Warning>& warnings_;
  bool use_color_;
  std::string text_;
};

std::string core_text(const Machine& machine) {
  std::string text = std::to_string(machine.online_cores) + " online, " +
                     std::to_string(machine.usable_cores) + " usable";
  if (machine.cgroup_cores) text += format(", control group gives %.1f", *machine.cgroup_cores);
  return text + format(", load %.2f", machine.load);
}

std::string memory_text(const Machine& machine) {
  std::string text =
      size_text(machine.memory_total) + ", " + size_text(machine.memory_available) + " available";
  if (machine.cgroup_memory) text += ", control group gives " + size_text(*machine.cgroup_memory);
  return text;
}

std::string network_text(const Machine& machine) {
  constexpr std::size_t kShown = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(machine.interfaces.size(), kShown); ++i) {
    const NetworkInterface& one = machine.interfaces[i];
    text += (i == 0 ? "" : ", ") + one.name + " " + one.address + (one.is_up ? "" : " (down)");
  }
  if (machine.interfaces.size() > kShown) {
    text += format(" and %zu more", machine.interfaces.size() - kShown);
  }
  return text.empty() ? "none" : text;
}

std::string gpu_text(const Findings& findings) {
  const Machine& machine = findings.machine;
  if (machine.gpus.empty()) return "none";
  return machine.gpus.front() +
         (machine.gpus.size() > 1 ? format(" and %zu more", machine.gpus.size() - 1) : "");
}

void add_machine(const Findings& findings, Lines& lines) {
  const Machine& machine = findings.machine;
  lines.title("machine");
  lines.add("processor", machine.processor);
  lines.add("cores", core_text(machine));
  lines.add("instructions",
            findings.active_isa + " chosen; this CPU has " + joined(findings.available_isas, ", "));
  lines.add("memory", memory_text(machine));
  lines.add("huge pages",
            "transparent: " +
                (machine.transparent_huge_pages.empty() ? std::string("absent")
                                                        : machine.transparent_huge_pages) +
                ", reserved: " + std::to_string(machine.reserved_huge_pages));
  lines.add("gpu", gpu_text(findings));
  lines.add("limits", "open files " + limit_text(machine.open_files) + ", processes " +
                          limit_text(machine.processes) + ", locked memory " +
                          limit_text(machine.locked_memory));
  lines.add("network", network_text(machine));
}

void add_devices(const Json& answer, Lines& lines) {
  if (answer["has_cuda"] != true) {
    lines.add("cuda", "not in this LibTorch");
    return;
  }
  const Json& cuda = answer["cuda"];
  const auto version = [&](const char* key) {
    return cuda[key].is_string() ? cuda[key].get<std::string>() : std::string("unknown");
  };
  lines.add("cuda", "LibTorch is built for " + version("build") + ", the driver takes up to " +
                        version("driver"));
  constexpr std::size_t kShown = 2;
  const auto& devices = cuda["devices"];
  for (std::size_t i = 0; i < devices.size(); ++i) {
    const Json& one = devices[i];
    const std::string name = format("device %zu", i);
    if (one["error"].is_string()) {
      lines.fail(name, one["name"].get<std::string>() + ": " + one["error"].get<std::string>(),
                 "nvidia-smi, and another CUDA_VISIBLE_DEVICES");
    } else if (i < kShown) {
      lines.add(name, one["name"].get<std::string>() + ", " +
                          size_text(one["free_bytes"].get<std::uint64_t>()) + " free of " +
                          size_text(one["total_bytes"].get<std::uint64_t>()) + ", computes");
    } else if (i == kShown) {
      lines.add("more devices", std::to_string(devices.size() - kShown));
    }
  }
}

void add_engines(const Findings& findings, Lines& lines) {
  const Machine& machine = findings.machine;
  const Json& answer = findings.self_test.answer;
  lines.title("engines");
  lines.add("shm", machine.has_shm_directory
                       ? (machine.shm_directory.empty() ? "memory" : machine.shm_directory) + ", " +
                             size_text(machine.shm_free) + " free of " +
                             size_text(machine.shm_total)
                       : machine.shm_directory + " cannot be written");
  if (answer.is_null()) return;
  lines.add("gloo", "in LibTorch");
  add_devices(answer, lines);
  lines.add("nccl", answer["nccl"].is_string() ? answer["nccl"].get<std::string>()
                                               : "not in this LibTorch");
}

void add_self_test(const Findings& findings, Lines& lines) {
  const SelfTest& test = findings.self_test;
  lines.title("self-test, two ranks");
  if (test.answer.is_null()) {
    lines.fail("start", test.error, test.try_next);
    return;
  }
  for (const char* engine : {"shm", "gloo"}) {
    std::vector<std::string> passed;
    bool all_passed = true;
    for (const Json& check : test.answer["checks"]) {
      if (check["engine"] != engine) continue;
      if (check["passed"] == true) {
        passed.push_back(check["operator"].get<std::string>());
      } else {
        all_passed = false;
      }
    }
    if (all_passed) {
      lines.add(std::string(engine) + " values", joined(passed, ", "));
    } else {
      lines.fail(std::string(engine) + " values", test.error, test.try_next);
    }
  }
}

void add_measured(const Findings& findings, Lines& lines) {
  lines.title("measured");
  lines.add("memory read", speed_text(findings.one_thread.read) + " with 1 thread, " +
                               speed_text(findings.all_threads.read) +
                               format(" with %d", findings.num_threads));
  lines.add("memory copy", speed_text(findings.one_thread.copy) + " with 1 thread, " +
                               speed_text(findings.all_threads.copy) +
                               format(" with %d (read + write)", findings.num_threads));
  lines.add("core to core",
            findings.ping_nanoseconds == 0.0
                ? std::string("one core only")
                : format("%.0f ns, %s", findings.ping_nanoseconds,
                         is_far(findings.ping_nanoseconds) ? "far: no shared cache"
                                                           : "near: a shared cache"));
  if (findings.self_test.answer.is_null()) return;
  for (const auto& [engine, times] : findings.self_test.answer["all_reduce_us"].items()) {
    const double large = times["25MB"].get<double>();
    lines.add(engine + " all-reduce", time_text(times["4KB"].get<double>()) + " for 4 KB, " +
                                          time_text(large) + " for 25 MB" +
                                          format(" (%.1f GB/s)", 25e6 / large / 1e3));
  }
}

Json limit_json(const std::optional<std::uint64_t>& limit) {
  return limit ? Json(*limit) : Json(nullptr);
}

Json machine_json(const Machine& machine) {
  Json interfaces = Json::array();
  for (const NetworkInterface& one : machine.interfaces) {
    interfaces.push_back({{"name", one.name}, {"address", one.address}, {"up", one.is_up}});
  }
  return {
      {"processor", machine.processor},
      {"cores",
       {{"online", machine.online_cores},
        {"usable", machine.usable_cores},
        {"cgroup", machine.cgroup_cores ? Json(*machine.cgroup_cores) : Json(nullptr)},
        {"load", machine.load}}},
      {"memory",
       {{"total_bytes", machine.memory_total},
        {"available_bytes", machine.memory_available},
        {"cgroup_bytes", limit_json(machine.cgroup_memory)}}},
      {"huge_pages",
       {{"transparent", machine.transparent_huge_pages},
        {"reserved", machine.reserved_huge_pages}}},
      {"gpus", machine.gpus},
      {"limits",
       {{"open_files", limit_json(machine.open_files)},
        {"processes", limit_json(machine.processes)},
        {"locked_memory_bytes", limit_json(machine.locked_memory)}}},
      {"network", std::move(interfaces)},
  };
}

Json engines_json(const Findings& findings) {
  const Machine& machine = findings.machine;
  const Json& answer = findings.self_test.answer;
  const bool is_known = !answer.is_null();
  const auto told = [&](const char* key) { return is_known ? answer[key] : Json(nullptr); };
  return {
      {"shm",
       {{"available", machine.has_shm_directory},
        {"directory", machine.shm_directory.empty() ? Json(nullptr) : Json(machine.shm_directory)},
        {"free_bytes", machine.shm_free},
        {"total_bytes", machine.shm_total}}},
      {"gloo", {{"available", is_known ? Json(true) : Json(nullptr)}}},
      {"cuda",
       {{"available", told("has_cuda")},
        {"devices", is_known ? Json(answer["cuda"]["devices"].size()) : Json(nullptr)},
        {"build", is_known ? answer["cuda"]["build"] : Json(nullptr)},
        {"driver", is_known ? answer["cuda"]["driver"] : Json(nullptr)},
        {"each", is_known ? answer["cuda"]["devices"] : Json::array()}}},
      {"nccl",
       {{"available", is_known ? Json(answer["nccl"].is_string()) : Json(nullptr)},
        {"version", told("nccl")}}},
  };
}

Json self_test_json(const SelfTest& test) {
  return {
      {"passed", test.passed},
      {"ranks", 2},
      {"seconds", test.seconds},
      {"error", test.error.empty() ? Json(nullptr) : Json(test.error)},
      {"try", test.try_next.empty() ? Json(nullptr) : Json(test.try_next)},
      {"checks", test.answer.is_null() ? Json::array() : test.answer["checks"]},
  };
}

Json measured_json(const Findings& findings) {
  const auto speed = [](const MemorySpeed& memory) {
    return Json{{"read_gbps", memory.read / 1e9}, {"copy_gbps", memory.copy / 1e9}};
  };
  const Json& answer = findings.self_test.answer;
  return {
      {"threads", findings.num_threads},
      {"memory", {{"one", speed(findings.one_thread)}, {"all", speed(findings.all_threads)}}},
      {"ping_ns", findings.ping_nanoseconds},
      {"state", state_name(findings.ping_nanoseconds)},
      {"all_reduce_us", answer.is_null() ? Json::object() : answer["all_reduce_us"]},
  };
}

}  // namespace

std::vector<Warning> warnings_of(const Findings& findings) {
  const Machine& machine = findings.machine;
  std::vector<Warning> found;
  const auto warn = [&](const char* about, std::string text, const char* try_next) {
    found.push_back({about, std::move(text), try_next});
  };
  if (machine.cores_left < 2) {
    warn("cores", "ranks share one core", "a wider affinity mask or CPU limit");
  } else if (machine.load > 0.5 * machine.usable_cores) {
    warn("cores", "others work on this machine, the figures below are low", "again when idle");
  }
  if (findings.active_isa != findings.available_isas.back()) {
    warn("instructions", "a lower level was asked for", "unset TESSERA_ISA");
  }
  if (machine.memory_available < kGibi) {
    warn("memory", "less than 1 GiB is available", "ending other programs");
  }
  if (machine.transparent_huge_pages == "never") {
    warn("huge pages", "large tensors cost more page faults",
         "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
  }
  if (machine.open_files.value_or(1024) < 1024) {
    warn("limits", "many ranks need more open files", "ulimit -n 4096");
  }
  if (!is_loopback_up(machine)) warn("network", "loopback is down", "ip link set lo up");
  if (!machine.has_shm_directory) {
    warn("shm", "groups fall back to Gloo", "TESSERA_SHM_DIR=/path of a tmpfs");
  } else if (machine.shm_free < 256 * kMebi) {
    warn("shm", "little room for what the ranks share",
         machine.shm_directory.empty() ? "more memory for the container"
                                       : "another TESSERA_SHM_DIR, or none");
  }
  if (!machine.gpus.empty() && !findings.self_test.answer.is_null() &&
      findings.self_test.answer["has_cuda"] != true) {
    warn("gpu", "this LibTorch cannot use it", "a LibTorch with CUDA");
  }
  if (!findings.self_test.answer.is_null() && findings.self_test.answer["has_cuda"] == true &&
      findings.self_test.answer["cuda"]["devices"].empty()) {
    warn("cuda", "no GPU is seen", "nvidia-smi, and another CUDA_VISIBLE_DEVICES");
  }
  return found;
}

std::string as_text(const Findings& findings, bool use_color) {
  const std::vector<Warning> warnings = warnings_of(findings);
  const Json& answer = findings.self_test.answer;
  Lines lines(warnings, use_color);
  lines.title("versions");
  lines.add("tessera", program_version() + ", built by " + compiler());
  if (!answer.is_null()) lines.add("libtorch", answer["libtorch"].get<std::string>());
  lines.add("kernel", findings.machine.kernel);
  add_machine(findings, lines);
  add_engines(findings, lines);
  add_self_test(findings, lines);
  add_measured(findings, lines);
  std::string text = std::move(lines).text();
  text += findings.self_test.passed ? "All good" : "The self-test failed";
  if (!warnings.empty()) {
    text += format("%s%zu warning%s", findings.self_test.passed ? ", " : "; ", warnings.size(),
                   warnings.size() == 1 ? "" : "s");
  }
  return text + ". More: docs/doctor.md\n";
}

Json as_json(const Findings& findings) {
  const Json& answer = findings.self_test.answer;
  Json warnings = Json::array();
  for (const Warning& one : warnings_of(findings)) {
    warnings.push_back({{"about", one.about}, {"text", one.text}, {"try", one.try_next}});
  }
  return {
      {"ok", findings.self_test.passed},
      {"versions",
       {{"tessera", program_version()},
        {"libtorch", answer.is_null() ? Json(nullptr) : answer["libtorch"]},
        {"compiler", compiler()},
        {"kernel", findings.machine.kernel}}},
      {"machine", machine_json(findings.machine)},
      {"isa", {{"active", findings.active_isa}, {"available", findings.available_isas}}},
      {"engines", engines_json(findings)},
      {"self_test", self_test_json(findings.self_test)},
      {"measured", measured_json(findings)},
      {"warnings", std::move(warnings)},
  };
}

}  // namespace tessera::cli
