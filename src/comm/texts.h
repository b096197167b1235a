// src/comm/texts.h — every rank's words, on every rank.

#pragma once

#include <string>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::comm::detail {

/// Every rank's text, on every rank. Collective.
std::vector<std::string> exchange_texts(const std::string& mine, const Group& group);

}  // namespace tessera::comm::detail
