#include "tessera/checkpoint/load.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include "checkpoint/exchange.h"
#include "checkpoint/run_beside.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"

namespace tessera::checkpoint {
namespace {

constexpr const char* kLoad = "checkpoint.load";
// Of a tensor that cannot be read in place.
constexpr std::int64_t kBlockBytes = std::int64_t{64} << 20;

// What one rank has opened: the first line of its answer; what it could not open follows.
struct Answer {
  std::int64_t commit = -1;  // -1: there is nothing
  std::int64_t step = -1;
  std::string sha256;
  auto operator<=>(const Answer&) const = default;
};

std::string encode(const Found& found) {
  std::string text = "-1 -1 ";
  if (found.reader) {
    const Manifest& manifest = found.reader->manifest();
    text = std::to_string(manifest.commit) + " " + std::to_string(manifest.step) + " " +
           manifest.sha256;
  }
  for (const std::string& warning : found.warnings) text.append("\n").append(warning);
  return text;
}

Answer decode(const std::string& text) {
  Answer answer;
  std::istringstream(text.substr(0, text.find('\n'))) >> answer.commit >> answer.step >>
      answer.sha256;
  return answer;
}

void add_warnings(const std::string& text, std::set<std::string>& warnings) {
  for (std::size_t place = text.find('\n'); place != std::string::npos;) {
    const std::size_t next = text.find('\n', place + 1);
    warnings.insert(text.substr(place + 1, next - place - 1));
    place = next;
  }
}

// Ranks that open at the same moment may see two sides of a save. They look again until all hold
// the same manifest. Only when nobody's answer changes any more, it is no save that they differ by:
// then some rank cannot read what another can, and the newest is left out on all.
constexpr int kSameRounds = 3;
constexpr int kMaxRounds = 1000;
constexpr int kMaxPauseMs = 20;

std::unique_ptr<Reader> open_same(const std::string& root, const std::optional<std::int64_t>& step,
                                  const std::optional<comm::Group>& group,
                                  std::set<std::string>& left_out, std::set<std::string>& warnings,
                                  Disk& disk) {
  std::vector<std::string> before;
  int num_same = 0;
  for (int round = 1;; ++round) {
    Found found;
    const auto all = together(group, kLoad, [&] {
      if (step) {
        found.reader = std::make_unique<Reader>(root, *step, disk);
      } else {
        found = find_newest(root, INT64_MAX, left_out, disk);
      }
      return encode(found);
    });
    std::vector<Answer> answers;
    for (const std::string& text : all) answers.push_back(decode(text));
    const auto [lowest, highest] = std::minmax_element(answers.begin(), answers.end());
    if (*lowest == *highest) {
      for (const std::string& text : all) add_warnings(text, warnings);
      return std::move(found.reader);
    }
    num_same = all == before ? num_same + 1 : 0;
    before = all;
    if (num_same >= kSameRounds && !step) {
      left_out.insert(highest->sha256);
      warnings.insert(root + ": not every rank can open step " + std::to_string(highest->step) +
                      " there.");
      num_same = 0;
      continue;
    }
    if (num_same >= kSameRounds || round == kMaxRounds) {
      const auto rank_of = [&](const auto& answer) {
        return std::to_string(group->world_rank(static_cast<int>(answer - answers.begin())));
      };
      throw Error(ErrorKind::kInvalid,
                  "checkpoint.load: rank " + rank_of(lowest) + " finds step " +
                      std::to_string(lowest->step) + " with the manifest " + lowest->sha256 +
                      " in " + root + ", rank " + rank_of(highest) + " finds step " +
                      std::to_string(highest->step) + " with " + highest->sha256 +
                      ". All ranks must share the folder, and nobody may save into it without a "
                      "pause.");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(std::min(round, kMaxPauseMs)));
  }
}

void check_placed(const Reader& reader, const PlacedTensor& placed) {
  const TensorInfo* info = reader.find(placed.name);
  if (info == nullptr) {
    throw Error(ErrorKind::kMissing,
                reader.folder() + ": there is no tensor '" + placed.name + "'.");
  }
  const auto refuse = [&](const std::string& here) {
    throw Error(ErrorKind::kInvalid, reader.folder() + ": tensor '" + placed.name + "' is " +
                                         name_of(info->dtype) + " " + text_of(info->shape) +
                                         ", the state wants " + here + ".");
  };
  if (info->shape != placed.shape) refuse(text_of(placed.shape));
  for (const Piece& piece : placed.pieces) {
    if (dtype_of(piece.tensor.scalar_type()) != info->dtype) {
      refuse(name_of(dtype_of(piece.tensor.scalar_type())));
    }
    bool is_inside = piece.offsets.size() == placed.shape.size() &&
                     piece.tensor.dim() == static_cast<std::int64_t>(placed.shape.size());
    for (std::size_t i = 0; is_inside && i < placed.shape.size(); ++i) {
      is_inside =
          piece.offsets[i] >= 0 && piece.offsets[i] + piece.tensor.size(i) <= placed.shape[i];
    }
    if (!is_inside) {
      refuse("a piece at " + text_of(piece.offsets) + " of " + text_of(piece.tensor.sizes().vec()));
    }
  }
}

at::Tensor in_host_memory(const at::Tensor& like) {
  return at::empty(like.sizes(), like.options().device(at::kCPU).requires_grad(false));
}

// Reads the rows of a region block by block, and hands each to `take`, with its rows of `target`.
template <typename Take>
void read_blocks(const Reader& reader, const std::string& name, const Region& region,
                 const at::Tensor& target, const Take& take) {
  const std::int64_t num_rows = target.dim() > 0 ? target.size(0) : 1;
  const std::int64_t row_bytes =
      target.numel() * static_cast<std::int64_t>(target.element_size()) / num_rows;
  const std::int64_t step = std::max<std::int64_t>(1, kBlockBytes / row_bytes);
  for (std::int64_t row = 0; row < num_rows; row += step) {
    const std::int64_t count = std::min(step, num_rows - row);
    const at::Tensor rows = target.dim() > 0 ? target.narrow(0, row, count) : target;
    const at::Tensor block = in_host_memory(rows);
    Region part = region;
    if (target.dim() > 0) {
      part.offsets[0] += row;
      part.lengths[0] = count;
    }
    reader.read(name, part, static_cast<std::byte*>(block.mutable_data_ptr()));
    take(rows, block);
  }
}

// What a rank takes from a checkpoint, a piece at a time; a staged one has its bytes already.
struct Taken {
  const std::string* name;
  at::Tensor target;
  Region region;
  at::Tensor staged;
};

void stage_taken(const Reader& reader, Taken& taken) {
  taken.staged = in_host_memory(taken.target);
  reader.read(*taken.name, taken.region, static_cast<std::byte*>(taken.staged.mutable_data_ptr()));
}

void check_taken(const Reader& reader, Taken& taken) {
  read_blocks(reader, *taken.name, taken.region, taken.target,
              [](const at::Tensor&, const at::Tensor&) {});
}

void put_taken(const Reader& reader, Taken& taken) {
  if (taken.staged.defined()) {
    taken.target.copy_(taken.staged);
    taken.staged.reset();
  } else if (taken.target.is_cpu() && taken.target.is_contiguous()) {
    reader.read(*taken.name, taken.region,
                static_cast<std::byte*>(taken.target.mutable_data_ptr()));
  } else {
    read_blocks(reader, *taken.name, taken.region, taken.target,
                [](const at::Tensor& rows, const at::Tensor& block) { rows.copy_(block); });
  }
}

std::vector<Taken> taken_of(const std::vector<PlacedTensor>& tensors) {
  std::vector<Taken> all;
  for (const PlacedTensor& placed : tensors) {
    for (const Piece& piece : placed.pieces) {
      const at::Tensor target = piece.tensor.detach();
      if (target.numel() == 0) continue;
      all.push_back({&placed.name, target, {piece.offsets, target.sizes().vec()}, {}});
    }
  }
  return all;
}

std::int64_t total_bytes(const std::vector<Taken>& all) {
  std::int64_t sum = 0;
  for (const Taken& taken : all) sum += static_cast<std::int64_t>(taken.target.nbytes());
  return sum;
}

// Two threads: while one sums and copies, the other waits for the disk.
constexpr std::size_t kNumThreads = 2;

void take_each(std::vector<Taken>& all, const Reader& reader,
               void (*take)(const Reader& reader, Taken& taken)) {
  std::atomic<std::size_t> next = 0;
  std::exception_ptr error;
  std::mutex mutex;
  const auto work = [&] {
    for (std::size_t i = next++; i < all.size(); i = next++) {
      try {
        take(reader, all[i]);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next = all.size();
      }
    }
  };
  run_beside(std::min(kNumThreads, all.size()), work);
  if (error) std::rethrow_exception(error);
}

void log_line(const LoadOptions& options, const std::string& line) {
  if (options.log) {
    options.log(line);
  } else {
    std::fprintf(stderr, "[tessera] %s\n", line.c_str());
  }
}

}  // namespace

LoadReport load(const std::string& root, State& state, const std::optional<comm::Group>& group,
                const LoadOptions& options) {
  const int rank = group ? group->rank() : 0;
  std::set<std::string> warnings;
  Disk& disk = options.disk != nullptr ? *options.disk : Disk::real();
  std::set<std::string> left_out;  // manifests whose data some rank cannot read
  for (;;) {
    const std::unique_ptr<Reader> reader =
        open_same(root, options.step, group, left_out, warnings, disk);
    if (reader == nullptr) {
      std::string text = "checkpoint.load: there is no whole checkpoint in " + root + ".";
      for (const std::string& warning : warnings) text.append(" ").append(warning);
      throw Error(ErrorKind::kMissing, text);
    }
    std::vector<PlacedTensor> tensors = state.tensors();
    together(group, kLoad, [&]() -> std::string {
      for (const auto& stateful : state.statefuls()) stateful->prepare(*reader, tensors);
      for (const PlacedTensor& placed : tensors) check_placed(*reader, placed);
      return "";
    });
    std::vector<Taken> all;
    const auto outcomes = together(group, kLoad, [&]() -> std::string {
      try {
        all = taken_of(tensors);
        take_each(all, *reader,
                  total_bytes(all) <= options.staging_bytes ? stage_taken : check_taken);
        note_read(root, disk);
      } catch (const Error& error) {
        if (options.step || error.kind() == ErrorKind::kRead) throw;
        return error.what();
      }
      return "";
    });
    const auto failed = std::find_if(outcomes.begin(), outcomes.end(),
                                     [](const std::string& text) { return !text.empty(); });
    if (failed != outcomes.end()) {
      warnings.insert(*failed);
      left_out.insert(reader->manifest().sha256);
      continue;
    }
    const Manifest& manifest = reader->manifest();
    together(group, kLoad, [&]() -> std::string {
      try {
        take_each(all, *reader, put_taken);
      } catch (const Error& error) {
        throw Error(error.kind(),
                    std::string(error.what()) +
                        " It was whole a moment ago; the state is now loaded in part.");
      }
      for (const auto& stateful : state.statefuls()) stateful->finish(manifest.values);
      return "";
    });
    LoadReport report{.step = manifest.step,
                      .folder = reader->folder(),
                      .saved_world = manifest.world,
                      .values = manifest.values,
                      .warnings = {warnings.begin(), warnings.end()}};
    if (static_cast<std::size_t>(rank) < manifest.rank_values.size()) {
      report.rank_values = manifest.rank_values[static_cast<std::size_t>(rank)];
    }
    if (rank == 0) {
      for (const std::string& warning : report.warnings) {
        log_line(options, "checkpoint.load: step " + std::to_string(report.step) +
                              " is loaded instead of a newer one: " + warning);
      }
    }
    return report;
  }
}

at::Tensor read_tensor(const TensorSource& source, const TensorInfo& tensor) {
  at::Tensor result = at::empty(tensor.shape, scalar_type_of(tensor.dtype));
  const Region whole{std::vector<std::int64_t>(tensor.shape.size(), 0), tensor.shape};
  if (result.numel() > 0) {
    source.read(tensor.name, whole, static_cast<std::byte*>(result.mutable_data_ptr()));
  }
  return result;
}

}  // namespace tessera::checkpoint
