// planner/json.h — JSON from strangers: no key twice, no unknown key, numbers within limits.

#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace tessera::planner::json {

using Json = nlohmann::ordered_json;

/// Throws PlanError(kBadProblem) that begins with `what`: not JSON, nested deeper than 32, a key
/// twice in one object.
Json parse(std::string_view text, const std::string& what);

/// A value and its place in the text, for messages.
class Place {
 public:
  Place(const Json& value, std::string path) : value_(&value), path_(std::move(path)) {}

  const Json& value() const { return *value_; }
  const std::string& path() const { return path_; }
  /// Throws unless this is an object whose keys are all `known`.
  void check_keys(std::initializer_list<std::string_view> known) const;
  bool has(const char* key) const { return value_->contains(key); }
  Place operator[](const char* key) const;  // throws if it is missing
  Place operator[](std::size_t i) const;
  std::size_t size() const;  // throws unless this is an array
  double number(double low, double high) const;
  std::int64_t whole(std::int64_t low, std::int64_t high) const;
  bool flag() const;
  const std::string& text() const;
  [[noreturn]] void refuse(const std::string& what) const;

 private:
  const Json* value_;
  std::string path_;
};

}  // namespace tessera::planner::json
