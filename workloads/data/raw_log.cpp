#include "data/raw_log.h"

#include <algorithm>
#include <utility>

namespace tessera::workloads::data {

using dlrm::SampleBlock;

RawLog::RawLog(const std::vector<std::string>& paths, const Schema& schema,
               std::function<void(std::string_view, std::int64_t)> sees_text)
    : name_(paths.front()), schema_(schema.click_schema()), features_(schema.features.size()) {
  schema_.origin = schema.text();
  TableOptions options;
  options.skips_bad = true;
  options.raw_ids = true;
  options.sees_text = std::move(sees_text);
  report_ = read_tables(paths, schema, options, [this](SampleBlock& block) { take(block); });
  if (report_.num_samples > 0) return;
  const std::string why = report_.first_bad.empty() ? "" : " The first: " + report_.first_bad[0];
  throw DataError(name_ + ": has no good record among " + std::to_string(report_.num_records) +
                  "." + why + (why.empty() ? "" : "."));
}

void RawLog::take(const SampleBlock& block) {
  labels_.insert(labels_.end(), block.labels.begin(), block.labels.end());
  dense_.insert(dense_.end(), block.dense.begin(), block.dense.end());
  const auto count = static_cast<std::ptrdiff_t>(block.num_samples);
  auto length = block.lengths.begin();
  auto id = block.ids.begin();
  for (Bags& bags : features_) {
    for (const auto end = length + count; length != end; ++length) {
      bags.lengths.push_back(*length);
      bags.first.push_back(bags.first.back() + *length);
    }
    const auto added = bags.first.back() - static_cast<std::int64_t>(bags.ids.size());
    bags.ids.insert(bags.ids.end(), id, id + added);
    id += added;
  }
}

void RawLog::read(std::int64_t first, std::int64_t count, SampleBlock& block) const {
  check_range(*this, first, count, name_);
  const auto begin = static_cast<std::ptrdiff_t>(first);
  const auto end = begin + static_cast<std::ptrdiff_t>(count);
  const auto columns = static_cast<std::ptrdiff_t>(schema_.num_dense);
  block.num_samples = count;
  block.labels.assign(labels_.begin() + begin, labels_.begin() + end);
  block.dense.assign(dense_.begin() + begin * columns, dense_.begin() + end * columns);
  block.lengths.clear();
  block.ids.clear();
  for (const Bags& bags : features_) {
    block.lengths.insert(block.lengths.end(), bags.lengths.begin() + begin,
                         bags.lengths.begin() + end);
    block.ids.insert(block.ids.end(),
                     bags.ids.begin() + bags.first[static_cast<std::size_t>(begin)],
                     bags.ids.begin() + bags.first[static_cast<std::size_t>(end)]);
  }
}

Schema schema_or_guess(const std::string& path, const std::string& data) {
  if (!path.empty()) return read_schema(path);
  return parse_schema(guess_schema(data), data + " (guessed)");
}

std::string notes_of(const std::string& name, const TableReport& report) {
  if (report.num_bad == 0) return "";
  std::string notes = "data     " + std::to_string(report.num_bad) + " bad records of " +
                      std::to_string(report.num_records) + " in " + name + " are left out\n";
  for (const std::string& bad : report.first_bad) notes += "         " + bad + "\n";
  return notes;
}

}  // namespace tessera::workloads::data
