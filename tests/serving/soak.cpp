// Requests beside updates, over real sockets, all answers compared.
//
//   serving_soak TESSERA [REQUESTS]
//
// A server process watches a folder in which a delta appears every second. Each answer must be, to
// the last digit, that of an export of the step it names; none may be missing. Prints what it saw
// as one JSON line and ends with 1 if an answer was wrong, was of two versions at once, or was
// lost. TESSERA_SOAK_REQUESTS says how many are asked where nothing else does (20,000), and
// TESSERA_SOAK_PAUSE names a file during whose life nothing is asked.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include <nlohmann/json.hpp>

#include "published.h"
#include "serving/load_generator.h"

namespace {

using namespace tessera;
using namespace tessera::serving;
using Json = nlohmann::json;

constexpr int kSamples = 4;    // in a request
constexpr int kRequests = 16;  // different ones

// The server of a package, as a process of its own.
class ServerProcess {
 public:
  ServerProcess(const std::string& program, const std::string& package,
                const std::string& watched) {
    int pipe[2];
    if (::pipe(pipe) != 0) std::abort();
    process_ = ::fork();
    if (process_ == 0) {
      ::dup2(pipe[1], 1);
      ::execl(program.c_str(), program.c_str(), "serve", package.c_str(), "--watch",
              watched.c_str(), "--port", "0", "--admin-port", "-1", "--json", "--latency-budget",
              "60000", "--idle-timeout", "3600000", static_cast<char*>(nullptr));
      ::_exit(127);
    }
    ::close(pipe[1]);
    std::string line;
    for (char c = 0; ::read(pipe[0], &c, 1) == 1 && c != '\n';) line += c;
    ::close(pipe[0]);
    port_ = Json::parse(line).at("port").get<int>();
  }
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;
  ~ServerProcess() { stop(); }

  int port() const { return port_; }
  // Its exit code: 0 if all that it had accepted was answered.
  int stop() {
    if (process_ <= 0) return 0;
    int status = 0;
    ::kill(process_, SIGTERM);
    ::waitpid(process_, &status, 0);
    process_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  }

 private:
  pid_t process_ = -1;
  int port_ = 0;
};

// What each request must be answered with, by step.
class Wanted {
 public:
  explicit Wanted(Published& published) {
    for (int i = 0; i < kRequests; ++i) samples_.emplace_back(published.small, kSamples, 100 + i);
    add(published);
  }
  // The newest step, as an export of it answers.
  void add(Published& published) {
    std::vector<std::vector<float>> numbers;
    const std::string path = published.folder / "judge";
    write_package(published.newest(), path, published.options);
    Model model(path);
    for (const Samples& samples : samples_) {
      numbers.push_back(Published::predict(model, samples));
    }
    const std::lock_guard lock(mutex_);
    by_step_[published.step] = std::move(numbers);
  }
  const Samples& samples(int request) const { return samples_[static_cast<std::size_t>(request)]; }
  // Steps that come long before any that can still answer.
  void forget_before(std::int64_t step) {
    const std::lock_guard lock(mutex_);
    by_step_.erase(by_step_.begin(), by_step_.lower_bound(step));
  }
  enum class Verdict : std::uint8_t { kRight, kTorn, kWrong };
  Verdict judge(std::size_t request, std::int64_t step, const std::vector<float>& logits) {
    const std::lock_guard lock(mutex_);
    const auto found = by_step_.find(step);
    if (found == by_step_.end()) return Verdict::kWrong;
    if (found->second[request] == logits) return Verdict::kRight;
    // Torn if every number is that of some version: parts of several in one answer.
    for (std::size_t s = 0; s < logits.size(); ++s) {
      const bool is_some = std::any_of(by_step_.begin(), by_step_.end(), [&](const auto& version) {
        return version.second[request][s] == logits[s];
      });
      if (!is_some) return Verdict::kWrong;
    }
    return Verdict::kTorn;
  }

