// src/core/host_name.h — the name of this host, for people.

#pragma once

#include <string>

namespace tessera::core {

std::string host_name();

}  // namespace tessera::core
