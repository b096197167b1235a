// In place of http_server.cpp where Boost is missing.

#include <system_error>

#include "tessera/serving/server.h"

namespace tessera::serving {

bool has_server() noexcept { return false; }

int serve(Model&, const ServerOptions&, const std::function<void(const ServerPorts&)>&,
          const std::function<void(const std::string&)>&) {
  throw std::system_error(std::make_error_code(std::errc::function_not_supported),
                          "serve: this build has no server. Install libboost-dev and build again");
}

}  // namespace tessera::serving
