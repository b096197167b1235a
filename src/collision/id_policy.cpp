#include "tessera/collision/id_policy.h"

#include <charconv>
#include <stdexcept>

namespace tessera::collision {
namespace {

[[noreturn]] void refuse(std::string_view text, const char* choices) {
  throw std::invalid_argument("'" + std::string(text) + "' is none of " + choices);
}

/// Whether all of the text is a number, which `value` then is.
template <typename Number>
bool is_number(std::string_view text, Number& value) {
  const char* end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, value);
  return read.ec == std::errc() && read.ptr == end;
}

}  // namespace

Admission admission_of(std::string_view text) {
  constexpr const char* kChoices = "always, freq:N with N from 1 to 255, prob:P with 0 < P <= 1";
  Admission admission;
  if (text == "always") return admission;
  if (text.starts_with("freq:") && is_number(text.substr(5), admission.sightings) &&
      admission.sightings >= 1 && admission.sightings <= 255) {
    admission.kind = AdmissionKind::kFrequency;
    return admission;
  }
  if (text.starts_with("prob:") && is_number(text.substr(5), admission.probability) &&
      admission.probability > 0 && admission.probability <= 1) {
    admission.kind = AdmissionKind::kProbability;
    return admission;
  }
  refuse(text, kChoices);
}

Eviction eviction_of(std::string_view text) {
  Eviction eviction;
  if (text == "none") return eviction;
  if (text == "lfu") {
    eviction.kind = EvictionKind::kLfu;
  } else if (text == "lru") {
    eviction.kind = EvictionKind::kLru;
  } else if (text == "distance-lfu") {
    eviction.kind = EvictionKind::kDistanceLfu;
  } else if (text.starts_with("ttl:") && is_number(text.substr(4), eviction.time_to_live) &&
             eviction.time_to_live >= 1) {
    eviction.kind = EvictionKind::kTimeToLive;
  } else {
    refuse(text, "none, lfu, lru, distance-lfu, ttl:N with N steps from 1 on");
  }
  return eviction;
}

}  // namespace tessera::collision
