// planner/advice.h — the texts of impossible plans.

#pragma once

#include <string>

#include "tessera/planner/explain.h"
#include "tessera/planner/options.h"

namespace tessera::planner {

[[noreturn]] void throw_fits_nowhere(const Options& options, const TableClass& one);
[[noreturn]] void throw_all_too_large(const Options& options, double needed, double memory);
[[noreturn]] void throw_not_packed(const Options& options);

}  // namespace tessera::planner
