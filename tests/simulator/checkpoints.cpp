// Checkpoints on a disk that crashes and fails: a committed one is whole or absent, the newest that
// was promised is there, `keep` removes nothing that is needed, and a load is of one generation.

#include <fcntl.h>

#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "simulator/random.h"
#include "simulator/sim_disk.h"
#include "simulator/world.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/reader.h"
#include "tessera/checkpoint/writer.h"

namespace tessera::simulator {
namespace {

using checkpoint::Found;
using checkpoint::Part;
using checkpoint::Reader;
using checkpoint::Region;

constexpr const char* kRoot = "/jobs/one";

// Values say which save they are of. A save is known by a number that no other has.
float value_of(std::int64_t save, std::int64_t place) {
  return static_cast<float>(save * 16 + place);
}

// Two ranks: a tensor in two parts, and one that is whole.
struct Sample {
  std::vector<float> first;
  std::vector<float> second;
  std::vector<float> whole;
  std::vector<std::vector<Part>> parts;

  explicit Sample(std::int64_t save)
      : first{value_of(save, 0), value_of(save, 1)},
        second{value_of(save, 2)},
        whole{value_of(save, 3), value_of(save, 4)} {
    parts.resize(2);
    add(0, "cut", 3, 0, first);
    add(1, "cut", 3, 2, second);
    add(1, "whole", 2, 0, whole);
  }
  Sample(const Sample&) = delete;
  Sample& operator=(const Sample&) = delete;

  void add(std::size_t rank, const char* name, std::int64_t length, std::int64_t begin,
           const std::vector<float>& values) {
    Part part;
    part.name = name;
    part.shape = {length};
    part.region = {{begin}, {static_cast<std::int64_t>(values.size())}};
    part.data = reinterpret_cast<const std::byte*>(values.data());
    parts[rank].push_back(std::move(part));
  }
};

class Checkpoints {
 public:
  Checkpoints(std::uint64_t seed, bool tells)
      : random_(seed),
        disk_(random_, random_.flip() ? SimDisk::Order::kOrdered : SimDisk::Order::kUnordered),
        tells_(tells) {}

  void run() {
    const std::int64_t num_episodes = random_.between(2, 7);
    for (std::int64_t i = 0; i < num_episodes; ++i) {
      switch (random_.below(6)) {
        case 0:
          save_beside_load();
          break;
        case 1:
          load_beside_saves();
          break;
        case 2:
          save_with_errors();
          break;
        case 3:
          save_in_peace();
          break;
        default:
          save_until_crash();
      }
      check_everything();
      require(disk_.num_open() == 0, "nothing stays open");
    }
  }

 private:
  struct Save {
    std::int64_t number = 0;
    std::int64_t step = 0;
    int keep = 0;
  };

  void tell(const std::string& line) const {
    if (tells_) std::printf("  %s\n", line.c_str());
  }
  static std::string text(const Save& save) {
    return "save " + std::to_string(save.number) + " of step " + std::to_string(save.step) +
           ", keep " + std::to_string(save.keep);
  }

  Save plan_save() {
    Save save;
    save.number = ++num_saves_;
    // A step again, one back after a load of an older one, or the next.
    save.step = random_.between(1, 6) + (random_.flip() ? num_saves_ : 0);
    save.keep = static_cast<int>(random_.below(4));
    steps_[save.number] = save.step;
    return save;
  }

  void make(const Save& save) {
    const Sample sample(save.number);
    checkpoint::save_parts(kRoot, save.step, sample.parts, {{"save", save.number}}, save.keep,
                           disk_);
  }

  // The save that a checkpoint is of; everything in it must be.
  std::int64_t read(const Reader& reader) const {
    const auto& manifest = reader.manifest();
    const auto number = std::get<std::int64_t>(manifest.values.at("save"));
    const auto known = steps_.find(number);
    require(known != steps_.end() && known->second == manifest.step,
            "a checkpoint is of the save and step it names");
    for (const auto& [name, length, place] : {std::tuple("cut", 3, 0), std::tuple("whole", 2, 3)}) {
      std::vector<float> values(static_cast<std::size_t>(length));
      reader.read(name, Region{{0}, {length}}, reinterpret_cast<std::byte*>(values.data()));
      for (std::int64_t i = 0; i < length; ++i) {
        require(values[static_cast<std::size_t>(i)] == value_of(number, place + i),
                "all of a checkpoint is of one save");
      }
    }
    return number;
  }

  std::optional<std::int64_t> load() {
    const Found found = checkpoint::find_newest(kRoot, INT64_MAX, {}, disk_);
    for (const std::string& warning : found.warnings) {
      require(false, "a finished folder is whole, but: " + warning);
    }
    if (!found.reader) return std::nullopt;
    return read(*found.reader);
  }

  void promise(std::int64_t number) {
    promised_ = number;
    unknown_.clear();
  }
  void restart() {
    disk_.restart();
    has_restarted_ = true;
  }

  // What a load may give: the last save that was promised, or one whose end is not known.
  void check_newest(const std::optional<std::int64_t>& number) const {
    if (!promised_) {
      require(!number || unknown_.contains(*number), "what loads was saved");
      return;
    }
    require(number.has_value(), "a promised checkpoint is there");
    require(
        *number == *promised_ || unknown_.contains(*number),
        "the newest is save " + std::to_string(*promised_) + ", not " + std::to_string(*number));
  }

