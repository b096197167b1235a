#include "dlrm/criteo.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "core/cores.h"
#include "core/start_threads.h"
#include "data/content.h"
#include "dlrm/text_blocks.h"

namespace tessera::workloads::dlrm {
namespace {

// What one thread parses at a time. Fixed, so that blocks do not depend on the number of threads.
constexpr std::size_t kBlockBytes = std::size_t{4} << 20;
constexpr std::int64_t kFields = 1 + kCriteoDense + kCriteoFeatures;
constexpr std::uint8_t kNoDigit = 255;

constexpr std::array<std::uint8_t, 256> make_digits() {
  std::array<std::uint8_t, 256> digits{};
  digits.fill(kNoDigit);
  for (std::uint8_t i = 0; i < 10; ++i) digits[static_cast<std::size_t>('0' + i)] = i;
  for (std::uint8_t i = 0; i < 6; ++i) {
    digits[static_cast<std::size_t>('a' + i)] = static_cast<std::uint8_t>(10 + i);
    digits[static_cast<std::size_t>('A' + i)] = static_cast<std::uint8_t>(10 + i);
  }
  return digits;
}
constexpr std::array<std::uint8_t, 256> kDigits = make_digits();

float log_of(std::int64_t count) {
  static const std::vector<float> kTable = [] {
    std::vector<float> table(4096);
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = std::log1p(static_cast<float>(i));
    return table;
  }();
  if (count < 0) return 0;
  if (count < static_cast<std::int64_t>(kTable.size())) {
    return kTable[static_cast<std::size_t>(count)];
  }
  return std::log1p(static_cast<float>(count));
}

// What a file holds, fit for a terminal.
std::string quoted(std::string_view field) {
  std::string text = "'";
  for (const char c : field.substr(0, 24)) text += c >= ' ' && c <= '~' ? c : '?';
  return text + (field.size() > 24 ? "…'" : "'");
}

// At most 18 digits: no overflow.
bool parse_count(const char* begin, const char* end, float& value) {
  if (begin == end) {
    value = 0;
    return true;
  }
  const bool is_negative = *begin == '-';
  begin += is_negative ? 1 : 0;
  if (begin == end || end - begin > 18) return false;
  std::int64_t sum = 0;
  for (; begin < end; ++begin) {
    const std::uint8_t digit = kDigits[static_cast<std::uint8_t>(*begin)];
    if (digit > 9) return false;
    sum = sum * 10 + digit;
  }
  value = log_of(is_negative ? -sum : sum);
  return true;
}

bool parse_hex(const char* begin, const char* end, std::uint32_t& value) {
  if (end - begin > 8) return false;
  std::uint32_t sum = 0;
  std::uint8_t wrong = 0;
  for (; begin < end; ++begin) {
    const std::uint8_t digit = kDigits[static_cast<std::uint8_t>(*begin)];
    wrong |= digit;
    sum = sum << 4 | digit;
  }
  value = sum;
  return wrong < 16;
}

std::string wrong_number_of_fields(std::string_view line) {
  return "has " + std::to_string(std::ranges::count(line, '\t') + 1) + " fields; " +
         std::to_string(kFields) + " are needed";
}

/// What a thread made of a block of lines.
struct Chunk {
  SampleBlock samples;
  std::int64_t num_lines = 0;
  std::int64_t num_bad = 0;
  std::vector<CriteoReport::BadLine> first_bad;  // numbered from the block's first line, from 1
};

// The ids were written with room for every line; closes the gaps that bad lines left.
void close_gaps(SampleBlock& samples, std::size_t room) {
  const auto count = static_cast<std::size_t>(samples.num_samples);
  for (std::size_t f = 1; f < kCriteoFeatures && count != room; ++f) {
    std::memmove(samples.ids.data() + f * count, samples.ids.data() + f * room,
                 count * sizeof(std::int64_t));
  }
  samples.labels.resize(count);
  samples.dense.resize(count * kCriteoDense);
  samples.ids.resize(count * kCriteoFeatures);
  samples.lengths.assign(count * kCriteoFeatures, 1);
}

Chunk parse_chunk(std::string_view text, const CriteoOptions& options) {
  Chunk chunk;
  chunk.num_lines = std::ranges::count(text, '\n');
  if (!text.empty() && text.back() != '\n') ++chunk.num_lines;
  const auto room = static_cast<std::size_t>(chunk.num_lines);
  SampleBlock& samples = chunk.samples;
  samples.labels.resize(room);
  samples.dense.resize(room * kCriteoDense);
  samples.ids.resize(room * kCriteoFeatures);
  std::array<std::int64_t, kCriteoFeatures> ids;
  std::size_t count = 0;
  for (std::int64_t line_number = 1; !text.empty(); ++line_number) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    std::string problem =
        parse_criteo_line(line, options.features, samples.labels[count],
                          samples.dense.data() + count * kCriteoDense, ids.data());
    if (problem.empty()) {
      for (std::size_t f = 0; f < ids.size(); ++f) samples.ids[f * room + count] = ids[f];
      ++count;
      continue;
    }
    if (chunk.num_bad++ < options.num_named || options.strict) {
      chunk.first_bad.push_back({line_number, std::move(problem)});
      if (options.strict) break;
    }
  }
  samples.num_samples = static_cast<std::int64_t>(count);
  close_gaps(samples, room);
  return chunk;
}

/// Threads that read and parse ahead of the caller, at most a few blocks each.
class Parsers {
 public:
  Parsers(TextBlocks& text, const CriteoOptions& options) : text_(text), options_(options) {
    const int wanted = options.num_threads > 0 ? options.num_threads : core::cores_left();
    const int count = std::clamp(wanted, 1, 256);
    ahead_ = static_cast<std::size_t>(count) + 2;
    threads_ = core::start_threads(static_cast<std::size_t>(count), [this] { parse(); });
  }
  ~Parsers() {
    stop();
    for (std::thread& thread : threads_) thread.join();
  }
  Parsers(const Parsers&) = delete;
  Parsers& operator=(const Parsers&) = delete;