 private:
  std::mutex mutex_;
  std::vector<Samples> samples_;
  std::map<std::int64_t, std::vector<std::vector<float>>> by_step_;
};

std::string http_request(const Samples& samples) {
  Json inputs = Json::array();
  const std::int64_t count = samples.num_samples;
  const auto num_dense = static_cast<std::int64_t>(samples.dense.size()) / count;
  inputs.push_back({{"name", "dense"},
                    {"shape", {count, num_dense}},
                    {"datatype", "FP32"},
                    {"data", samples.dense}});
  const auto bags = samples.bags();
  for (std::size_t f = 0; f < bags.size(); ++f) {
    const std::string name = "t_" + std::to_string(f);
    inputs.push_back({{"name", name + ".values"},
                      {"shape", {bags[f].ids.size()}},
                      {"datatype", "INT64"},
                      {"data", std::vector<std::int64_t>(bags[f].ids.begin(), bags[f].ids.end())}});
    inputs.push_back(
        {{"name", name + ".lengths"},
         {"shape", {count}},
         {"datatype", "INT32"},
         {"data", std::vector<std::int32_t>(bags[f].lengths.begin(), bags[f].lengths.end())}});
  }
  const std::string body = Json{{"inputs", inputs},
                                {"outputs", {{{"name", "logit"}}}},
                                {"parameters", {{"binary_data_output", true}}}}
                               .dump();
  return "POST /v2/models/dlrm/infer HTTP/1.1\r\nHost: soak\r\nContent-Length: " +
         std::to_string(body.size()) + "\r\n\r\n" + body;
}

// The step that an answer names, -1 without one.
std::int64_t step_in(std::string_view answer) {
  constexpr std::string_view kHeader = "Tessera-Version: ";
  const std::size_t place = answer.find(kHeader);
  return place == std::string_view::npos ? -1 : std::atoll(answer.data() + place + kHeader.size());
}

// Publishes versions of the model for ever; what each must answer is known before it is seen.
class Training {
 public:
  Training(Published& published, Wanted& wanted, std::string watched)
      : published_(published),
        wanted_(wanted),
        watched_(std::move(watched)),
        first_(published.small) {
    std::filesystem::create_directories(watched_);
    show(published_.step);
  }

  void publish() {
    const std::int64_t step = published_.step + 1;
    const auto row = step % 30;
    const std::vector<Change> changes = {
        {0, {row}}, {1, {0, 1, 2, 3, 4, 5, 6}}, {2, {row, 50 + row}}};
    for (auto& [name, tensor] : published_.small.tensors) {
      if (!name.starts_with("model.")) continue;
      const Tensor& before = first_.tensors.at(name).second;
      for (std::size_t i = 0; i < before.size(); ++i) {
        tensor.second[i] =
            before[i] + 0.001F * static_cast<float>((step + static_cast<std::int64_t>(i)) % 61);
      }
    }
    for (const Change& change : changes) {
      for (const std::int64_t one : change.rows) {
        for (std::int64_t c = 0; c < SmallModel::kDim; ++c) {
          const auto place = static_cast<std::size_t>(one * SmallModel::kDim + c);
          published_.small.table(change.table)[place] =
              first_.table(change.table)[place] + 0.01F * static_cast<float>((7 * step + c) % 97);
        }
      }
    }
    // A chain is read from its beginning: now and then one is whole, and the others may go.
    const bool is_whole = step % 50 == 0;
    if (is_whole) {
      published_.small.save(published_.root, step);
    } else {
      save_delta(published_.small, published_.root, step, published_.step, changes);
    }
    published_.step = step;
    wanted_.add(published_);
    wanted_.forget_before(step - 30);
    show(step);
    if (!is_whole) return;
    for (std::int64_t old = step - 100; old < step - 50; ++old) {
      for (const std::string& root : {published_.root, watched_}) {
        std::filesystem::remove_all(root + "/" + checkpoint::folder_name(old));
      }
    }
  }

