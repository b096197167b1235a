// A stream of Arrow's C data interface as a table.

#include <optional>
#include <utility>

#include "data/arrow_abi.h"
#include "data/columns.h"

namespace tessera::workloads::data {
namespace {

// What Arrow hands over, and what gives it back.
template <class Struct>
std::shared_ptr<Struct> owned(Struct taken) {
  return {new Struct(taken), [](Struct* one) {
            if (one->release != nullptr) one->release(one);
            delete one;
          }};
}

class StreamSource final : public ColumnSource {
 public:
  StreamSource(ArrowArrayStream& stream, std::string name)
      : name_(std::move(name)), stream_(owned(std::exchange(stream, {}))) {
    ArrowSchema taken{};
    if (stream_->get_schema(stream_.get(), &taken) != 0) fail();
    schema_ = owned(taken);
    if (std::string_view(schema_->format) != "+s") {
      throw DataError(name_ + ": is one column, not a table.");
    }
    for (std::int64_t i = 0; i < schema_->n_children; ++i) {
      names_.emplace_back(schema_->children[i]->name);
      chosen_.push_back(static_cast<std::size_t>(i));
    }
    dictionaries_.resize(names_.size());
  }

  const std::vector<std::string>& names() const noexcept override { return names_; }
  void choose(const std::vector<std::size_t>& columns) override { chosen_ = columns; }

  bool next(std::vector<Column>& columns) override {
    columns.clear();
    ArrowArray taken{};
    if (stream_->get_next(stream_.get(), &taken) != 0) fail();
    if (taken.release == nullptr) return false;
    const std::shared_ptr<ArrowArray> batch = owned(taken);
    if (batch->n_children != schema_->n_children) {
      throw DataError(name_ + ": has other columns in another part of it.");
    }
    for (const std::size_t i : chosen_) {
      // Rows of the table are rows of its columns, from the table's offset on.
      ArrowArray column = *batch->children[i];
      if (column.length < batch->offset + batch->length) {
        throw DataError(name_ + ": column '" + names_[i] + "' is shorter than the table.");
      }
      column.offset += batch->offset;
      column.length = batch->length;
      try {
        columns.push_back(column_of(*schema_->children[i], column, batch, &dictionaries_[i]));
      } catch (const DataError& error) {
        throw DataError(name_ + ": " + error.what());
      }
    }
    return true;
  }

 private:
  [[noreturn]] void fail() const {
    const char* text = stream_->get_last_error(stream_.get());
    throw DataError(name_ + ": cannot be read: " + (text != nullptr ? text : "no reason given") +
                    ".");
  }

  std::string name_;
  std::shared_ptr<ArrowArrayStream> stream_;
  std::shared_ptr<ArrowSchema> schema_;
  std::vector<std::string> names_;
  std::vector<std::size_t> chosen_;
  std::vector<KnownDictionary> dictionaries_;  // of the columns that have one
};

}  // namespace

std::unique_ptr<ColumnSource> open_stream(ArrowArrayStream& stream, const std::string& name) {
  return std::make_unique<StreamSource>(stream, name);
}

}  // namespace tessera::workloads::data