  /// The next chunk in the order of the text.
  std::optional<Chunk> next() {
    if (threads_.empty()) return parse_here();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] {
      return error_ != nullptr || done_.contains(taken_) || (has_ended_ && taken_ == started_);
    });
    if (error_ != nullptr) std::rethrow_exception(error_);
    if (!done_.contains(taken_)) return std::nullopt;
    auto node = done_.extract(taken_++);
    lock.unlock();
    changed_.notify_all();
    return std::move(node.mapped());
  }

 private:
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      has_ended_ = true;
    }
    text_.stop();
    changed_.notify_all();
  }

  /// The number of the block that is now in `memory`; nothing at the end.
  std::optional<std::size_t> read(std::vector<char>& memory, std::string_view& block) {
    const std::lock_guard one_reader(reading_);
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return has_ended_ || started_ < taken_ + ahead_; });
      if (has_ended_) return std::nullopt;
    }
    const auto found = text_.next(memory);
    const std::lock_guard lock(mutex_);
    if (!found) {
      has_ended_ = true;
      changed_.notify_all();
      return std::nullopt;
    }
    block = *found;
    return started_++;
  }

  // Where the system gives no thread at all.
  std::optional<Chunk> parse_here() {
    std::string_view block;
    if (!read(memory_, block)) return std::nullopt;
    ++taken_;
    return parse_chunk(block, options_);
  }

  void parse() {
    try {
      std::vector<char> memory;
      std::string_view block;
      while (const auto number = read(memory, block)) {
        Chunk chunk = parse_chunk(block, options_);
        {
          const std::lock_guard lock(mutex_);
          done_.emplace(*number, std::move(chunk));
        }
        changed_.notify_all();
      }
    } catch (...) {  // out of memory, or the text cannot be read
      {
        const std::lock_guard lock(mutex_);
        error_ = std::current_exception();
      }
      stop();
    }
  }

  TextBlocks& text_;
  const CriteoOptions& options_;
  std::size_t ahead_ = 0;
  std::mutex reading_;  // before mutex_
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::size_t, Chunk> done_;
  std::size_t started_ = 0;
  std::size_t taken_ = 0;
  bool has_ended_ = false;
  std::exception_ptr error_;
  std::vector<char> memory_;  // of parse_here
  std::vector<std::thread> threads_;
};

std::string name_of(const std::string& path) { return path == "-" ? "standard input" : path; }

