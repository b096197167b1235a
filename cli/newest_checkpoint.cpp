#include "newest_checkpoint.h"

#include <cstdio>
#include <utility>

#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"

namespace tessera::cli {

std::string root_of(const std::string& folder) {
  const std::string inside = folder + "/checkpoints";
  const bool has_some =
      checkpoint::list_steps(folder).empty() && !checkpoint::list_steps(inside).empty();
  return has_some ? inside : folder;
}

std::unique_ptr<checkpoint::Reader> open_newest(const std::string& root, std::int64_t step) {
  if (step >= 0) return std::make_unique<checkpoint::Reader>(root, step);
  auto found = checkpoint::find_newest(root);
  for (const std::string& warning : found.warnings) {
    std::fprintf(stderr, "warning: %s\n", warning.c_str());
  }
  if (found.reader == nullptr) {
    throw checkpoint::Error(checkpoint::ErrorKind::kMissing,
                            root + ": there is no checkpoint that can be read.");
  }
  return std::move(found.reader);
}

}  // namespace tessera::cli
