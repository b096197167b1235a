// Parquet files, through a library that is loaded when the first one is met.

#include <dlfcn.h>
#include <glob.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "data/columns.h"
#include "data/parquet_plugin.h"

namespace tessera::workloads::data {
namespace {

// Arrow makes the dictionary of a column anew for every batch: not too small. Nor too large: fresh
// memory costs more than what is read into it.
constexpr std::int64_t kBatchRows = 65536;
constexpr const char* kLibrary = "libtessera_parquet.so";
constexpr const char* kVariable = "TESSERA_PARQUET";

struct Plugin {
  TesseraParquetRead* read = nullptr;
  TesseraParquetWrite* write = nullptr;
  std::string problem = {};  // why it is not there
};

// Where the build, an installation and a wheel put it, seen from the program.
std::vector<std::string> places() {
  if (const char* told = std::getenv(kVariable)) return {told};
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  std::vector<std::string> all;
  for (const char* up : {"..", "../.."}) {
    for (const char* folder : {"lib", TESSERA_LIBDIR}) {
      all.push_back((program / up / folder / kLibrary).lexically_normal().string());
    }
  }
  // A wheel's program lies beside Python's, the library in the package.
  glob_t found{};
  const std::string package = program / "../lib/python3*/site-packages/tessera/lib" / kLibrary;
  if (::glob(package.c_str(), 0, nullptr, &found) == 0) all.emplace_back(found.gl_pathv[0]);
  ::globfree(&found);
  return all;
}

Plugin load() {
  Plugin plugin;
  for (const std::string& path : places()) {
    if (::access(path.c_str(), F_OK) != 0) continue;
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      plugin.problem = dlerror();
      continue;
    }
    plugin.read = reinterpret_cast<TesseraParquetRead*>(dlsym(library, TESSERA_PARQUET_READ));
    plugin.write = reinterpret_cast<TesseraParquetWrite*>(dlsym(library, TESSERA_PARQUET_WRITE));
    if (plugin.read != nullptr && plugin.write != nullptr) return plugin;
    plugin.problem = path + " is of another release of Tessera";
  }
  if (plugin.problem.empty()) plugin.problem = std::string(kLibrary) + " is not there";
  return plugin;
}

const Plugin& plugin(const std::string& path) {
  static const Plugin kPlugin = load();
  if (kPlugin.read == nullptr) {
    throw DataError(
        path + ": Parquet needs Arrow, which comes with the Python package pyarrow (" +
        kPlugin.problem +
        "). Install it (a wheel: tessera-parallel[parquet]; otherwise build again), or write CSV.");
  }
  return kPlugin;
}

class ParquetSource final : public ColumnSource {
 public:
  explicit ParquetSource(std::string path) : path_(std::move(path)) { open(nullptr, -1); }

  const std::vector<std::string>& names() const noexcept override { return names_; }
  void choose(const std::vector<std::size_t>& columns) override {
    const std::vector<int> numbers(columns.begin(), columns.end());
    open(numbers.data(), static_cast<int>(numbers.size()));
  }
  bool next(std::vector<Column>& columns) override { return stream_->next(columns); }

 private:
  void open(const int* columns, int num_columns) {
    char error[1024] = "";
    ArrowArrayStream stream{};
    if (plugin(path_).read(path_.c_str(), columns, num_columns, kBatchRows, &stream, error,
                           sizeof(error)) != 0) {
      throw DataError(path_ + ": cannot be read: " + error + ".");
    }
    stream_ = open_stream(stream, path_);
    if (num_columns < 0) names_ = stream_->names();
  }

