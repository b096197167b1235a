// What a service answers while the model is busy otherwise, and what it counts.

#include "serving/service.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "published.h"

namespace tessera::serving {
namespace {

struct Served {
  Published published;
  Model model{published.folder / "pkg", ModelOptions{.keep_versions = 2}};
  ServerOptions options;
  Metrics metrics;
  std::unique_ptr<Service> service;

  explicit Served(bool is_ready = true, Service::Log log = [](const std::string&) {}) {
    options.package = published.folder / "pkg";
    options.latency_budget = std::chrono::hours(1);
    service =
        std::make_unique<Service>(model, options, metrics, metrics.processes[0], std::move(log));
    if (is_ready) service->be_ready();
  }
  std::future<HttpAnswer> ask(const std::string& method, const std::string& target,
                              const std::string& body = {}) {
    HttpRequest request;
    request.method = method;
    request.target = target;
    request.is_admin = target.starts_with("/admin/");
    request.body = body;
    auto promise = std::make_shared<std::promise<HttpAnswer>>();
    auto answer = promise->get_future();
    service->handle(request, [promise](HttpAnswer given) { promise->set_value(std::move(given)); });
    return answer;
  }
  std::future<HttpAnswer> infer() {
    std::string body = R"({"inputs":[{"name":"dense","datatype":"FP32","shape":[1,5],)"
                       R"("data":[0,1,2,3,4]})";
    for (const char* name : {"t_0", "t_1", "t_2"}) {
      body += std::string(R"(,{"name":")") + name +
              R"(.values","datatype":"INT64","shape":[1],"data":[1]},{"name":")" + name +
              R"(.lengths","datatype":"INT32","shape":[1],"data":[1]})";
    }
    return ask("POST", "/v2/models/dlrm/infer", body + "]}");
  }
};

bool is_there(const std::future<HttpAnswer>& answer) {
  return answer.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

// An update may read for seconds. This thread stands for the only one that has connections: what
// waited for the update in it would wait for ever here.
TEST(ServingService, NobodyWaitsWhileAnUpdateIsRead) {
  Served served;
  served.published.train({{0, {1, 2}}});
  std::future<HttpAnswer> reload;
  std::int64_t num_looks = 0;
  const auto look = [&](Model::Lease&, Model::Lease&) {
    ++num_looks;
    reload = served.ask("POST", "/admin/reload");  // its turn comes after the update
    auto back = served.ask("POST", "/admin/rollback?version=40");
    ASSERT_TRUE(is_there(back));
    const HttpAnswer answer = back.get();
    EXPECT_EQ(answer.code, 200) << answer.body;
    EXPECT_NE(answer.body.find("\"held\":true"), std::string::npos) << answer.body;
    EXPECT_EQ(served.infer().get().code, 200);
    EXPECT_TRUE(is_there(served.ask("GET", "/v2/health/ready")));
    EXPECT_FALSE(is_there(reload));
  };
  // Who has gone back meanwhile is not overruled.
  EXPECT_THROW(served.model.update(served.published.newest(), look), std::runtime_error);
  EXPECT_EQ(num_looks, 1);
  EXPECT_EQ(served.model.current().step, 40);
  const HttpAnswer opened = reload.get();
  EXPECT_EQ(opened.code, 200) << opened.body;
  EXPECT_EQ(served.metrics.reloads, 1U);
}

TEST(ServingService, WhoAsksForTheSameReloadIsToldWithTheOthers) {
  Served served;
  std::vector<std::future<HttpAnswer>> answers;
  served.published.train({{0, {1}}});
  served.model.update(served.published.newest(), [&](Model::Lease&, Model::Lease&) {
    for (int i = 0; i < 20; ++i) answers.push_back(served.ask("POST", "/admin/reload"));
  });
  for (auto& answer : answers) EXPECT_EQ(answer.get().code, 200);
  EXPECT_LE(served.metrics.reloads, 2U);  // the first may have been begun when the others came
  std::filesystem::remove(served.options.package + "/model.json");
  EXPECT_EQ(served.ask("POST", "/admin/reload").get().code, 500);
  EXPECT_EQ(served.metrics.reloads_refused, 1U);
  EXPECT_EQ(served.ask("GET", "/admin/reload").get().code, 405);
  EXPECT_EQ(served.infer().get().code, 200);
}

TEST(ServingService, WhoComesTooEarlyOrTooLateIsToldToComeBack) {
  Served served(/*is_ready=*/false);
  const auto expect = [&](int code, const std::string& why) {
    for (const char* path : {"/v2/health/ready", "/v2/models/dlrm/ready", "infer"}) {
      const bool infers = std::string(path) == "infer";
      const HttpAnswer answer = infers ? served.infer().get() : served.ask("GET", path).get();
      EXPECT_EQ(answer.code, code) << path;
      if (code == 200) continue;
      EXPECT_EQ(answer.body, "{\"error\":\"" + why + "\"}\n") << path;
      const std::pair<std::string, std::string> wanted("Retry-After", "1");
      ASSERT_EQ(answer.headers.size(), 1U) << path;
      EXPECT_EQ(answer.headers[0], wanted) << path;
    }
    EXPECT_EQ(served.ask("GET", "/v2/health/live").get().code, 200);  // all the while
  };
  expect(503, "the server is warming up");
  served.service->be_ready();
  expect(200, "");
  served.service->start_draining();
  expect(503, "the server is draining");
  EXPECT_EQ(served.metrics.num_lost(), 0U);
}

TEST(ServingService, AnIncidentHasANumberAndItsCauseIsInTheLogAlone) {
  std::vector<std::string> log;
  Served served(true, [&](const std::string& line) { log.push_back(line); });
  served.service->on_drain([] { throw std::runtime_error("the secret of /etc"); });
  for (const char* number : {"1", "2"}) {
    const HttpAnswer answer = served.ask("POST", "/admin/drain").get();
    EXPECT_EQ(answer.code, 500);
    EXPECT_EQ(answer.body,
              std::string("{\"error\":\"incident ") + number + "; the log says more\"}\n");
    ASSERT_FALSE(log.empty());
    EXPECT_EQ(log.back(), std::string("incident ") + number + ": the secret of /etc");
  }
  EXPECT_EQ(served.infer().get().code, 200);
}

TEST(ServingService, WhatIsReceivedIsAnswered) {
  Served served;
  EXPECT_EQ(served.infer().get().code, 200);
  EXPECT_EQ(served.ask("GET", "/nowhere").get().code, 404);
  EXPECT_EQ(served.ask("POST", "/v2/models/dlrm/infer", "{").get().code, 400);
  EXPECT_EQ(served.metrics.received, 3U);
  EXPECT_EQ(served.metrics.num_lost(), 0U);
  ++served.metrics.received;
  EXPECT_EQ(served.metrics.num_lost(), 1U);
  served.metrics.restarts = 1;  // it may have been one of those that the process had
  EXPECT_EQ(served.metrics.num_lost(), 0U);
}

}  // namespace
}  // namespace tessera::serving
