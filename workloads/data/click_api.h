// data/click_api.h — click logs from any language: write, read, and convert tables. C functions of
// libtessera_data.so, which needs neither LibTorch nor Python; tessera.data in Python stands on
// them, and C++ has the classes of dlrm/click_file.h.
//
// Functions return 0, or not, and then `error` (of `room` bytes) says why. Nothing is thrown.

#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ArrowArrayStream;
struct tessera_click_writer;
struct tessera_click_file;

/// A feature: a bag of ids per sample.
struct tessera_click_feature {
  const char* name;
  int64_t num_rows;  // ids are below it; 0: any ids, a table that grows
  int64_t bag_size;  // ids per sample; 0 if it varies
  int means;         // rows of a bag are averaged; otherwise added up
  int64_t dim;       // columns of the table; 0: as many as the others have
};

/// Begins a log, which appears under its name when it is finished. `dense_names` may be NULL.
int tessera_click_writer_open(const char* path, int64_t num_dense, const char* const* dense_names,
                              const struct tessera_click_feature* features, int64_t num_features,
                              int half_dense, struct tessera_click_writer** out, char* error,
                              size_t room);
/// Labels [samples], dense [samples, num_dense], lengths [features, samples], ids feature by
/// feature and sample by sample.
int tessera_click_writer_append(struct tessera_click_writer* writer, int64_t num_samples,
                                const float* labels, const float* dense, const int32_t* lengths,
                                const int64_t* ids, int64_t num_ids, char* error, size_t room);
/// An error without samples.
int tessera_click_writer_finish(struct tessera_click_writer* writer, char* error, size_t room);
/// What is not finished leaves nothing behind.
void tessera_click_writer_close(struct tessera_click_writer* writer);

int tessera_click_file_open(const char* path, struct tessera_click_file** out, char* error,
                            size_t room);
/// What it holds, in JSON; lives as long as the file.
const char* tessera_click_file_description(const struct tessera_click_file* file);
/// The samples [first, first + count). The arrays, laid out as above, live until the next call.
int tessera_click_file_read(struct tessera_click_file* file, int64_t first, int64_t count,
                            const float** labels, const float** dense, const int32_t** lengths,
                            const int64_t** ids, int64_t* num_ids, char* error, size_t room);
/// Reads every byte and compares every sum.
int tessera_click_file_verify(const struct tessera_click_file* file, char* error, size_t room);
void tessera_click_file_close(struct tessera_click_file* file);

/// Writes the log of a table that comes through Arrow's C data interface, by a schema in TOML
/// (docs/your_data.md). Releases the stream. `counts` takes records, samples and bad records.
int tessera_click_convert(struct ArrowArrayStream* table, const char* schema, const char* path,
                          int skips_bad, int has_no_label, int half_dense, int64_t counts[3],
                          char* error, size_t room);

#ifdef __cplusplus
}
#endif
