// checkpoint/exchange.h — ranks tell each other how it went, in words.

#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::checkpoint {

/// Every rank's `work` result, in rank order. Collective. If `work` throws on any rank, every rank
/// throws an Error with the text of the first, after `operation` and its number. So nobody waits
/// for a rank that has given up.
std::vector<std::string> together(const std::optional<comm::Group>& group, const char* operation,
                                  const std::function<std::string()>& work);

}  // namespace tessera::checkpoint
