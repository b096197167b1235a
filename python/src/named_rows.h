// python/src/named_rows.h — rows by name, as Python gets them.

#pragma once

#include <torch/csrc/utils/pybind.h>

#include "tessera/embedding/collection_lookup.h"

namespace tessera::python {

/// A dict from names to JaggedTensors, in the order of `rows`. Needs the interpreter's lock.
inline pybind11::dict named_rows(embedding::NamedRows rows) {
  pybind11::dict named;
  for (auto& [name, feature] : rows)
    named[pybind11::str(name)] = pybind11::cast(std::move(feature));
  return named;
}

}  // namespace tessera::python