void check_features(const std::string& path, const CriteoOptions& options) {
  if (options.features.size() != kCriteoFeatures) {
    throw DataError(path + ": " + std::to_string(options.features.size()) +
                    " features were asked for; Criteo's files have 26.");
  }
  for (const Feature& feature : options.features) {
    if (feature.num_rows < 1 || feature.bag_size != 1) {
      throw DataError(path + ": feature '" + feature.name + "' has " +
                      std::to_string(feature.num_rows) + " rows and bags of " +
                      std::to_string(feature.bag_size) + "; rows and bags of 1 are needed.");
    }
  }
}

}  // namespace

std::string parse_criteo_line(std::string_view line, const std::vector<Feature>& features,
                              float& label, float* dense, std::int64_t* ids) {
  std::array<const char*, kFields + 1> begins;
  const char* at = line.data();
  const char* end = at + line.size();
  std::size_t fields = 0;
  begins[fields++] = at;
  for (; at < end; ++at) {
    if (*at != '\t') continue;
    if (fields == kFields) return wrong_number_of_fields(line);
    begins[fields++] = at + 1;
  }
  if (fields != kFields) return wrong_number_of_fields(line);
  begins[fields] = end + 1;
  const auto field = [&](std::size_t i) {
    return std::string_view(begins[i], static_cast<std::size_t>(begins[i + 1] - 1 - begins[i]));
  };
  if (field(0) != "0" && field(0) != "1") return "label is " + quoted(field(0)) + ", not 0 or 1";
  label = *begins[0] == '1' ? 1 : 0;
  for (std::size_t d = 0; d < kCriteoDense; ++d) {
    if (!parse_count(begins[1 + d], begins[2 + d] - 1, dense[d])) {
      return "number " + std::to_string(d + 1) + " is " + quoted(field(1 + d)) + ", not an integer";
    }
  }
  for (std::size_t f = 0; f < kCriteoFeatures; ++f) {
    const std::size_t i = 1 + kCriteoDense + f;
    std::uint32_t hash = 0;
    if (!parse_hex(begins[i], begins[i + 1] - 1, hash)) {
      return "category " + std::to_string(f + 1) + " is " + quoted(field(i)) +
             ", not 0 to 8 hexadecimal digits";
    }
    const auto rows = static_cast<std::uint64_t>(features[f].num_rows);
    ids[f] = rows > UINT32_MAX ? hash : hash % static_cast<std::uint32_t>(rows);
  }
  return {};
}

CriteoReport read_criteo(const std::string& path, const CriteoOptions& options,
                         const std::function<void(SampleBlock&)>& take) {
  check_features(path, options);
  ReadText read = options.unpack ? options.unpack(path) : nullptr;
  if (!read) data::check_text(path, data::front_of(path));
  const auto opened = read ? std::make_unique<TextBlocks>(path, kBlockBytes, std::move(read))
                           : std::make_unique<TextBlocks>(path, kBlockBytes);
  TextBlocks& text = *opened;
  CriteoReport report;
  Parsers parsers(text, options);
  while (auto chunk = parsers.next()) {
    for (CriteoReport::BadLine& bad : chunk->first_bad) {
      bad.line += report.num_lines;
      if (options.strict) {
        throw DataError(name_of(path) + ": line " + std::to_string(bad.line) + " " + bad.reason +
                        ".");
      }
      if (static_cast<std::int64_t>(report.first_bad.size()) < options.num_named) {
        report.first_bad.push_back(std::move(bad));
      }
    }
    report.num_lines += chunk->num_lines;
    report.num_bad += chunk->num_bad;
    report.num_samples += chunk->samples.num_samples;
    if (chunk->samples.num_samples > 0) take(chunk->samples);
  }
  report.num_bytes = text.num_bytes();
  return report;
}

CriteoReport read_criteo(const std::vector<std::string>& paths, const CriteoOptions& options,
                         const std::function<void(SampleBlock&)>& take) {
  CriteoReport all;
  CriteoOptions left = options;
  for (const std::string& path : paths) {
    left.num_named = options.num_named - static_cast<std::int64_t>(all.first_bad.size());
    CriteoReport one = read_criteo(path, left, take);
    all.num_lines += one.num_lines;
    all.num_samples += one.num_samples;
    all.num_bad += one.num_bad;
    all.num_bytes += one.num_bytes;
    for (CriteoReport::BadLine& bad : one.first_bad) {
      if (paths.size() > 1) bad.file = name_of(path);
      all.first_bad.push_back(std::move(bad));
    }
  }
  return all;
}

std::string place_of(const CriteoReport::BadLine& bad) {
  return (bad.file.empty() ? "" : bad.file + ": ") + "line " + std::to_string(bad.line);
}

