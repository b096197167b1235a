// planner/places.h — ranks and tables are int, places of a vector are not.

#pragma once

#include <cstddef>

namespace tessera::planner {

inline std::size_t at(int i) { return static_cast<std::size_t>(i); }

}  // namespace tessera::planner
