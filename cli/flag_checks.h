// cli/flag_checks.h — what values of flags are checked for, beside CLI11's own checks.

#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include <CLI/CLI.hpp>

namespace tessera::cli {

/// A finite number, zero or more. CLI11's own check lets NaN pass.
inline CLI::Validator not_negative() {
  return {[](std::string& text) {
            double number = 0;
            const bool is_number = CLI::detail::lexical_cast(text, number);
            return is_number && std::isfinite(number) && number >= 0
                       ? std::string()
                       : "'" + text + "' is not a number from 0 on";
          },
          "NUMBER"};
}

/// A seed. CLI11 would turn a number that is too large into the largest there is.
inline CLI::Range seed_range() { return {std::int64_t{0}, std::int64_t{1} << 62}; }

}  // namespace tessera::cli