void check_has_samples(const std::vector<std::string>& paths, const CriteoReport& report) {
  if (report.num_samples > 0) return;
  const bool is_one = paths.size() == 1;
  std::string reason = name_of(paths.at(0)) + (is_one ? ": holds" : " and the others: hold") +
                       " no sample in Criteo's format";
  if (!report.first_bad.empty()) {
    reason += ": " + place_of(report.first_bad[0]) + " " + report.first_bad[0].reason;
  }
  throw DataError(reason + ". For columns of your own: tessera data schema " + paths[0] +
                  ", then tessera data convert --schema.");
}

void append_criteo_lines(const SyntheticLog& log, std::int64_t first, std::int64_t count,
                         std::string& text) {
  const ClickSchema& schema = log.schema();
  bool fits = schema.num_dense == kCriteoDense && schema.features.size() == kCriteoFeatures;
  for (const Feature& feature : schema.features) fits = fits && feature.bag_size == 1;
  if (!fits) {
    throw DataError("synthetic: only 13 numbers and 26 bags of 1 id can be written as lines.");
  }
  SampleBlock samples;
  log.read(first, count, samples);
  std::array<std::int32_t, kCriteoDense> counts;
  const auto n = static_cast<std::size_t>(count);
  constexpr std::string_view kHex = "0123456789abcdef";
  for (std::size_t s = 0; s < n; ++s) {
    text += samples.labels[s] == 1 ? '1' : '0';
    log.counts(first + static_cast<std::int64_t>(s), counts);
    std::array<char, 16> number;
    for (const std::int32_t value : counts) {
      const auto end = std::to_chars(number.data(), number.data() + number.size(), value).ptr;
      text += '\t';
      text.append(number.data(), end);
    }
    for (std::size_t f = 0; f < kCriteoFeatures; ++f) {
      const auto id = static_cast<std::uint32_t>(samples.ids[f * n + s]);
      text += '\t';
      for (int shift = 28; shift >= 0; shift -= 4) text += kHex[id >> shift & 15U];
    }
    text += '\n';
  }
}

CriteoLog::CriteoLog(const std::string& path, const CriteoOptions& options)
    : CriteoLog(std::vector<std::string>{path}, options) {}

CriteoLog::CriteoLog(const std::vector<std::string>& paths, const CriteoOptions& options)
    : schema_{kCriteoDense, options.features} {
  std::int64_t first = 0;
  report_ = read_criteo(paths, options, [&](SampleBlock& samples) {
    samples.lengths = {};  // all 1
    first_samples_.push_back(first);
    first += samples.num_samples;
    blocks_.push_back(std::move(samples));
  });
}

CriteoLog::~CriteoLog() = default;

const ClickSchema& CriteoLog::schema() const noexcept { return schema_; }

std::int64_t CriteoLog::num_samples() const noexcept { return report_.num_samples; }

void CriteoLog::read(std::int64_t first, std::int64_t count, SampleBlock& block) const {
  check_range(*this, first, count, "criteo");
  const auto n = static_cast<std::size_t>(count);
  block.num_samples = count;
  block.labels.resize(n);
  block.dense.resize(n * kCriteoDense);
  block.ids.resize(n * kCriteoFeatures);
  block.lengths.assign(n * kCriteoFeatures, 1);
  if (n == 0) return;
  auto number = static_cast<std::size_t>(std::ranges::upper_bound(first_samples_, first) -
                                         first_samples_.begin() - 1);
  for (std::size_t done = 0; done < n; ++number) {
    const SampleBlock& from = blocks_[number];
    const std::int64_t at = first + static_cast<std::int64_t>(done) - first_samples_[number];
    const std::int64_t part =
        std::min(from.num_samples - at, count - static_cast<std::int64_t>(done));
    std::copy_n(from.labels.data() + at, part, block.labels.data() + done);
    std::copy_n(from.dense.data() + at * kCriteoDense, part * kCriteoDense,
                block.dense.data() + done * kCriteoDense);
    for (std::size_t f = 0; f < kCriteoFeatures; ++f) {
      std::copy_n(from.ids.data() + static_cast<std::int64_t>(f) * from.num_samples + at, part,
                  block.ids.data() + f * n + done);
    }
    done += static_cast<std::size_t>(part);
  }
}

}  // namespace tessera::workloads::dlrm
