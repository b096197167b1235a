// settings/help_text.h — help that fits a terminal, however wide its lines were written.

#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera::settings {

inline constexpr std::size_t kHelpWidth = 80;

/// Breaks lines that have more than `width` columns. A flag's text goes on below its beginning, as
/// lines that already do; a paragraph is filled anew. Texts that fit stay as they are.
std::string fitted_help(std::string_view text, std::size_t width = kHelpWidth);

}  // namespace tessera::settings
