// libtessera_parquet.so: Parquet by Arrow's C++ library, which the pyarrow wheel carries.

#include <cstdio>
#include <memory>
#include <numeric>
#include <vector>

#include <arrow/c/bridge.h>
#include <arrow/io/file.h>
#include <arrow/record_batch.h>
#include <arrow/status.h>
#include <arrow/table.h>
#include <parquet/arrow/reader.h>
#include <parquet/arrow/schema.h>
#include <parquet/arrow/writer.h>

#include "data/parquet_plugin.h"

namespace {

// The stream keeps what it reads from.
class Opened final : public arrow::RecordBatchReader {
 public:
  Opened(std::unique_ptr<parquet::arrow::FileReader> file,
         std::shared_ptr<arrow::RecordBatchReader> batches)
      : file_(std::move(file)), batches_(std::move(batches)) {}
  std::shared_ptr<arrow::Schema> schema() const override { return batches_->schema(); }
  arrow::Status ReadNext(std::shared_ptr<arrow::RecordBatch>* batch) override {
    return batches_->ReadNext(batch);
  }

 private:
  std::unique_ptr<parquet::arrow::FileReader> file_;
  std::shared_ptr<arrow::RecordBatchReader> batches_;
};

// Leaves of the top-level columns that are asked for.
std::vector<int> leaves_of(const parquet::arrow::FileReader& file, const int* columns,
                           int num_columns) {
  std::vector<int> leaves;
  const parquet::SchemaDescriptor* schema =
      const_cast<parquet::arrow::FileReader&>(file).parquet_reader()->metadata()->schema();
  if (num_columns < 0) {
    leaves.resize(static_cast<std::size_t>(schema->num_columns()));
    std::iota(leaves.begin(), leaves.end(), 0);
    return leaves;
  }
  const parquet::schema::GroupNode* root = schema->group_node();
  for (int i = 0; i < num_columns; ++i) {
    for (int leaf = 0; leaf < schema->num_columns(); ++leaf) {
      if (schema->GetColumnRoot(leaf) == root->field(columns[i]).get()) leaves.push_back(leaf);
    }
  }
  return leaves;
}

// Whether every page of a text column holds numbers of a dictionary: it is then read as such, and
// no text is copied.
bool is_all_dictionary(const parquet::FileMetaData& file, int leaf) {
  const parquet::ColumnDescriptor* column = file.schema()->Column(leaf);
  if (column->physical_type() != parquet::Type::BYTE_ARRAY || column->max_repetition_level() > 0) {
    return false;
  }
  for (int group = 0; group < file.num_row_groups(); ++group) {
    const auto stats = file.RowGroup(group)->ColumnChunk(leaf)->encoding_stats();
    if (stats.empty()) return false;
    for (const parquet::PageEncodingStats& one : stats) {
      const bool is_data = one.page_type == parquet::PageType::DATA_PAGE ||
                           one.page_type == parquet::PageType::DATA_PAGE_V2;
      if (is_data && one.encoding != parquet::Encoding::RLE_DICTIONARY &&
          one.encoding != parquet::Encoding::PLAIN_DICTIONARY) {
        return false;
      }
    }
  }
  return true;
}

arrow::Status read(const char* path, const int* columns, int num_columns, std::int64_t batch_rows,
                   ArrowArrayStream* out) {
  ARROW_ASSIGN_OR_RAISE(auto input, arrow::io::ReadableFile::Open(path));
  parquet::ArrowReaderProperties properties;
  properties.set_use_threads(false);  // a core per program, as for texts
  properties.set_batch_size(batch_rows);
  // Columns are read piece by piece into the same memory, not as a whole before the first row.
  properties.set_pre_buffer(false);
  parquet::ReaderProperties pieces = parquet::default_reader_properties();
  pieces.enable_buffered_stream();
  pieces.set_buffer_size(std::int64_t{256} << 10);
  parquet::arrow::FileReaderBuilder builder;
  ARROW_RETURN_NOT_OK(builder.Open(std::move(input), pieces));
  const auto facts = builder.raw_reader()->metadata();
  for (int leaf = 0; leaf < facts->num_columns(); ++leaf) {
    if (is_all_dictionary(*facts, leaf)) properties.set_read_dictionary(leaf, true);
  }
  builder.properties(properties);
  std::unique_ptr<parquet::arrow::FileReader> file;
  ARROW_RETURN_NOT_OK(builder.Build(&file));
  std::vector<int> groups(static_cast<std::size_t>(file->num_row_groups()));
  std::iota(groups.begin(), groups.end(), 0);
  ARROW_ASSIGN_OR_RAISE(std::shared_ptr<arrow::RecordBatchReader> batches,
                        file->GetRecordBatchReader(groups, leaves_of(*file, columns, num_columns)));
  return arrow::ExportRecordBatchReader(
      std::make_shared<Opened>(std::move(file), std::move(batches)), out);
}

arrow::Status write(const char* path, ArrowArrayStream* from) {
  ARROW_ASSIGN_OR_RAISE(auto batches, arrow::ImportRecordBatchReader(from));
  ARROW_ASSIGN_OR_RAISE(auto output, arrow::io::FileOutputStream::Open(path));
  ARROW_ASSIGN_OR_RAISE(auto writer, parquet::arrow::FileWriter::Open(
                                         *batches->schema(), arrow::default_memory_pool(), output));
  for (;;) {
    std::shared_ptr<arrow::RecordBatch> batch;
    ARROW_RETURN_NOT_OK(batches->ReadNext(&batch));
    if (batch == nullptr) break;
    ARROW_RETURN_NOT_OK(writer->WriteRecordBatch(*batch));
  }
  ARROW_RETURN_NOT_OK(writer->Close());
  return output->Close();
}

// Nothing is thrown over the border.
template <class Work>
int answer(char* error, std::size_t room, const Work& work) {
  std::string text;
  try {
    const arrow::Status status = work();
    if (status.ok()) return 0;
    text = status.message();
  } catch (const std::exception& thrown) {
    text = thrown.what();
  }
  std::snprintf(error, room, "%s", text.c_str());
  return 1;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int tessera_parquet_read_1(
    const char* path, const int* columns, int num_columns, std::int64_t batch_rows,
    ArrowArrayStream* out, char* error, std::size_t room) {
  return answer(error, room, [&] { return read(path, columns, num_columns, batch_rows, out); });
}

extern "C" __attribute__((visibility("default"))) int tessera_parquet_write_1(
    const char* path, ArrowArrayStream* from, char* error, std::size_t room) {
  return answer(error, room, [&] { return write(path, from); });
}
