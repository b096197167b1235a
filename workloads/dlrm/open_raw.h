// dlrm/open_raw.h — a log whose ids are any 64 bits, by its name on the command line. No LibTorch.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "dlrm/open_log.h"
#include "dlrm/text_check.h"

namespace tessera::workloads::dlrm {

/// "synthetic", a file of `tessera data convert` or a text in Criteo's format, whose ids stay as
/// they are; or a table by the schema in the file `schema`, or by a guess without one, whose texts
/// become ids by their hash, which `texts` sees if there is one. Throws DataError.
OpenedLog open_raw(const std::string& name, const std::string& schema, LogOptions options,
                   const std::shared_ptr<TextCheck>& texts = nullptr);
/// What tells `texts`, or nothing without one.
std::function<void(std::string_view, std::int64_t)> teller_of(
    const std::shared_ptr<TextCheck>& texts);

}  // namespace tessera::workloads::dlrm
