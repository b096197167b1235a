// Requests to a server: whatever headers and body say, there is one answer with a known code, an
// error names what is wrong, and what is accepted was computed.
//
// An input is a method, an address, Inference-Header-Content-Length, Request-Timeout-Ms and
// Content-Encoding, a line each, then the body.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>

#include "serving/samples.h"
#include "serving/service.h"

using namespace tessera::serving;

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

struct World {
  Folder folder;
  ServerOptions options;
  Metrics metrics;
  std::unique_ptr<Model> model;
  std::unique_ptr<Service> service;

  World() {
    export_model(SmallModel(), folder);
    options.limits.ids_per_request = 1000;
    options.limits.samples_per_request = 64;
    options.latency_budget = std::chrono::milliseconds(60'000);
    model = std::make_unique<Model>(folder / "pkg");
    service = std::make_unique<Service>(*model, options, metrics, metrics.processes[0],
                                        [](const std::string&) {});
    service->be_ready();
  }
};

std::string line_of(const std::uint8_t*& data, const std::uint8_t* end) {
  const std::uint8_t* stop = std::find(data, end, '\n');
  std::string line(data, stop);
  data = stop == end ? end : stop + 1;
  return line;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static World world;
  const std::uint8_t* end = data + size;
  HttpRequest request;
  request.method = line_of(data, end);
  request.target = line_of(data, end);
  request.json_bytes = line_of(data, end);
  request.timeout = line_of(data, end);
  request.content_encoding = line_of(data, end);
  request.is_admin = request.target.starts_with("/admin/f") || request.target == "/admin/versions";
  request.body.assign(data, end);
  auto promise = std::make_shared<std::promise<HttpAnswer>>();
  auto answer = promise->get_future();
  world.service->handle(request, [promise](HttpAnswer given) { promise->set_value(given); });
  const HttpAnswer given = answer.get();
  require(std::find(kCodes.begin(), kCodes.end(), given.code) != kCodes.end() && given.code != 0);
  require(given.code != 500);
  if (given.code == 200) {
    require(!given.body.empty());
  } else {
    require(given.body.starts_with("{\"error\":\""));
  }
  return 0;
}
