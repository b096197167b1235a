#include "lm/tokenizer.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <queue>
#include <sstream>
#include <unordered_map>

#include <nlohmann/json.hpp>

#include "lm/normal_form.h"
#include "lm/word_pattern.h"
#include "trainer/data_error.h"

namespace tessera::workloads::lm {
namespace {

using Json = nlohmann::json;
using trainer::DataError;

constexpr std::size_t kCachedBytes = 64;         // of a word
constexpr std::size_t kMostCached = 1U << 20;    // words
constexpr std::int64_t kMostTokens = 1LL << 24;  // numbers of tokens, so that no table is huge

// A vocabulary is written in letters that can be seen: every byte has one.
struct ByteLetters {
  std::array<std::string, 256> of;
  std::unordered_map<std::uint32_t, unsigned char> bytes;

  ByteLetters() {
    std::uint32_t next = 256;
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      const bool is_seen =
          (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
      const std::uint32_t point = is_seen ? byte : next++;
      of[byte] = point < 0x80 ? std::string(1, static_cast<char>(point))
                              : std::string{static_cast<char>(0xc0U | point >> 6U),
                                            static_cast<char>(0x80U | (point & 0x3fU))};
      bytes[point] = static_cast<unsigned char>(byte);
    }
  }
  static const ByteLetters& all() {
    static const ByteLetters kLetters;
    return kLetters;
  }
};

// The bytes that a token of the vocabulary stands for; false for one in other letters.
bool bytes_of(std::string_view token, std::string& bytes) {
  const auto& known = ByteLetters::all().bytes;
  for (std::size_t i = 0; i < token.size();) {
    auto point = static_cast<std::uint32_t>(static_cast<unsigned char>(token[i]));
    std::size_t size = 1;
    if (point >= 0x80) {
      if (i + 1 >= token.size() || point >= 0xe0) return false;
      point = (point & 0x1fU) << 6U | (static_cast<unsigned char>(token[i + 1]) & 0x3fU);
      size = 2;
    }
    const auto found = known.find(point);
    if (found == known.end()) return false;
    bytes += static_cast<char>(found->second);
    i += size;
  }
  return true;
}

std::uint64_t pair_of(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32U |
         static_cast<std::uint32_t>(right);
}

struct Merge {
  std::int32_t rank = 0;
  std::int32_t joined = 0;
};

/// Tokens that are found in a text as a whole.
struct AddedTokens {
  std::vector<std::pair<std::string, std::int32_t>> all;  // the longest first
  std::array<bool, 256> may_begin{};                      // they begin with few different bytes

  void add(const std::string& text, std::int32_t id) {
    all.emplace_back(text, id);
    may_begin[static_cast<unsigned char>(text[0])] = true;
  }
  void sort() {
    std::stable_sort(all.begin(), all.end(),
                     [](const auto& a, const auto& b) { return a.first.size() > b.first.size(); });
  }
  /// Tells `part` of what lies between them, and puts their numbers.
  template <class Part>
  void cut(std::string_view text, std::vector<std::int32_t>& out, const Part& part) const {
    std::size_t begin = 0;
    for (std::size_t place = 0; place < text.size();) {
      auto found = all.end();
      if (may_begin[static_cast<unsigned char>(text[place])]) {
        found = std::find_if(all.begin(), all.end(), [&](const auto& one) {
          return text.substr(place).starts_with(one.first);
        });
      }
      if (found == all.end()) {
        ++place;
        continue;
      }
      if (place > begin) part(text.substr(begin, place - begin));
      out.push_back(found->second);
      place += found->first.size();
      begin = place;
    }
    if (begin < text.size()) part(text.substr(begin));
  }
};

}  // namespace

struct Tokenizer::State {
  std::string name;
  WordPattern pattern = WordPattern::kGpt2;
  bool adds_space = false;         // before a text
  bool takes_whole = false;        // a word that is a token is not joined from parts
  std::vector<std::string> texts;  // of the tokens, in bytes
  std::unordered_map<std::string, std::int32_t> whole;
  std::array<std::int32_t, 256> of_byte{};
  std::unordered_map<std::uint64_t, Merge> merges;
  bool composes = false;  // texts are in NFC before their words are cut
  /// Found in the text as it is, and found in what the normalizer made of it.
  AddedTokens added;
  AddedTokens added_after;

