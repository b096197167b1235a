// src/serving/live_page.h — the page of a running server: one text, nothing from the network.

#pragma once

#include <string_view>

namespace tessera::serving {

/// HTML that shows /admin/figures and /admin/versions, once a second.
std::string_view live_page() noexcept;

}  // namespace tessera::serving
