#include "dlrm/training_data.h"

#include <algorithm>
#include <numeric>

#include "data/converted.h"
#include "data/raw_log.h"
#include "dlrm/from_settings.h"
#include "dlrm/open_raw.h"

namespace tessera::workloads::dlrm {
namespace {

// The log of a table. `tessera train` has made it before the ranks were started.
std::string log_name(const std::string& data, const Settings& settings) {
  const bool converts = !settings.schema.empty() && data::is_table(data);
  return converts ? data::convert_once(data, settings.schema).path : data;
}

OpenedLog open_one(const Settings& settings, const std::string& data,
                   const std::shared_ptr<TextCheck>& texts = nullptr) {
  return settings.is_unlimited() ? open_raw(data, settings.schema, log_options(settings), texts)
                                 : open_log(log_name(data, settings), log_options(settings));
}

}  // namespace

TrainingData open_data(const Settings& settings, const std::string& data, Purpose purpose,
                       const comm::Group& world) {
  const bool trains = purpose == Purpose::kTrain;
  TrainingData opened;
  if (trains && settings.checks_texts() && world.rank() == 0) {
    opened.texts = std::make_shared<TextCheck>();
  }
  if (trains && settings.is_unlimited() && settings.is_stream()) {
    opened.stream = std::make_unique<StreamBatches>(
        StreamBatchesOptions{data, settings.follow, settings.batch, teller_of(opened.texts)},
        data::schema_or_guess(settings.schema, data), world);
    opened.log.log = std::make_shared<const UnseenLog>(opened.stream->schema());
  } else {
    opened.log = open_one(settings, data, opened.texts);
  }
  if (!trains || settings.eval_data.empty()) return opened;
  opened.other = open_one(settings, settings.eval_data).log;
  if (opened.other->schema() != opened.log.log->schema()) {
    throw DataError(settings.eval_data + ": has other columns or tables than " + data +
                    ". Convert both with the same schema.");
  }
  return opened;
}

std::vector<double> ids_per_sample(const ClickLog& log) {
  constexpr std::int64_t kSamples = 4096;
  const std::vector<Feature>& features = log.schema().features;
  std::vector<double> means;
  for (const Feature& feature : features) means.push_back(static_cast<double>(feature.bag_size));
  if (std::find(means.begin(), means.end(), 0.0) == means.end()) return means;
  const std::int64_t size = log.num_samples();
  SampleBlock block;
  log.read(0, size < 0 ? kSamples : std::min(size, kSamples), block);
  const std::int32_t* length = block.lengths.data();
  for (double& mean : means) {
    const std::int32_t* const end = length + block.num_samples;
    mean = static_cast<double>(std::accumulate(length, end, std::int64_t{0})) /
           static_cast<double>(std::max<std::int64_t>(block.num_samples, 1));
    length = end;
  }
  return means;
}

Ranges ranges_of(const Settings& settings, const TrainingData& data, const comm::Group& group,
                 Purpose purpose) {
  Ranges ranges;
  for (BatchSourceOptions* range : {&ranges.training, &ranges.judged}) {
    range->batch_size = settings.batch;
    range->rank = group.rank();
    range->world = group.size();
  }
  ranges.judged.drop_last = false;
  const std::int64_t count = data.log.log->num_samples();
  if (settings.shuffle && purpose == Purpose::kTrain) {
    ranges.training.shuffle_seed = static_cast<std::uint64_t>(settings.seed);
  }
  if (purpose == Purpose::kJudge && count >= 0) {
    ranges.training.drop_last = false;
  } else if (data.other != nullptr) {
    ranges.judged.end = data.other->num_samples();
    ranges.training.end = count;
  } else if (count < 0) {
    ranges.judged.begin = kJudgedBegin;
    ranges.judged.end = kJudgedBegin + settings.eval_samples;
  } else {
    const std::int64_t judged =
        std::min(settings.eval_samples, std::max<std::int64_t>(1, count / 10));
    ranges.judged.begin = count - judged;
    ranges.judged.end = count;
    ranges.training.end = count - judged;
  }
  return ranges;
}

}  // namespace tessera::workloads::dlrm
