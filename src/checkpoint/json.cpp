#include "checkpoint/json.h"

#include <algorithm>

#include "tessera/checkpoint/error.h"

namespace tessera::checkpoint::json {
namespace {

constexpr std::size_t kMaxDepth = 16;

// Builds the values, and stops at the first thing that a writer of ours would never write.
class Builder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Builder(std::size_t max_values) : values_left_(max_values) {}

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return refuse("has binary data"); }
  bool start_object(std::size_t) override { return open(nlohmann::json::object()); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open(nlohmann::json::array()); }
  bool end_array() override { return close(); }
  bool key(string_t& value) override {
    if (stack_.back()->contains(value)) return refuse("has the key '" + value + "' twice");
    key_ = std::move(value);
    return true;
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return refuse("is not JSON at byte " + std::to_string(position));
  }

  const std::string& problem() const { return problem_; }
  nlohmann::json take() { return std::move(root_); }

 private:
  bool refuse(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }

  bool add(nlohmann::json value) {
    if (values_left_ == 0) return refuse("has too many values");
    --values_left_;
    place(std::move(value));
    return true;
  }

  bool open(nlohmann::json value) {
    if (stack_.size() >= kMaxDepth) {
      return refuse("is nested deeper than " + std::to_string(kMaxDepth));
    }
    if (values_left_ == 0) return refuse("has too many values");
    --values_left_;
    stack_.push_back(place(std::move(value)));
    return true;
  }

  bool close() {
    stack_.pop_back();
    return true;
  }

  nlohmann::json* place(nlohmann::json value) {
    if (stack_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    nlohmann::json& parent = *stack_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    nlohmann::json& slot = parent[key_];
    slot = std::move(value);
    return &slot;
  }

  nlohmann::json root_;
  // Elements stay where they are while they are open: a container grows only after its last is
  // closed.
  std::vector<nlohmann::json*> stack_;
  std::string key_;
  std::string problem_;
  std::size_t values_left_;
};

}  // namespace

void corrupt(const std::string& where, const std::string& what) {
  throw Error(ErrorKind::kCorrupt, where + ": " + what + ".");
}

nlohmann::json parse_object(std::string_view text, const std::string& where,
                            std::size_t max_values) {
  Builder builder(max_values);
  const bool is_read = nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  if (!is_read) {
    corrupt(where, builder.problem().empty() ? "is not JSON" : builder.problem());
  }
  nlohmann::json value = builder.take();
  if (!value.is_object()) corrupt(where, "is not a JSON object");
  return value;
}

const nlohmann::json& member(const nlohmann::json& object, const char* key,
                             const std::string& where) {
  if (!object.is_object()) corrupt(where, "is not an object");
  const auto found = object.find(key);
  if (found == object.end()) corrupt(where, std::string("has no '") + key + "'");
  return *found;
}

std::string string_of(const nlohmann::json& object, const char* key, const std::string& where) {
  const nlohmann::json& value = member(object, key, where);
  if (!value.is_string()) corrupt(where, std::string("'") + key + "' is not a string");
  return value.get<std::string>();
}

namespace {

std::int64_t count_in(const nlohmann::json& value, const char* key, const std::string& where) {
  if (!value.is_number_integer() ||
      (value.is_number_unsigned() ? value.get<std::uint64_t>() > INT64_MAX
                                  : value.get<std::int64_t>() < 0)) {
    corrupt(where, std::string("'") + key + "' is not a whole number from 0 to 2^63 - 1");
  }
  return value.get<std::int64_t>();
}

}  // namespace

std::int64_t count_of(const nlohmann::json& object, const char* key, const std::string& where) {
  return count_in(member(object, key, where), key, where);
}

std::vector<std::int64_t> counts_of(const nlohmann::json& object, const char* key,
                                    const std::string& where) {
  const nlohmann::json& value = member(object, key, where);
  if (!value.is_array()) corrupt(where, std::string("'") + key + "' is not an array");
  if (value.size() > 64) corrupt(where, std::string("'") + key + "' has more than 64 numbers");
  std::vector<std::int64_t> counts;
  for (const nlohmann::json& element : value) counts.push_back(count_in(element, key, where));
  return counts;
}

void check_keys(const nlohmann::json& object, std::initializer_list<std::string_view> known,
                const std::string& where) {
  if (!object.is_object()) corrupt(where, "is not an object");
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      corrupt(where, "has an unknown key '" + key + "'");
    }
  }
}

}  // namespace tessera::checkpoint::json
