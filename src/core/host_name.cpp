#include "core/host_name.h"

#include <unistd.h>

#include <array>
#include <climits>

namespace tessera::core {

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

}  // namespace tessera::core
