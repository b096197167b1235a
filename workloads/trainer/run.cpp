#include "trainer/run.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <iterator>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>

#include "core/cores.h"
#include "report/html.h"
#include "report/page.h"
#include "report/rank_log.h"
#include "report/run_facts.h"
#include "settings/flags.h"
#include "settings/usage.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/collision/id_table.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/topology.h"
#include "tessera/core/version.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "trainer/data_error.h"
#include "trainer/device.h"
#include "trainer/event_file.h"
#include "trainer/last_words.h"
#include "trainer/progress_line.h"
#include "trainer/train.h"

namespace tessera::trainer {
namespace {

namespace report = workloads::report;
using Json = nlohmann::ordered_json;

constexpr int kDiverged = 1;
constexpr const char* kVerdict = "judged   ";  // before what an evaluation says
constexpr int kUsage = 2;

std::atomic<bool> is_told_to_stop{false};

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &parts);
  return text;
}

// Whole numbers as such.
Json json_of(double value) {
  const bool is_whole = std::abs(value) < 1e15 && value == std::floor(value);
  return is_whole ? Json(static_cast<std::int64_t>(value)) : Json(value);
}

void add_to(Json& json, const Figures& figures) {
  for (const auto& [name, value] : figures) json[name] = json_of(value);
}

std::string eta_text(double seconds) {
  const long eta = std::lround(seconds);
  char text[32];
  if (eta < 60) {
    std::snprintf(text, sizeof(text), "%lds", eta);
  } else if (eta < 3600) {
    std::snprintf(text, sizeof(text), "%ldm%02lds", eta / 60, eta % 60);
  } else if (eta < 48L * 3600) {
    std::snprintf(text, sizeof(text), "%ldh%02ldm", eta / 3600, eta / 60 % 60);
  } else {
    std::snprintf(text, sizeof(text), "%ldd%02ldh", eta / 86400, eta / 3600 % 24);
  }
  return text;
}

/// What rank 0 tells: lines on the terminal, and metrics.jsonl.
class Speaker {
 public:
  Speaker(AnyWorkload& workload, const comm::Group& world, std::string folder,
          const MetricsCallback& watch)
      : workload_(workload),
        watch_(watch),
        settings_(workload.settings()),
        world_(world),
        folder_(std::move(folder)),
        num_steps_(workload.num_steps()),
        line_(num_steps_) {
    if (const auto device = workload.device(); device && device->is_cuda()) {
      device_ = device;
      say("device   " + device_words() + "\n");
    }
    say(workload.introduction());
  }

  void start(std::int64_t first_step) {
    first_step_ = first_step;
    begin_ = Clock::now();
    metrics_ =
        std::make_unique<report::MetricsFile>(folder_ + "/" + report::kMetricsFile, first_step);
    if (!settings_.no_events) events_ = std::make_unique<EventFile>(folder_, first_step);
    if (first_step > 0) {
      metrics_->add({{"kind", "resume"},
                     {"step", first_step},
                     {"started", now_text()},
                     {"planned_steps", planned_steps()},
                     {"command", report::typed_command()}});
      say("resumed  at step " + std::to_string(first_step) + "\n");
      return;
    }
    write_head();
    if (!settings_.resume.empty()) {
      say("resumed  at the beginning: " + settings_.resume + " has no checkpoint\n");
    }
  }

  void step(const Progress& progress) {
    const double seconds = progress.time.seconds;
    const double exposed = progress.time.exposed_comm_seconds();
    metrics_->add({{"kind", "step"},
                   {"step", progress.step},
                   {"loss", progress.loss},
                   {"seconds", seconds},
                   {"samples_per_second", workload_.units_per_step() / seconds},
                   {"learning_rate", progress.learning_rate},
                   {"exposed_comm_seconds", exposed}});
    tell({Metrics::Kind::kStep,
          progress.step,
          {{"loss", progress.loss},
           {"learning_rate", progress.learning_rate},
           {"seconds", seconds},
           {workload_.unit() + "_per_second", workload_.units_per_step() / seconds},
           {"exposed_comm_seconds", exposed}}});
    const bool is_first = mean_seconds_ == 0;
    mean_seconds_ = is_first ? seconds : 0.9 * mean_seconds_ + 0.1 * seconds;
    // Of all ranks; at first, when that is not known, of this one.
    const bool knows_others = progress.step > first_step_ + 1;
    const double waited = knows_others ? progress.mean_exposed : exposed;
    mean_exposed_ = is_first ? waited : 0.9 * mean_exposed_ + 0.1 * waited;
    if (settings_.as_json || !line_.is_due(progress.step)) return;
    line_.show(progress.step, text_of(progress));
  }

