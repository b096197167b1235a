#include "data/click_api.h"

#include <cstdio>
#include <exception>

#include <nlohmann/json.hpp>

#include "data/arrow_abi.h"
#include "data/columns.h"
#include "data/read_table.h"
#include "dlrm/click_file.h"
#include "tessera/core/export.h"

namespace data = tessera::workloads::data;
namespace dlrm = tessera::workloads::dlrm;
using Json = nlohmann::ordered_json;

struct tessera_click_writer {
  dlrm::ClickFileWriter writer;
  std::size_t num_dense;
  std::size_t num_features;
  dlrm::SampleBlock block = {};
};

struct tessera_click_file {
  dlrm::ClickFile file;
  std::string description;
  dlrm::SampleBlock block = {};
};

namespace {

template <class Work>
int answer(char* error, size_t room, const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::exception& thrown) {
    std::snprintf(error, room, "%s", thrown.what());
    return 1;
  }
}

std::string description_of(const dlrm::ClickFile& file) {
  const dlrm::ClickFileLayout& layout = file.layout();
  Json all{{"samples", layout.num_samples},
           {"dense", layout.schema.num_dense},
           {"dense_names", layout.schema.dense_names},
           {"half_dense", layout.half_dense},
           {"version", layout.version},
           {"schema", layout.schema.origin},
           {"features", Json::array()}};
  for (const dlrm::Feature& feature : layout.schema.features) {
    all["features"].push_back({{"name", feature.name},
                               {"rows", feature.num_rows},
                               {"bag_size", feature.bag_size},
                               {"pooling", feature.means ? "mean" : "sum"},
                               {"dim", feature.dim}});
  }
  return all.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

#define TESSERA_C extern "C" TESSERA_API

TESSERA_C int tessera_click_writer_open(const char* path, int64_t num_dense,
                                        const char* const* dense_names,
                                        const tessera_click_feature* features, int64_t num_features,
                                        int half_dense, tessera_click_writer** out, char* error,
                                        size_t room) {
  return answer(error, room, [&] {
    dlrm::ClickSchema schema;
    schema.num_dense = num_dense;
    for (int64_t i = 0; dense_names != nullptr && i < num_dense; ++i) {
      schema.dense_names.emplace_back(dense_names[i]);
    }
    for (int64_t i = 0; i < num_features; ++i) {
      const tessera_click_feature& one = features[i];
      schema.features.push_back({one.name, one.num_rows, one.bag_size, one.means != 0, one.dim});
    }
    dlrm::ClickFileOptions options;
    options.half_dense = half_dense != 0;
    *out = new tessera_click_writer{dlrm::ClickFileWriter(path, schema, options),
                                    static_cast<std::size_t>(num_dense),
                                    static_cast<std::size_t>(num_features)};
  });
}

TESSERA_C int tessera_click_writer_append(tessera_click_writer* writer, int64_t num_samples,
                                          const float* labels, const float* dense,
                                          const int32_t* lengths, const int64_t* ids,
                                          int64_t num_ids, char* error, size_t room) {
  return answer(error, room, [&] {
    const auto count = static_cast<std::size_t>(num_samples);
    dlrm::SampleBlock& block = writer->block;
    block.num_samples = num_samples;
    block.labels.assign(labels, labels + count);
    block.dense.assign(dense, dense + count * writer->num_dense);
    block.lengths.assign(lengths, lengths + count * writer->num_features);
    block.ids.assign(ids, ids + num_ids);
    writer->writer.append(block);
  });
}

TESSERA_C int tessera_click_writer_finish(tessera_click_writer* writer, char* error, size_t room) {
  return answer(error, room, [&] { writer->writer.finish(); });
}

TESSERA_C void tessera_click_writer_close(tessera_click_writer* writer) { delete writer; }

TESSERA_C int tessera_click_file_open(const char* path, tessera_click_file** out, char* error,
                                      size_t room) {
  return answer(error, room, [&] {
    auto file =
        std::unique_ptr<tessera_click_file>(new tessera_click_file{dlrm::ClickFile(path), ""});
    file->description = description_of(file->file);
    *out = file.release();
  });
}

TESSERA_C const char* tessera_click_file_description(const tessera_click_file* file) {
  return file->description.c_str();
}

TESSERA_C int tessera_click_file_read(tessera_click_file* file, int64_t first, int64_t count,
                                      const float** labels, const float** dense,
                                      const int32_t** lengths, const int64_t** ids,
                                      int64_t* num_ids, char* error, size_t room) {
  return answer(error, room, [&] {
    file->file.read(first, count, file->block);
    *labels = file->block.labels.data();
    *dense = file->block.dense.data();
    *lengths = file->block.lengths.data();
    *ids = file->block.ids.data();
    *num_ids = static_cast<int64_t>(file->block.ids.size());
  });
}

TESSERA_C int tessera_click_file_verify(const tessera_click_file* file, char* error, size_t room) {
  return answer(error, room, [&] { file->file.verify(); });
}

TESSERA_C void tessera_click_file_close(tessera_click_file* file) { delete file; }

TESSERA_C int tessera_click_convert(ArrowArrayStream* table, const char* schema, const char* path,
                                    int skips_bad, int has_no_label, int half_dense,
                                    int64_t counts[3], char* error, size_t room) {
  return answer(error, room, [&] {
    const auto source = data::open_stream(*table, "the table");
    const data::Schema columns = data::parse_schema(schema, "the schema");
    dlrm::ClickFileOptions options;
    options.half_dense = half_dense != 0;
    dlrm::ClickFileWriter writer(path, columns.click_schema(), options);
    data::TableOptions reading;
    reading.skips_bad = skips_bad != 0;
    reading.has_no_label = has_no_label != 0;
    const data::TableReport report =
        data::read_columns(*source, "the table", columns, reading,
                           [&](dlrm::SampleBlock& samples) { writer.append(samples); });
    counts[0] = report.num_records;
    counts[1] = report.num_samples;
    counts[2] = report.num_bad;
    if (report.num_samples == 0) throw data::DataError("the table: there is no sample in it.");
    writer.finish();
  });
}
