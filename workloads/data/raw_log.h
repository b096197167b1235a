// data/raw_log.h — a table of text as a click log whose ids are any 64 bits. No LibTorch.

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "data/read_table.h"
#include "data/schema.h"
#include "dlrm/click_log.h"

namespace tessera::workloads::data {

/// Files read whole into memory, their ids raw (TableOptions::raw_ids). Longer ones: RawStream.
class RawLog : public dlrm::ClickLog {
 public:
  /// Bad records are left out, counted and named in the report. Throws DataError for files that
  /// cannot be read or have no good record. `sees_text` as in TableOptions.
  RawLog(const std::vector<std::string>& paths, const Schema& schema,
         std::function<void(std::string_view, std::int64_t)> sees_text = nullptr);

  const dlrm::ClickSchema& schema() const noexcept override { return schema_; }
  std::int64_t num_samples() const noexcept override { return report_.num_samples; }
  void read(std::int64_t first, std::int64_t count, dlrm::SampleBlock& block) const override;
  const TableReport& report() const noexcept { return report_; }

 private:
  struct Bags {
    std::vector<std::int32_t> lengths;
    std::vector<std::int64_t> first{0};  // id of every sample, and the end
    std::vector<std::int64_t> ids;
  };

  void take(const dlrm::SampleBlock& block);

  std::string name_;
  dlrm::ClickSchema schema_;
  TableReport report_;
  std::vector<float> labels_;
  std::vector<float> dense_;
  std::vector<Bags> features_;
};

/// The schema of tables: of the file `path`; without one, guessed from the beginning of `data`.
Schema schema_or_guess(const std::string& path, const std::string& data);

/// Lines about records that were left out, or nothing.
std::string notes_of(const std::string& name, const TableReport& report);

}  // namespace tessera::workloads::data
