// dlrm/training_data.h — which samples a training reads and which it is judged on.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dlrm/batch.h"
#include "dlrm/click_log.h"
#include "dlrm/open_log.h"
#include "dlrm/settings.h"
#include "dlrm/stream_batches.h"
#include "dlrm/text_check.h"
#include "tessera/comm/group.h"

namespace tessera::workloads::dlrm {

/// Where the judged samples of a log without end begin: training never comes so far.
inline constexpr std::int64_t kJudgedBegin = std::int64_t{1} << 40;

/// What a log is opened for: training on most of it, or judging all of it.
enum class Purpose : std::uint8_t { kTrain, kJudge };

struct TrainingData {
  OpenedLog log;
  std::shared_ptr<const ClickLog> other;  // to be judged on, if it is another log
  std::unique_ptr<StreamBatches> stream;  // trained on in place of the log, if there is one
  std::shared_ptr<TextCheck> texts;       // has seen the texts; on rank 0, if they are checked
};

/// Opens what the settings name, `data` in place of theirs. Collective where it is a stream.
/// Throws DataError for a log that cannot be read, and for two of other columns.
TrainingData open_data(const Settings& settings, const std::string& data, Purpose purpose,
                       const comm::Group& world);

/// How many ids a sample has of each feature, in the mean of the first samples of the log where
/// that varies.
std::vector<double> ids_per_sample(const ClickLog& log);

struct Ranges {
  BatchSourceOptions training;
  BatchSourceOptions judged;
};

Ranges ranges_of(const Settings& settings, const TrainingData& data, const comm::Group& group,
                 Purpose purpose);

}  // namespace tessera::workloads::dlrm
