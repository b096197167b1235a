// In place of http_server.cpp where Boost is missing.

#include <stdexcept>
#include <system_error>

#include "serving/server_process.h"
#include "tessera/serving/server.h"

namespace tessera::serving {

bool has_server() noexcept { return false; }
bool has_tls() noexcept { return false; }

void check_tls(const TlsOptions&) {
  throw std::invalid_argument("--tls-cert: this build has no TLS; install libssl-dev");
}

int run_server_process(Model&, const ServerOptions&, const ServerProcess&,
                       const std::function<void()>&,
                       const std::function<void(const std::string&)>&) {
  throw std::system_error(std::make_error_code(std::errc::function_not_supported),
                          "serve: this build has no server. Install libboost-dev and build again");
}

}  // namespace tessera::serving