 private:
  // Lets the server see a step, whole.
  void show(std::int64_t step) const {
    namespace fs = std::filesystem;
    const std::string name = checkpoint::folder_name(step);
    fs::copy(published_.root + "/" + name, watched_ + "/." + name,
             fs::copy_options::recursive | fs::copy_options::create_hard_links);
    fs::rename(watched_ + "/." + name, watched_ + "/" + name);
  }

  Published& published_;
  Wanted& wanted_;
  std::string watched_;
  SmallModel first_;
};

void wait_while(const char* file) {
  while (file != nullptr && ::access(file, F_OK) == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "serving_soak TESSERA [REQUESTS]\n");
    return 2;
  }
  const char* wish = argc > 2 ? argv[2] : std::getenv("TESSERA_SOAK_REQUESTS");
  const std::uint64_t num_wanted = wish == nullptr ? 20'000 : std::strtoull(wish, nullptr, 10);
  const char* pause = std::getenv("TESSERA_SOAK_PAUSE");
  Published published(embedding::RowType::kInt4);
  Wanted wanted(published);
  const std::string watched = published.folder / "watched";
  ServerProcess server(argv[1], published.folder / "pkg", watched);

  std::atomic<bool> is_over = false;
  std::atomic<std::int64_t> num_updates = 0;
  std::thread trainer([&] {
    Training training(published, wanted, watched);
    while (!is_over) {
      training.publish();
      ++num_updates;
      for (int i = 0; i < 20 && !is_over; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
      wait_while(pause);
    }
  });

  LoadOptions load;
  load.port = server.port();
  load.seconds = 1e7;
  load.warmup_seconds = 0;
  load.connections = 32;
  for (int i = 0; i < kRequests; ++i) load.requests.push_back(http_request(wanted.samples(i)));
  std::uint64_t num_right = 0;
  std::uint64_t num_wrong = 0;
  std::uint64_t num_torn = 0;
  std::uint64_t num_lost = 0;
  std::int64_t last_step = 0;
  std::int64_t num_versions = 0;
  load.on_answer = [&](std::size_t request, int code, std::string_view answer) {
    wait_while(pause);
    std::vector<float> logits(kSamples);
    const std::size_t bytes = sizeof(float) * kSamples;
    if (code < 0) {
      ++num_lost;
    } else if (code != 200 || answer.size() < bytes) {
      if (++num_wrong == 1)
        std::fprintf(stderr, "%.*s\n", static_cast<int>(answer.size()), answer.data());
    } else {
      std::memcpy(logits.data(), answer.data() + answer.size() - bytes, bytes);
      const std::int64_t step = step_in(answer);
      if (step != last_step) ++num_versions;
      last_step = step;
      const auto verdict = wanted.judge(request, step, logits);
      ++(verdict == Wanted::Verdict::kRight  ? num_right
         : verdict == Wanted::Verdict::kTorn ? num_torn
                                             : num_wrong);
    }
    // To the end of the requests, and of a few updates.
    return num_right + num_wrong + num_torn + num_lost < num_wanted || num_versions < 3;
  };
  const auto begin = std::chrono::steady_clock::now();
  const LoadReport report = generate_load(load);
  is_over = true;
  trainer.join();
  num_lost += report.num_unanswered;
  const int code = server.stop();
  const Json result = {
      {"requests", num_right + num_wrong + num_torn + num_lost},
      {"right", num_right},
      {"wrong", num_wrong},
      {"torn", num_torn},
      {"lost", num_lost},
      {"updates", num_updates.load()},
      {"versions_seen", num_versions},
      {"server_exit_code", code},
      {"seconds", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()}};
  std::printf("%s\n", result.dump().c_str());
  return num_wrong + num_torn + num_lost == 0 && code == 0 ? 0 : 1;
}
