// What a server reads from the disk. An input is one letter and what it is about:
//
//   m  the description of a model: refused, or one that makes sense and comes back the same
//   d  a delta, with right sums: table, first and last column and number of rows, a byte each, the
//      rows as int64, then their numbers: refused and nothing has changed, or taken whole
//   p  bytes that stand in a file of a package instead of others: which file and where, a byte and
//      two, then the bytes: refused, or a package whose dense weights are finite

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>

#include "serving/model_info.h"
#include "serving/published.h"
#include "tessera/checkpoint/error.h"

using namespace tessera;
using namespace tessera::serving;

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

// A reader of the input; what is not there is 0.
class Bytes {
 public:
  explicit Bytes(std::string_view text) : text_(text) {}
  template <typename Number>
  Number take() {
    Number number{};
    const std::size_t count = std::min(sizeof(Number), text_.size());
    std::memcpy(&number, text_.data(), count);
    text_.remove_prefix(count);
    return number;
  }
  std::string_view rest() const { return text_; }

 private:
  std::string_view text_;
};

void try_model(std::string_view text) {
  ModelInfo model;
  try {
    model = decode_model(text, "m");
  } catch (const checkpoint::Error&) {
    return;
  }
  require(mixed_width(model) == model.top.front() && !dense_tensors(model).empty());
  for (const FeatureInfo& feature : model.features) require(feature.table < model.tables.size());
  const std::string again = encode_model(model);
  require(encode_model(decode_model(again, "m")) == again);
}

struct World {
  Published published;
  Model model{published.folder / "pkg", ModelOptions{.keep_versions = 1}};
  Samples samples{published.small, 4};
};

void try_delta(std::string_view text) {
  static World world;
  Published& published = world.published;
  Bytes bytes(text);
  Change change;
  change.table = bytes.take<std::uint8_t>() % 3;
  change.column_begin = bytes.take<std::uint8_t>() % SmallModel::kDim;
  change.column_end = change.column_begin + 1 +
                      bytes.take<std::uint8_t>() % (SmallModel::kDim - change.column_begin);
  const int count = bytes.take<std::uint8_t>() % 16;
  for (int i = 0; i < count; ++i) change.rows.push_back(bytes.take<std::int64_t>());
  const std::vector<std::int64_t> named = change.rows;
  const std::int64_t num_rows = published.small.rows[static_cast<std::size_t>(change.table)];
  change.values.resize(named.size() * SmallModel::kDim);
  for (float& x : change.values) x = bytes.take<float>();
  const std::int64_t step = published.step + 1;
  save_delta(published.small, published.root, step, published.step, {change});
  const auto was = Published::predict(world.model, world.samples);
  bool is_taken = true;
  try {
    world.model.update(checkpoint::Reader(published.root, step));
  } catch (const checkpoint::Error&) {
    is_taken = false;
  }
  bool ascends = true;
  for (std::size_t i = 0; i < named.size(); ++i) {
    ascends &= named[i] >= 0 && named[i] < num_rows && (i == 0 || named[i] > named[i - 1]);
  }
  require(ascends || !is_taken);
  const auto now = Published::predict(world.model, world.samples);
  if (!is_taken) require(now == was);
  for (const float logit : now) require(!std::isnan(logit));
  // The next one stands on the same base.
  std::filesystem::remove_all(published.root + "/" + checkpoint::folder_name(step));
  if (is_taken) require(world.model.roll_back(published.step));
}

// A file of a package with other bytes from some place on, for as long as this lives.
class Written {
 public:
  Written(const std::string& name, const std::string& whole, const std::string& changed,
          std::size_t place)
      : file_(::open(name.c_str(), O_WRONLY | O_CLOEXEC)), whole_(whole), place_(place) {
    write(changed);
  }
  Written(const Written&) = delete;
  Written& operator=(const Written&) = delete;
  ~Written() {
    write(whole_);
    ::close(file_);
  }

 private:
  void write(const std::string& text) const {
    const std::size_t count = text.size() - place_;
    require(::pwrite(file_, text.data() + place_, count, static_cast<off_t>(place_)) ==
            static_cast<ssize_t>(count));
    require(::ftruncate(file_, static_cast<off_t>(text.size())) == 0);
  }

  int file_;
  const std::string& whole_;
  std::size_t place_;
};

void try_package(std::string_view text) {
  static const Folder folder;
  static const std::string path = folder / "pkg";
  static const auto files = [] {
    export_model(SmallModel(), folder);
    std::vector<std::pair<std::string, std::string>> all;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      std::ifstream file(entry.path(), std::ios::binary);
      all.emplace_back(entry.path().string(),
                       std::string(std::istreambuf_iterator<char>(file), {}));
    }
    std::sort(all.begin(), all.end());
    return all;
  }();
  Bytes bytes(text);
  const auto& [name, whole] = files[bytes.take<std::uint8_t>() % files.size()];
  const std::size_t place = bytes.take<std::uint16_t>() % (whole.size() + 1);
  std::string changed = whole;
  const std::size_t count = std::min(bytes.rest().size(), changed.size() - place);
  changed.replace(place, count, bytes.rest());
  // Only what differs is written: a file of the same length keeps its place.
  const Written written(name, whole, changed, place);
  try {
    const Package package(path, /*verifies=*/true);
    require(changed == whole);  // the sums are of every byte
  } catch (const checkpoint::Error&) {
    require(changed != whole);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] == 'm') try_model(text);
  if (data[0] == 'd') try_delta(text);
  if (data[0] == 'p') try_package(text);
  return 0;
}