  std::string path_;
  std::vector<std::string> names_;  // of all columns, also where some are read
  std::unique_ptr<ColumnSource> stream_;
};

/// Numbers and scores as a stream that Arrow reads: parts of a vector, one after the other.
struct Scores {
  static constexpr std::int64_t kPart = 1 << 16;
  const std::vector<float>* probabilities = nullptr;
  std::int64_t done = 0;
};

struct Part {
  std::vector<std::int64_t> numbers;
  ArrowArray columns[2];
  ArrowArray* children[2];
  const void* table_buffers[1] = {nullptr};
  const void* buffers[2][2] = {};
};

struct Head {
  ArrowSchema columns[2];
  ArrowSchema* children[2];
};

int get_schema(ArrowArrayStream* /*stream*/, ArrowSchema* out) {
  auto* head = new Head{};
  const char* names[] = {"sample", "probability"};
  const char* formats[] = {"l", "f"};
  for (int i = 0; i < 2; ++i) {
    head->columns[i].format = formats[i];
    head->columns[i].name = names[i];
    head->columns[i].release = [](ArrowSchema* one) { one->release = nullptr; };
    head->children[i] = &head->columns[i];
  }
  *out = {};
  out->format = "+s";
  out->name = "";
  out->n_children = 2;
  out->children = head->children;
  out->private_data = head;
  out->release = [](ArrowSchema* one) {
    auto* own = static_cast<Head*>(one->private_data);
    for (ArrowSchema& column : own->columns) {
      if (column.release != nullptr) column.release(&column);
    }
    delete own;
    one->release = nullptr;
  };
  return 0;
}

int get_next(ArrowArrayStream* stream, ArrowArray* out) {
  auto& scores = *static_cast<Scores*>(stream->private_data);
  const auto total = static_cast<std::int64_t>(scores.probabilities->size());
  const std::int64_t count = std::min(Scores::kPart, total - scores.done);
  *out = {};
  if (count == 0) return 0;
  auto* part = new Part{};
  for (std::int64_t i = 0; i < count; ++i) part->numbers.push_back(scores.done + i);
  part->buffers[0][1] = part->numbers.data();
  part->buffers[1][1] = scores.probabilities->data() + scores.done;
  for (int i = 0; i < 2; ++i) {
    part->columns[i] = {};
    part->columns[i].length = count;
    part->columns[i].n_buffers = 2;
    part->columns[i].buffers = part->buffers[i];
    part->columns[i].release = [](ArrowArray* one) { one->release = nullptr; };
    part->children[i] = &part->columns[i];
  }
  scores.done += count;
  out->length = count;
  out->n_buffers = 1;
  out->buffers = part->table_buffers;
  out->n_children = 2;
  out->children = part->children;
  out->private_data = part;
  out->release = [](ArrowArray* one) {
    auto* own = static_cast<Part*>(one->private_data);
    for (ArrowArray& column : own->columns) {
      if (column.release != nullptr) column.release(&column);
    }
    delete own;
    one->release = nullptr;
  };
  return 0;
}

}  // namespace

std::unique_ptr<ColumnSource> open_parquet(const std::string& path) {
  return std::make_unique<ParquetSource>(path);
}

void write_scores_parquet(const std::string& path, const std::vector<float>& probabilities) {
  const Plugin& arrow = plugin(path);
  Scores scores{&probabilities};
  ArrowArrayStream stream{};
  stream.get_schema = get_schema;
  stream.get_next = get_next;
  stream.get_last_error = [](ArrowArrayStream*) -> const char* { return nullptr; };
  stream.release = [](ArrowArrayStream* one) { one->release = nullptr; };
  stream.private_data = &scores;
  const std::string draft = path + ".partial-" + std::to_string(::getpid());
  char error[1024] = "";
  const int code = arrow.write(draft.c_str(), &stream, error, sizeof(error));
  if (stream.release != nullptr) stream.release(&stream);
  std::error_code moved;
  if (code == 0) std::filesystem::rename(draft, path, moved);
  if (code == 0 && !moved) return;
  std::error_code removed;
  std::filesystem::remove(draft, removed);
  throw DataError(path + ": cannot be written: " + (code != 0 ? error : moved.message()) + ".");
}

}  // namespace tessera::workloads::data