  void evaluation(std::int64_t step, const Figures& figures) {
    Json line{{"kind", "eval"}, {"step", step}};
    add_to(line, figures);
    metrics_->add(line);
    for (const std::string& record : workload_.evaluation_records()) {
      Json more = Json::parse(record);
      more["step"] = step;
      metrics_->add(more);
    }
    tell({Metrics::Kind::kEvaluation, step, figures});
    std::string text = workload_.verdict(figures);
    if (settings_.as_json || text.empty() || step == num_steps_) return;  // said at the end
    line_.end();
    if (text.starts_with(kVerdict)) text.erase(0, std::string_view(kVerdict).size());
    say(line_.in_between(kVerdict + ("step " + std::to_string(step) + ": ") + text));
  }

  void finish(const Summary& summary, const std::vector<std::string>& memory,
              const std::vector<std::string>& device_memory) {
    const auto numbers = [](const std::vector<std::string>& texts) {
      std::vector<std::int64_t> values;
      for (const std::string& text : texts) values.push_back(std::stoll(text));
      return values;
    };
    const double seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
    const auto num_steps = static_cast<double>(summary.last_step - summary.first_step);
    Json end{{"kind", "end"},
             {"steps", summary.last_step},
             {"seconds", seconds},
             {"samples", num_steps * workload_.units_per_step()},
             {"peak_memory_bytes", numbers(memory)},
             {"status", status_of(summary)},
             {"best_step", summary.best_step},
             {"resume", workload_.command() + " --resume " + folder_}};
    if (device_) end["peak_device_bytes"] = numbers(device_memory);
    for (const std::string& record : workload_.final_records()) {
      Json more = Json::parse(record);
      more["step"] = summary.last_step;
      metrics_->add(more);
    }
    metrics_->add(end);
    tell({Metrics::Kind::kEnd, summary.last_step, summary.evaluation});
    line_.end();
    const std::string page = report::write_report(folder_);
    if (summary.has_diverged) complain(summary);
    if (settings_.as_json) {
      say_json(summary, page, seconds);
      return;
    }
    if (summary.was_stopped) {
      say("stopped  at step " + std::to_string(summary.last_step) + "; go on with " +
          workload_.command() + " --resume " + folder_ + "\n");
    } else if (!summary.evaluation.empty() && !summary.has_diverged) {
      say(line_.in_between(workload_.verdict(summary.evaluation)));
    }
    if (summary.ended_early) {
      say("stopped  early, after " + std::to_string(summary.num_worse) +
          " evaluations that were not better than that of step " +
          std::to_string(summary.best_step) + "\n");
    }
    if (const std::string text = kept_text(summary); !text.empty()) say("model    " + text + "\n");
    say("report   " + page + "\n");
  }

  // What was written when the run ended stays as it is.
  void find_finished(const Summary& summary) const {
    const std::string page = folder_ + "/" + report::kReportFile;
    if (settings_.as_json) {
      say_json(summary, page, /*seconds=*/0);
      return;
    }
    const bool is_beyond = summary.last_step > num_steps_;
    say("finished " + folder_ +
        (is_beyond ? " is at step " + std::to_string(summary.last_step) + " already, beyond the " +
                         std::to_string(num_steps_) + " steps asked for; "
                   : " has done its " + std::to_string(num_steps_) + " steps already; ") +
        workload_.command() + " --resume " + folder_ + " " + workload_.longer() + "\n");
    say("report   " + page + "\n");
  }

  report::MetricsFile* metrics() { return metrics_.get(); }

 private:
  using Clock = std::chrono::steady_clock;

  void say(const std::string& text) const {
    if (settings_.as_json) return;
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
  }

  void say_json(const Summary& summary, const std::string& page, double seconds) const {
    char fingerprint[32];
    std::snprintf(fingerprint, sizeof(fingerprint), "%016lx",
                  static_cast<unsigned long>(summary.fingerprint));
    Json json{{"workload", workload_.name()},
              {"ranks", world_.size()},
              {"first_step", summary.first_step},
              {"steps", summary.last_step},
              {"loss", summary.loss},
              {"seconds", seconds},
              {"fingerprint", fingerprint},
              {"report", page}};
    if (mean_seconds_ > 0) {
      json[workload_.unit() + "_per_second"] = workload_.units_per_step() / mean_seconds_;
    }
    add_to(json, summary.evaluation);
    if (summary.best_step > 0) json["best_step"] = summary.best_step;
    if (!summary.was_finished) add_to(json, workload_.results());  // of steps that were done
    std::printf("%s\n", json.dump().c_str());
  }

