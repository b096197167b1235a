#include "planner/json.h"

#include <algorithm>
#include <set>
#include <vector>

#include "tessera/planner/plan_error.h"

namespace tessera::planner::json {
namespace {

constexpr std::size_t kMostDepth = 32;

[[noreturn]] void refuse_text(const std::string& what) {
  throw PlanError(PlanErrorKind::kBadProblem, "plan: " + what);
}

}  // namespace

Json parse(std::string_view text, const std::string& what) {
  std::vector<std::set<std::string>> keys;
  std::size_t depth = 0;
  const auto watch = [&](int, Json::parse_event_t event, Json& value) {
    using Event = Json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      if (++depth > kMostDepth) refuse_text(what + " is nested deeper than 32");
    }
    if (event == Event::object_end || event == Event::array_end) --depth;
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) refuse_text(what + " has the key '" + key + "' twice");
    }
    return true;
  };
  try {
    return Json::parse(text, watch);
  } catch (const Json::parse_error& error) {
    refuse_text(what + " is not JSON at byte " + std::to_string(error.byte));
  } catch (const Json::out_of_range&) {
    refuse_text(what + " has a number that is too large");
  }
}

void Place::refuse(const std::string& what) const {
  refuse_text((path_.empty() ? std::string("/") : path_) + " " + what);
}

void Place::check_keys(std::initializer_list<std::string_view> known) const {
  if (!value_->is_object()) refuse("is not an object");
  for (const auto& [key, value] : value_->items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    std::string names;
    for (const std::string_view name : known)
      names += (names.empty() ? "" : ", ") + std::string(name);
    refuse("has an unknown key '" + key + "'; there are " + names);
  }
}

Place Place::operator[](const char* key) const {
  if (!value_->is_object()) refuse("is not an object");
  if (!value_->contains(key)) refuse("has no '" + std::string(key) + "'");
  return {(*value_)[key], path_ + "/" + key};
}

Place Place::operator[](std::size_t i) const {
  if (i >= size()) refuse("has only " + std::to_string(size()) + " values");
  return {(*value_)[i], path_ + "/" + std::to_string(i)};
}

std::size_t Place::size() const {
  if (!value_->is_array()) refuse("is not a list");
  return value_->size();
}

double Place::number(double low, double high) const {
  const double number = value_->is_number() ? value_->get<double>() : 0;
  if (!value_->is_number() || !(number >= low && number <= high)) {
    refuse("is " + value_->dump() + ", which is no number from " + Json(low).dump() + " to " +
           Json(high).dump());
  }
  return number;
}

std::int64_t Place::whole(std::int64_t low, std::int64_t high) const {
  const bool is_whole =
      value_->is_number_integer() &&
      (!value_->is_number_unsigned() ||
       value_->get<std::uint64_t>() <= static_cast<std::uint64_t>(std::max<std::int64_t>(high, 0)));
  const std::int64_t number = is_whole ? value_->get<std::int64_t>() : 0;
  if (!is_whole || number < low || number > high) {
    refuse("is " + value_->dump() + ", which is no whole number from " + std::to_string(low) +
           " to " + std::to_string(high));
  }
  return number;
}

bool Place::flag() const {
  if (!value_->is_boolean()) refuse("is neither true nor false");
  return value_->get<bool>();
}

const std::string& Place::text() const {
  if (!value_->is_string()) refuse("is not a text");
  return value_->get_ref<const std::string&>();
}

}  // namespace tessera::planner::json