  [[noreturn]] void fail(const std::string& what) const {
    throw DataError(name + ": " + what + ".");
  }
  void read(const Json& all);
  void read_words(const Json& pre);
  void read_model(const Json& model);
  void read_added(const Json& tokens);
  std::int32_t number_of(const Json& value) const;
  void put_text(std::int32_t token, std::string text);
  void encode_part(std::string_view part, std::vector<std::int32_t>& out,
                   std::unordered_map<std::string, std::vector<std::int32_t>>& cache) const;
  void encode_normal(std::string_view part, std::vector<std::int32_t>& out,
                     std::unordered_map<std::string, std::vector<std::int32_t>>& cache) const;
  void encode_word(std::string_view word, std::vector<std::int32_t>& out) const;
};

std::int32_t Tokenizer::State::number_of(const Json& value) const {
  if (!value.is_number_integer() || value.get<std::int64_t>() < 0 ||
      value.get<std::int64_t>() >= kMostTokens) {
    fail("a token has the number " + value.dump() + ", which is none");
  }
  return value.get<std::int32_t>();
}

void Tokenizer::State::put_text(std::int32_t token, std::string text) {
  const auto place = static_cast<std::size_t>(token);
  if (texts.size() <= place) texts.resize(place + 1);
  texts[place] = std::move(text);
}

void Tokenizer::State::read_words(const Json& pre) {
  const auto read_bytes = [this](const Json& one, bool by_pattern) {
    adds_space = one.value("add_prefix_space", false);
    if (one.value("use_regex", true) != by_pattern) {
      fail("its words are cut by two patterns, or by none");
    }
  };
  const std::string type = pre.is_object() ? pre.value("type", "") : "";
  if (type == "ByteLevel") return read_bytes(pre, true);
  const Json* parts =
      type == "Sequence" && pre.contains("pretokenizers") ? &pre["pretokenizers"] : nullptr;
  const bool is_pair = parts != nullptr && parts->is_array() && parts->size() == 2 &&
                       (*parts)[0].value("type", "") == "Split" &&
                       (*parts)[1].value("type", "") == "ByteLevel";
  if (!is_pair)
    fail("its words are cut by '" + (type.empty() ? "nothing" : type) + "', not over bytes");
  const Json& split = (*parts)[0];
  const std::string expression = split.contains("pattern") && split["pattern"].contains("Regex")
                                     ? split["pattern"]["Regex"].get<std::string>()
                                     : "";
  if (!find_pattern(expression, pattern) || split.value("behavior", "") != "Isolated") {
    fail("its words are cut by the pattern '" + expression +
         "'; those of GPT-2, Llama 3 and Qwen are known");
  }
  read_bytes((*parts)[1], false);
}

void Tokenizer::State::read_model(const Json& model) {
  const std::string type = model.value("type", "BPE");
  if (type != "BPE") fail("is a tokenizer of type '" + type + "', not BPE");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (model.contains(key) && model[key].is_string() && !model[key].get<std::string>().empty()) {
      fail(std::string(key) + " is set, which is not known");
    }
  }
  if (model.value("byte_fallback", false)) fail("byte_fallback is set: it is not over bytes");
  takes_whole = model.value("ignore_merges", false);
  std::unordered_map<std::string, std::int32_t> numbers;  // in letters
  for (const auto& [token, number] : model.at("vocab").items()) {
    const std::int32_t id = number_of(number);
    numbers[token] = id;
    std::string bytes;
    if (!bytes_of(token, bytes)) bytes = token;
    whole[bytes] = id;
    put_text(id, std::move(bytes));
  }
  for (std::size_t byte = 0; byte < 256; ++byte) {
    const auto found = numbers.find(ByteLetters::all().of[byte]);
    of_byte[byte] = found == numbers.end() ? -1 : found->second;
  }
  std::int32_t rank = 0;
  for (const Json& one : model.at("merges")) {
    std::string left;
    std::string right;
    if (one.is_string()) {
      const std::string text = one.get<std::string>();
      const std::size_t space = text.find(' ');
      left = text.substr(0, space);
      right = space == std::string::npos ? "" : text.substr(space + 1);
    } else {
      left = one.at(0).get<std::string>();
      right = one.at(1).get<std::string>();
    }
    const auto a = numbers.find(left);
    const auto b = numbers.find(right);
    const auto joined = numbers.find(left + right);
    if (a == numbers.end() || b == numbers.end() || joined == numbers.end()) {
      fail("merge " + std::to_string(rank) + " ('" + left + "' and '" + right +
           "') is not of the vocabulary");
    }
    merges.insert({pair_of(a->second, b->second), {rank++, joined->second}});
  }
}