  static const char* status_of(const Summary& summary) {
    return summary.has_diverged  ? "diverged"
           : summary.was_stopped ? "stopped"
           : summary.ended_early ? "stopped early"
                                 : "finished";
  }

  // What a finished run leaves to be used.
  std::string kept_text(const Summary& summary) const {
    if (summary.was_stopped || summary.has_diverged) return "";
    const std::string last = checkpoint::latest_folder(folder_ + "/checkpoints");
    if (last.empty()) return "";
    std::string text = folder_ + "/checkpoints/" + last;
    const std::string best = folder_ + "/" + kBestFolder;
    if (summary.best_step > 0 && summary.best_step != summary.last_step &&
        !checkpoint::list_steps(best).empty()) {
      text += ", the best of step " + std::to_string(summary.best_step) + " in " + best;
    }
    return text;
  }

  void complain(const Summary& summary) const {
    // In one line, which the launcher shows as the reason.
    say_last_words("train: the loss is not a number at step " + std::to_string(summary.last_step) +
                   " of " + std::to_string(num_steps_) + ": with " + workload_.rates() +
                   " the parameters have grown out of all bounds. Use smaller rates, or --warmup; "
                   "checkpoints of earlier steps are untouched.");
  }

  std::string device_words() const {
    const bool is_shared =
        world_.process_group()->getBackend(at::kCUDA)->getBackendName() != "nccl";
    const std::string name = device_name(*device_);
    return (name == device_->str() ? name : device_->str() + ", " + name) +
           (is_shared && world_.size() > 1
                ? "; ranks talk through host memory (" + world_.engine() + "), not over NCCL"
                : "");
  }

  // Of the host's memory or the GPU's.
  std::string memory_text() const {
    if (!device_) return report::bytes_text(static_cast<double>(report::peak_memory_bytes()));
    const DeviceUse use = device_use(*device_);
    std::string text = report::bytes_text(static_cast<double>(use.own_bytes));
    if (use.total_bytes > 0) {
      text += " of " + report::bytes_text(static_cast<double>(use.total_bytes));
    }
    if (use.percent) text += " | gpu " + std::to_string(*use.percent) + " %";
    return text;
  }

  std::string text_of(const Progress& progress) const {
    const bool has_end = num_steps_ < kEndless;
    const auto left = static_cast<double>(num_steps_ - progress.step);
    const int width = has_end ? static_cast<int>(std::to_string(num_steps_).size()) : 1;
    const std::string of = has_end ? "/" + std::to_string(num_steps_) : "";
    const std::string eta = has_end ? " | eta " + eta_text(left * mean_seconds_) : "";
    std::string figures;
    for (const auto& [name, value] : workload_.running()) {
      char one[64];
      std::snprintf(one, sizeof(one), " | %s %.3f", name.c_str(), value);
      figures += one;
    }
    if (const std::string words = workload_.running_text(); !words.empty()) {
      figures += " | " + words;
    }
    char text[256];
    std::snprintf(
        text, sizeof(text),
        progress.loss < 0.1 ? "step %*ld%s | loss %.4g%s | %s %s/s | %.1f ms (exposed comm %.1f) "
                              "| mem %s%s"
                            : "step %*ld%s | loss %.4f%s | %s %s/s | %.1f ms (exposed comm %.1f) "
                              "| mem %s%s",
        width, static_cast<long>(progress.step), of.c_str(), progress.loss, figures.c_str(),
        report::short_number(workload_.units_per_step() / mean_seconds_).c_str(),
        workload_.unit().c_str(), 1e3 * mean_seconds_, 1e3 * mean_exposed_, memory_text().c_str(),
        eta.c_str());
    return text;
  }

  // 0: nobody knows.
  std::int64_t planned_steps() const { return num_steps_ < kEndless ? num_steps_ : 0; }

  void write_head() {
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    Json head{{"kind", "run"},
              {"workload", workload_.name()},
              {"ranks", world_.size()},
              {"unit", workload_.unit()},
              {"started", now_text()},
              {"planned_steps", planned_steps()},
              {"command", report::typed_command()},
              {"data", report::described(workload_.data_files())}};
    add_to(head, workload_.facts());
    head["versions"] = {{"tessera", version()}, {"LibTorch", torch_version()}};
    head["machine"] = {{"host", host},
                       {"cpu", report::processor_name()},
                       {"cores", std::thread::hardware_concurrency()},
                       {"threads per rank", at::get_num_threads()},
                       {"engine", world_.engine()}};
    if (device_) head["machine"]["device"] = device_words();
    metrics_->add(head);
    for (const std::string& line : workload_.records()) metrics_->add(Json::parse(line));
  }

