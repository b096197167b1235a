#include "lm/normal_form.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lm/normal_form_tables.h"

namespace tessera::workloads::lm {
namespace {

// Syllables of Korean are made of their parts by a rule, not by a table.
constexpr std::uint32_t kSyllables = 0xac00;
constexpr std::uint32_t kLeads = 0x1100;
constexpr std::uint32_t kVowels = 0x1161;
constexpr std::uint32_t kTails = 0x11a7;  // the one before the first
constexpr std::uint32_t kNumLeads = 19;
constexpr std::uint32_t kNumVowels = 21;
constexpr std::uint32_t kNumTails = 28;
constexpr std::uint32_t kNumSyllables = kNumLeads * kNumVowels * kNumTails;

// Below it every character is in this form, and starts a new one.
constexpr std::uint32_t kFirstMark = 0x300;

struct Character {
  std::uint32_t point = 0;
  std::size_t size = 0;  // bytes
  bool is_good = true;   // it is UTF-8
};

Character character_at(std::string_view text, std::size_t place) {
  const auto byte = [&](std::size_t i) {
    return static_cast<std::uint32_t>(static_cast<unsigned char>(text[place + i]));
  };
  const std::uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const std::size_t size = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || place + size > text.size()) return {lead, 1, false};
  std::uint32_t point = lead & (0x7fU >> size);
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0U) != 0x80) return {lead, 1, false};
    point = point << 6U | (byte(i) & 0x3fU);
  }
  // Longer than it must be, half of a pair, or beyond the last.
  const bool is_good = (size < 3 || point >= (size == 3 ? 0x800U : 0x10000U)) &&
                       (point < 0xd800 || point > 0xdfff) && point < 0x110000;
  return is_good ? Character{point, size} : Character{lead, 1, false};
}

void append(std::uint32_t point, std::string& out) {
  const auto put = [&](std::uint32_t byte) { out += static_cast<char>(byte); };
  if (point < 0x80) return put(point);
  if (point < 0x800) {
    put(0xc0U | point >> 6U);
  } else {
    if (point < 0x10000) {
      put(0xe0U | point >> 12U);
    } else {
      put(0xf0U | point >> 18U);
      put(0x80U | (point >> 12U & 0x3fU));
    }
    put(0x80U | (point >> 6U & 0x3fU));
  }
  put(0x80U | (point & 0x3fU));
}

// The entry of a point in a table that is sorted by it, or null.
template <class Entry>
const Entry* find(std::span<const Entry> all, std::uint32_t point) {
  const auto found =
      std::lower_bound(all.begin(), all.end(), point,
                       [](const Entry& entry, std::uint32_t value) { return entry.point < value; });
  return found != all.end() && found->point == point ? &*found : nullptr;
}

// Where a text may be cut: what comes before never joins with it, and it is composed itself.
bool is_plain(std::uint32_t point) {
  if (point < kFirstMark) return true;
  const auto all = unsettled_points();
  const auto after = std::upper_bound(
      all.begin(), all.end(), point,
      [](std::uint32_t value, const CodePoints& range) { return value < range.first; });
  return after == all.begin() || point > (after - 1)->last;
}

std::uint8_t order_of(std::uint32_t point) {
  const Mark* mark = find(marks(), point);
  return mark == nullptr ? 0 : mark->order;
}

void take_apart(std::uint32_t point, std::vector<std::uint32_t>& out) {
  const std::uint32_t syllable = point - kSyllables;  // wraps for what lies before
  if (syllable < kNumSyllables) {
    out.push_back(kLeads + syllable / (kNumVowels * kNumTails));
    out.push_back(kVowels + syllable / kNumTails % kNumVowels);
    if (syllable % kNumTails != 0) out.push_back(kTails + syllable % kNumTails);
    return;
  }
  const Parts* parts = find(decompositions(), point);
  if (parts == nullptr) {
    out.push_back(point);
  } else {
    out.insert(out.end(), parts->points, parts->points + parts->count);
  }
}

// What two characters are together; 0 if they stay two.
std::uint32_t joined(std::uint32_t first, std::uint32_t second) {
  if (first - kLeads < kNumLeads && second - kVowels < kNumVowels) {
    return kSyllables + ((first - kLeads) * kNumVowels + (second - kVowels)) * kNumTails;
  }
  const std::uint32_t syllable = first - kSyllables;
  if (syllable < kNumSyllables && syllable % kNumTails == 0 && second > kTails &&
      second < kTails + kNumTails) {
    return first + (second - kTails);
  }
  const auto all = compositions();
  const auto found = std::lower_bound(all.begin(), all.end(), std::pair(first, second),
                                      [](const Composition& entry, const auto& pair) {
                                        return std::pair(entry.first, entry.second) < pair;
                                      });
  return found != all.end() && found->first == first && found->second == second ? found->whole : 0;
}

// A stretch between two plain characters, taken apart, put in order, and composed.
class Stretch {
 public:
  void compose(std::string_view text, std::string& out) {
    points_.clear();
    for (std::size_t place = 0; place < text.size();) {
      const Character one = character_at(text, place);
      take_apart(one.point, points_);
      place += one.size;
    }
    sort_marks();
    join();
    for (const std::uint32_t point : points_) append(point, out);
  }

 private:
  // Marks after the same letter by their order; those of one order stay as they are.
  void sort_marks() {
    for (std::size_t begin = 0; begin < points_.size();) {
      if (order_of(points_[begin]) == 0) {
        ++begin;
        continue;
      }
      std::size_t end = begin;
      while (end < points_.size() && order_of(points_[end]) != 0) ++end;
      std::stable_sort(points_.begin() + static_cast<std::ptrdiff_t>(begin),
                       points_.begin() + static_cast<std::ptrdiff_t>(end),
                       [](std::uint32_t a, std::uint32_t b) { return order_of(a) < order_of(b); });
      begin = end;
    }
  }

  // Every character with the last one that starts, unless a mark between them stands in the way.
  void join() {
    std::size_t count = 0;  // kept so far
    std::size_t starter = points_.size();
    for (const std::uint32_t point : points_) {
      const std::uint8_t order = order_of(point);
      if (starter < count) {
        const std::uint8_t before = count == starter + 1 ? 0 : order_of(points_[count - 1]);
        const bool is_blocked = count != starter + 1 && before >= order;
        const std::uint32_t whole = is_blocked ? 0 : joined(points_[starter], point);
        if (whole != 0) {
          points_[starter] = whole;
          continue;
        }
      }
      if (order == 0) starter = count;
      points_[count++] = point;
    }
    points_.resize(count);
  }

  std::vector<std::uint32_t> points_;
};

}  // namespace

std::string composed(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  Stretch stretch;
  std::size_t begin = 0;  // of the stretch: a plain character, and what follows it
  bool is_settled = true;
  const auto put = [&](std::size_t end) {
    const std::string_view part = text.substr(begin, end - begin);
    if (is_settled) {
      out += part;
    } else {
      stretch.compose(part, out);
    }
    begin = end;
    is_settled = true;
  };
  for (std::size_t place = 0; place < text.size();) {
    const Character one = character_at(text, place);
    if (!one.is_good) {
      put(place);
      out += text[place];
      begin = ++place;
      continue;
    }
    if (is_plain(one.point)) {
      put(place);
    } else {
      is_settled = false;
    }
    place += one.size;
  }
  put(text.size());
  return out;
}

}  // namespace tessera::workloads::lm