void Tokenizer::State::read_added(const Json& tokens) {
  for (const Json& one : tokens) {
    const std::string text = one.at("content").get<std::string>();
    const std::int32_t id = number_of(one.at("id"));
    if (text.empty()) continue;
    for (const char* key : {"single_word", "lstrip", "rstrip"}) {
      if (one.value(key, false)) fail("token '" + text + "' has " + key + ", which is not known");
    }
    put_text(id, text);
    // What is looked for in a text in NFC is looked for in NFC.
    const bool is_after = composes && one.value("normalized", false);
    if (is_after) {
      added_after.add(composed(text), id);
    } else {
      added.add(text, id);
    }
  }
  added.sort();
  added_after.sort();
}

void Tokenizer::State::read(const Json& all) {
  if (!all.is_object() || !all.contains("model")) fail("is no tokenizer.json: there is no model");
  if (all.contains("normalizer") && !all["normalizer"].is_null()) {
    const std::string type = all["normalizer"].value("type", "");
    if (type != "NFC") fail("its texts are changed by the normalizer '" + type + "', not by NFC");
    composes = true;
  }
  read_words(all.value("pre_tokenizer", Json()));
  read_model(all["model"]);
  if (all.contains("added_tokens")) read_added(all["added_tokens"]);
}

// Bytes are joined, the pair of the lowest rank first, of equal ones the left.
void Tokenizer::State::encode_word(std::string_view word, std::vector<std::int32_t>& out) const {
  struct Symbol {
    std::int32_t token;
    std::int32_t before;
    std::int32_t after;
  };
  struct Candidate {
    std::int32_t rank;
    std::int32_t place;
    std::int32_t left;  // the tokens it was found for
    std::int32_t right;
    std::int32_t joined;
    bool operator<(const Candidate& other) const {  // the queue's top is its largest
      return rank != other.rank ? rank > other.rank : place > other.place;
    }
  };
  std::vector<Symbol> symbols;
  symbols.reserve(word.size());
  for (const char c : word) {
    const std::int32_t token = of_byte[static_cast<unsigned char>(c)];
    if (token < 0) {
      fail("byte " + std::to_string(static_cast<unsigned char>(c)) + " is not in the vocabulary");
    }
    const auto place = static_cast<std::int32_t>(symbols.size());
    symbols.push_back({token, place - 1, place + 1});
  }
  symbols.back().after = -1;
  std::priority_queue<Candidate> queue;
  const auto consider = [&](std::int32_t place) {
    if (place < 0 || symbols[static_cast<std::size_t>(place)].after < 0) return;
    const Symbol& left = symbols[static_cast<std::size_t>(place)];
    const Symbol& right = symbols[static_cast<std::size_t>(left.after)];
    const auto found = merges.find(pair_of(left.token, right.token));
    if (found == merges.end()) return;
    queue.push({found->second.rank, place, left.token, right.token, found->second.joined});
  };
  for (std::size_t i = 0; i + 1 < symbols.size(); ++i) consider(static_cast<std::int32_t>(i));
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = symbols[static_cast<std::size_t>(best.place)];
    // One of the two was joined with another meanwhile.
    if (left.token != best.left || left.after < 0) continue;
    Symbol& right = symbols[static_cast<std::size_t>(left.after)];
    if (right.token != best.right) continue;
    left.token = best.joined;
    right.token = -1;
    left.after = right.after;
    if (left.after >= 0) symbols[static_cast<std::size_t>(left.after)].before = best.place;
    consider(best.place);
    consider(left.before);
  }
  for (std::int32_t i = 0; i >= 0; i = symbols[static_cast<std::size_t>(i)].after) {
    out.push_back(symbols[static_cast<std::size_t>(i)].token);
  }
}