  // To those who watch, and to TensorBoard, whose curves have the names of metrics.jsonl.
  void tell(Metrics metrics) {
    if (events_) {
      const char* group = metrics.kind == Metrics::Kind::kStep ? "train/" : "eval/";
      if (metrics.kind != Metrics::Kind::kEnd) {
        for (const auto& [name, value] : metrics.figures) {
          events_->add(group + name, metrics.step, value);
        }
      }
      const auto now = Clock::now();
      if (metrics.kind != Metrics::Kind::kStep || now - flushed_ > std::chrono::seconds(1)) {
        events_->flush();
        flushed_ = now;
      }
    }
    if (watch_) watch_(metrics);
  }

  AnyWorkload& workload_;
  const MetricsCallback& watch_;
  const Settings& settings_;
  comm::Group world_;
  std::string folder_;
  std::int64_t num_steps_;
  std::unique_ptr<EventFile> events_;
  std::chrono::steady_clock::time_point flushed_;
  ProgressLine line_;
  std::optional<at::Device> device_;  // a GPU
  std::unique_ptr<report::MetricsFile> metrics_;
  std::int64_t first_step_ = 0;
  Clock::time_point begin_;
  double mean_seconds_ = 0;
  double mean_exposed_ = 0;
};

// Rank 0 makes the folder; all know its name.
std::string run_folder(Settings& settings, const comm::Group& world) {
  std::string mine;
  if (world.rank() == 0) {
    mine = !settings.resume.empty() ? settings.resume
           : !settings.save.empty() ? settings.save
                                    : report::make_run_folder(settings.runs);
    std::error_code error;
    std::filesystem::create_directories(mine, error);
    report::write_text(mine + "/" + report::kConfigFile, settings.table().config());
  }
  return report::gather_texts(mine, world)[0];
}

// What the ranks of this one's host may use, and which of them this is. Collective.
std::pair<std::vector<std::vector<int>>, std::size_t> masks_of_host(const comm::Group& world) {
  std::string own;
  for (const int core : core::mask()) own += std::to_string(core) + ' ';
  const std::vector<std::string> all = report::gather_texts(own, world);
  const int local_size = comm::get_local_size(world.size());
  const int first = world.rank() / local_size * local_size;
  std::vector<std::vector<int>> masks;
  for (int rank = first; rank < std::min(first + local_size, world.size()); ++rank) {
    std::istringstream cores(all[static_cast<std::size_t>(rank)]);
    masks.emplace_back(std::istream_iterator<int>(cores), std::istream_iterator<int>());
  }
  return {std::move(masks), static_cast<std::size_t>(world.rank() - first)};
}

// MKL makes LibTorch take no more threads than cores, whatever OMP_NUM_THREADS says: it is obeyed
// here. Without it ranks of one host share the cores that they may use.
void use_threads(const Settings& settings, const comm::Group& world) {
  const auto [masks, self] = masks_of_host(world);
  const char* wanted = std::getenv("OMP_NUM_THREADS");
  int threads = settings.threads > 0 ? settings.threads : wanted != nullptr ? std::atoi(wanted) : 0;
  if (threads <= 0) {
    threads = core::share_of_cores(masks, self, core::cores_of_control_group());
  }
  at::set_num_threads(std::max(1, threads));
}

int train_rank(Settings& settings, const Maker& make, const comm::Group& world,
               const MetricsCallback& watch) {
  use_threads(settings, world);
  use_device(settings, world);
  const std::unique_ptr<AnyWorkload> workload = make(world);
  const std::string folder = run_folder(settings, world);
  std::unique_ptr<Speaker> speaker;
  Listener listener;
  if (world.rank() == 0) {
    for (const auto& [name, text] : workload->files()) {
      report::write_text(folder + "/" + name, text);
    }
    speaker = std::make_unique<Speaker>(*workload, world, folder, watch);
    listener.started = [&](std::int64_t step) { speaker->start(step); };
    listener.stepped = [&](const Progress& progress) { speaker->step(progress); };
    listener.evaluated = [&](std::int64_t step, const Figures& figures) {
      speaker->evaluation(step, figures);
    };
  }
  // From here on there is something to save.
  std::signal(SIGTERM, [](int) { is_told_to_stop = true; });
  std::signal(SIGINT, [](int) { is_told_to_stop = true; });
  ualarm(0, 0);
  // Steps of the middle: the first ones fill caches and pools.
  core::StepRecorder recorder({.first_kept = workload->num_steps() / 2, .num_kept = 3});
  recorder.use_clock(device_clock(device_of(settings)));
  const Summary summary = train(*workload, world, folder + "/checkpoints", recorder, listener,
                                [] { return is_told_to_stop.load(); });
  if (summary.was_finished) {
    if (speaker) speaker->find_finished(summary);
    return 0;
  }
  report::write_times(folder, recorder, world, speaker ? speaker->metrics() : nullptr);
  const auto memory = report::gather_texts(std::to_string(report::peak_memory_bytes()), world);
  const auto device_memory =
      report::gather_texts(std::to_string(peak_device_bytes(device_of(settings))), world);
  if (speaker) speaker->finish(summary, memory, device_memory);
  // One rank says so; the others have nothing to add.
  return summary.has_diverged && speaker ? kDiverged : 0;
}