  void check_everything() {
    disk_.begin({});
    const std::optional<std::int64_t> newest = load();
    check_newest(newest);
    // What a crash has left is on the disk. What a save that failed has left is seen, and may go.
    if (has_restarted_ && newest) promise(*newest);
    has_restarted_ = false;
    for (const std::int64_t step : checkpoint::list_steps(kRoot, disk_)) {
      try {
        read(Reader(kRoot, step, disk_));
      } catch (const checkpoint::Error& error) {
        require(false, "a finished folder is whole, but: " + std::string(error.what()));
      }
    }
    const std::string latest = checkpoint::latest_folder(kRoot, disk_);
    if (latest.empty()) return;
    struct stat facts{};
    require(disk_.look_at(AT_FDCWD, std::string(kRoot) + "/" + latest, facts) == 0,
            "LATEST names a folder that is there");
  }

  void save_in_peace() {
    const Save save = plan_save();
    tell(text(save));
    std::vector<std::int64_t> expected{save.step};
    for (const std::int64_t step : checkpoint::list_commits(kRoot, disk_)) {
      if (step != save.step) expected.push_back(step);
    }
    if (save.keep > 0 && expected.size() > static_cast<std::size_t>(save.keep)) {
      expected.resize(static_cast<std::size_t>(save.keep));
    }
    disk_.begin({});
    make(save);
    usual_calls_ = disk_.num_calls();
    promise(save.number);
    require(checkpoint::list_commits(kRoot, disk_) == expected,
            "keep leaves the last commits, and no others");
    require(checkpoint::latest_folder(kRoot, disk_) == checkpoint::folder_name(save.step),
            "LATEST names the last commit");
    std::vector<std::string> names;
    const int root = disk_.open(AT_FDCWD, kRoot, O_RDONLY | O_DIRECTORY);
    disk_.list(root, names);
    disk_.close(root);
    for (const std::string& name : names) {
      require(name.find(".tmp-") == std::string::npos, "a save leaves nothing unfinished: " + name);
    }
  }

  void save_until_crash() {
    const Save save = plan_save();
    const std::int64_t call = random_.between(1, usual_calls_ + 10);
    tell(text(save) + ", crash before call " + std::to_string(call));
    disk_.begin({.crash_at = call});
    unknown_.insert(save.number);
    try {
      make(save);
      promise(save.number);
    } catch (const checkpoint::Error&) {
      require(disk_.has_stopped(), "a save fails only if the disk does");
    }
    restart();
  }

  void save_with_errors() {
    const Save save = plan_save();
    const std::uint64_t one_in = 5 + random_.below(60);
    tell(text(save) + ", one call in " + std::to_string(one_in) + " fails");
    disk_.begin({.one_error_in = one_in});
    unknown_.insert(save.number);
    try {
      make(save);
      promise(save.number);
      tell("it returned");
    } catch (const checkpoint::Error& error) {
      tell(error.what());
      require(error.kind() == checkpoint::ErrorKind::kWrite ||
                  error.kind() == checkpoint::ErrorKind::kRead,
              std::string("a failed disk is told as such: ") + error.what());
    }
    disk_.begin({});
    if (random_.flip()) {
      tell("crash");
      restart();
    }
  }

  // A load somewhere inside a save, whose files are read to the end after it.
  void save_beside_load() {
    const Save save = plan_save();
    const std::int64_t call = random_.between(1, usual_calls_);
    tell(text(save) + ", a load before call " + std::to_string(call));
    std::unique_ptr<Reader> reader;
    std::int64_t number = 0;
    unknown_.insert(save.number);
    disk_.begin({.between_at = call, .between = [&] {
                   Found found = checkpoint::find_newest(kRoot, INT64_MAX, {}, disk_);
                   require(found.warnings.empty(), "a load beside a save sees whole folders");
                   if (!found.reader) return check_newest(std::nullopt);
                   reader = std::move(found.reader);
                   number = std::get<std::int64_t>(reader->manifest().values.at("save"));
                   check_newest(number);
                 }});
    make(save);
    disk_.begin({});
    promise(save.number);
    if (reader) require(read(*reader) == number, "what was opened stays what it was");
  }

  // One or two saves inside a load.
  void load_beside_saves() {
    const std::int64_t call = random_.between(1, 60);
    std::vector<Save> saves;
    for (std::int64_t i = random_.between(1, 2); i > 0; --i) saves.push_back(plan_save());
    tell("load, before call " + std::to_string(call) + ": " + text(saves[0]) +
         (saves.size() > 1 ? " and " + text(saves[1]) : ""));
    std::optional<std::int64_t> last;
    disk_.begin({.between_at = call, .between = [&] {
                   for (const Save& save : saves) {
                     make(save);
                     unknown_.insert(save.number);
                     last = save.number;
                   }
                 }});
    const std::optional<std::int64_t> number = load();
    check_newest(number);
    disk_.begin({});
    if (last) promise(*last);
  }

  Random random_;
  SimDisk disk_;
  bool tells_;
  std::int64_t num_saves_ = 0;
  std::int64_t usual_calls_ = 45;
  std::map<std::int64_t, std::int64_t> steps_;  // of all saves, by number
  std::optional<std::int64_t> promised_;        // the last save that returned, or was left
  std::set<std::int64_t> unknown_;              // later ones that may have come to an end
  bool has_restarted_ = false;
};

}  // namespace

void run_checkpoints(std::uint64_t seed, bool tells) { Checkpoints(seed, tells).run(); }

}  // namespace tessera::simulator
