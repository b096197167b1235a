// data/parquet_plugin.h — what libtessera_parquet.so offers: Parquet files as tables of Arrow's C
// data interface. A library of its own, because it alone needs Arrow: programs load it when they
// meet a Parquet file.

#pragma once

#include <cstddef>
#include <cstdint>

#include "data/arrow_abi.h"

extern "C" {

/// Opens `path` for reading `num_columns` top-level columns, named by their numbers (-1: all), in
/// parts of at most `batch_rows` rows. 0, or not, and `error` then says why.
using TesseraParquetRead = int(const char* path, const int* columns, int num_columns,
                               std::int64_t batch_rows, ArrowArrayStream* out, char* error,
                               std::size_t room);
/// Writes all of `from`, which is released, to `path`.
using TesseraParquetWrite = int(const char* path, ArrowArrayStream* from, char* error,
                                std::size_t room);
}

#define TESSERA_PARQUET_READ "tessera_parquet_read_1"
#define TESSERA_PARQUET_WRITE "tessera_parquet_write_1"