struct NoMemoryLeft : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct DeviceLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// LibTorch's text has a GPU's number, what was asked for and what is held, on several lines or one;
// what to do about it is ours to say.
int train_on_device(Settings& settings, const Maker& make, const comm::Group& world,
                    const MetricsCallback& watch) {
  try {
    return train_rank(settings, make, world, watch);
  } catch (const c10::OutOfMemoryError& error) {
    const c10::Device device = device_of(settings);
    std::string text = error.what_without_backtrace();
    text = text.substr(0, text.find(" See documentation"));
    throw NoMemoryLeft("train: rank " + std::to_string(world.rank()) + " has no memory left on " +
                       device.str() + " (" + device_name(device) + "), of which it holds " +
                       report::bytes_text(static_cast<double>(device_use(device).own_bytes)) +
                       ": " + text + " Use more ranks, a smaller --batch or a smaller model.");
  } catch (const c10::Error& error) {
    const c10::Device device = device_of(settings);
    const std::string fault = device.is_cuda() ? device_fault(error.what_without_backtrace()) : "";
    if (fault.empty()) throw;
    throw DeviceLost("train: rank " + std::to_string(world.rank()) + " lost " + device.str() +
                     " (" + device_name(device) + "): " + fault +
                     ". Ask tessera doctor; the run goes on from its last checkpoint with "
                     "--resume.");
  }
}

}  // namespace

bool told_to_stop() noexcept { return is_told_to_stop; }

int run(Settings& settings, const Maker& make, const MetricsCallback& watch) {
  // Whoever is told to stop while it starts has half a second to say what is wrong, and then ends:
  // other ranks may be gone already, and would be waited for.
  const auto end_soon = [](int) {
    is_told_to_stop = true;
    ualarm(500000, 0);
  };
  std::signal(SIGTERM, end_soon);
  std::signal(SIGINT, end_soon);
  const comm::Group world = comm::init();
  const auto fail = [&](const std::string& text, int code) { return end_alike(world, text, code); };
  try {
    return comm::guarded([&] { return train_on_device(settings, make, world, watch); });
  } catch (const NoMemoryLeft& error) {
    say_last_words(error.what());  // of this rank; the others are told
    return launch::kExitConfiguration;
  } catch (const DeviceLost& error) {
    say_last_words(error.what());
    return launch::kExitLostPeer;
  } catch (const DataError& error) {
    return fail(error.what(), launch::kExitData);
  } catch (const report::Error& error) {
    return fail(error.what(), launch::kExitData);
  } catch (const checkpoint::Error& error) {
    return fail(error.what(), launch::kExitData);
  } catch (const collision::IdTableError& error) {
    return fail("train: " + std::string(error.what()), launch::kExitConfiguration);
  } catch (const launch::LaunchError& error) {
    return fail(
        std::string(error.what()) + "\n  why: " + error.why() + "\n  try: " + error.try_next(),
        error.exit_code());
  } catch (const c10::ValueError& error) {
    return fail(error.what_without_backtrace(), launch::kExitConfiguration);
  }
}

int run_program(Settings& settings, Settings& saved, const std::vector<std::string>& words,
                const Maker& make, const MetricsCallback& watch) {
  try {
    const std::string help = settings.table().help();
    const char* rank = std::getenv("RANK");
    read(settings, saved, words, /*tells=*/rank == nullptr || std::string(rank) == "0");
    if (settings.wants_help) return settings::print_help(help);
    if (settings.print_config) return settings::print_help(settings.table().config());
  } catch (const settings::UsageError& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return kUsage;
  } catch (const launch::LaunchError& error) {
    std::fputs(error.text().c_str(), stderr);
    return error.exit_code();
  }
  return run(settings, make, watch);
}

}  // namespace tessera::trainer