void Tokenizer::State::encode_part(
    std::string_view part, std::vector<std::int32_t>& out,
    std::unordered_map<std::string, std::vector<std::int32_t>>& cache) const {
  std::string with_space;
  if (adds_space && !part.starts_with(' ')) {
    with_space = " " + std::string(part);
    part = with_space;
  }
  while (!part.empty()) {
    const std::string word(part.substr(0, first_word(part, pattern)));
    part.remove_prefix(word.size());
    const auto cached = word.size() <= kCachedBytes ? cache.find(word) : cache.end();
    if (cached != cache.end()) {
      out.insert(out.end(), cached->second.begin(), cached->second.end());
      continue;
    }
    const auto begin = static_cast<std::ptrdiff_t>(out.size());
    const auto found = takes_whole ? whole.find(word) : whole.end();
    if (found != whole.end()) {
      out.push_back(found->second);
    } else {
      encode_word(word, out);
    }
    if (word.size() <= kCachedBytes && cache.size() < kMostCached) {
      cache.emplace(word, std::vector<std::int32_t>(out.begin() + begin, out.end()));
    }
  }
}

void Tokenizer::State::encode_normal(
    std::string_view part, std::vector<std::int32_t>& out,
    std::unordered_map<std::string, std::vector<std::int32_t>>& cache) const {
  if (!composes) return encode_part(part, out, cache);
  const std::string text = composed(part);
  added_after.cut(text, out, [&](std::string_view rest) { encode_part(rest, out, cache); });
}

Tokenizer Tokenizer::from_json(std::string_view text, const std::string& name) {
  auto state = std::make_shared<State>();
  state->name = name;
  try {
    state->read(Json::parse(text));
  } catch (const Json::exception& error) {
    const std::string what = error.what();
    state->fail("is no tokenizer.json: " + what.substr(what.find(']') + 2));
  }
  Tokenizer tokenizer;
  tokenizer.state_ = std::move(state);
  return tokenizer;
}

Tokenizer Tokenizer::from_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw DataError(path + ": cannot be read: " + std::strerror(errno) + ".");
  std::ostringstream text;
  text << file.rdbuf();
  return from_json(text.str(), path);
}

std::int64_t Tokenizer::vocab_size() const noexcept {
  return static_cast<std::int64_t>(state_->texts.size());
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<std::int32_t> out;
  std::unordered_map<std::string, std::vector<std::int32_t>> cache;
  state_->added.cut(text, out,
                    [&](std::string_view part) { state_->encode_normal(part, out, cache); });
  return out;
}

std::string Tokenizer::decode(std::span<const std::int32_t> tokens) const {
  std::string text;
  for (const std::int32_t token : tokens) {
    if (token >= 0 && static_cast<std::size_t>(token) < state_->texts.size()) {
      text += state_->texts[static_cast<std::size_t>(token)];
    }
  }
  return text;
}

}  // namespace tessera::workloads::lm
