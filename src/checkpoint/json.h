// checkpoint/json.h — JSON from strangers: bounded depth, no key twice, whole numbers in range.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace tessera::checkpoint::json {

/// Reads one JSON object. Throws Error(kCorrupt) that begins with `where`: not JSON, not an object,
/// deeper than 16, more than `max_values` values, a key twice, a string that is not UTF-8.
nlohmann::json parse_object(std::string_view text, const std::string& where,
                            std::size_t max_values);

/// Members of an object, with their type checked. Throw Error(kCorrupt) naming `where` and the key.
const nlohmann::json& member(const nlohmann::json& object, const char* key,
                             const std::string& where);
std::string string_of(const nlohmann::json& object, const char* key, const std::string& where);
/// A whole number from 0 to 2^63 - 1.
std::int64_t count_of(const nlohmann::json& object, const char* key, const std::string& where);
std::vector<std::int64_t> counts_of(const nlohmann::json& object, const char* key,
                                    const std::string& where);
/// Throws unless every key of `object` is one of `known`.
void check_keys(const nlohmann::json& object, std::initializer_list<std::string_view> known,
                const std::string& where);

[[noreturn]] void corrupt(const std::string& where, const std::string& what);

}  // namespace tessera::checkpoint::json
