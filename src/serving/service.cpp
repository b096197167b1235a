#include "serving/service.h"

#include <algorithm>
#include <charconv>
#include <ctime>
#include <exception>
#include <string_view>

#include <nlohmann/json.hpp>

#include "serving/live_page.h"
#include "tessera/checkpoint/error.h"
#include "tessera/core/version.h"

namespace tessera::serving {
namespace {

// Takes as long for a wrong token as for the right one of the same length.
bool is_same_secret(std::string_view given, std::string_view wanted) {
  unsigned difference = given.size() == wanted.size() ? 0 : 1;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const auto own = static_cast<unsigned char>(wanted[i]);
    const auto other = static_cast<unsigned char>(i < given.size() ? given[i] : '\0');
    difference |= static_cast<unsigned>(own ^ other);
  }
  return difference == 0;
}

std::optional<std::uint64_t> number_in(const std::string& text, const std::string& header) {
  if (text.empty()) return std::nullopt;
  std::uint64_t value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size()) {
    throw HttpError(400, "header " + header + " is not a number", header);
  }
  return value;
}

std::string path_of(const std::string& target) { return target.substr(0, target.find('?')); }

// The value of a name in the query of an address; empty if it is not there.
std::string query_of(const std::string& target, const std::string& name) {
  const std::size_t begin = target.find('?');
  if (begin == std::string::npos) return "";
  std::string rest = target.substr(begin + 1);
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find('&'), rest.size());
    const std::string pair = rest.substr(0, end);
    if (pair.starts_with(name + "=")) return pair.substr(name.size() + 1);
    rest = rest.substr(std::min(end + 1, rest.size()));
  }
  return "";
}

void check_method(const HttpRequest& request, std::string_view wanted) {
  if (request.method != wanted) {
    throw HttpError(
        405, "this address takes " + std::string(wanted) + ", not " + request.method.substr(0, 16));
  }
}

HttpAnswer json_answer(std::string body) { return {200, "application/json", std::move(body), {}}; }

}  // namespace

Service::Service(Model& model, const ServerOptions& options, Metrics& metrics,
                 ProcessGauges& gauges, Log log)
    : model_(model),
      options_(options),
      metrics_(metrics),
      gauges_(gauges),
      log_(std::move(log)),
      info_(model.lease().model()),
      parser_(info_, options.limits),
      batcher_(model, options, metrics_, gauges_),
      reloads_([this] { return open_package(); }) {}

std::vector<std::int64_t> Service::steps() const {
  std::vector<std::int64_t> steps;
  for (const VersionInfo& version : model_.versions()) steps.push_back(version.step);
  return steps;
}

std::int64_t Service::version_in(const std::string& text) const {
  std::int64_t step = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), step);
  const auto all = steps();
  if (result.ec == std::errc() && result.ptr == text.data() + text.size() &&
      std::find(all.begin(), all.end(), step) != all.end()) {
    return step;
  }
  std::string known;
  for (const std::int64_t one : all) known += (known.empty() ? "" : ", ") + std::to_string(one);
  throw HttpError(404, "there is no version '" + text.substr(0, 40) + "'; there are " + known);
}

std::string Service::versions_text() const {
  nlohmann::ordered_json versions = nlohmann::ordered_json::array();
  for (const VersionInfo& version : model_.versions()) {
    versions.push_back({{"version", version.step},
                        {"current", version.is_current},
                        {"made", version.made},
                        {"rows_updated", version.rows_updated},
                        {"source", version.source}});
  }
  const nlohmann::ordered_json text = {{"versions", versions},
                                       {"held", metrics_.updates.is_held.load()},
                                       {"error", metrics_.updates.error()}};
  return text.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

Metrics::Model Service::model_figures() const {
  const bool is_damaged = metrics_.damaged_package == package_;
  const VersionInfo now = model_.current();
  return {now.step,
          static_cast<std::int64_t>(std::time(nullptr)) - now.made,
          model_.mapped_bytes(),
          is_ready_ && !is_draining_ && !is_damaged,
          metrics_.verified_package == package_,
          is_damaged};
}

void Service::check_ready() const {
  if (is_draining_) throw HttpError(503, "the server is draining");
  if (!is_ready_) throw HttpError(503, "the server is warming up");
  if (metrics_.damaged_package == package_) {
    throw HttpError(503, "the package is damaged; the log says where. Export it again, and reload");
  }
}

void Service::check_token(const std::string& authorization) const {
  if (options_.token.empty()) return;
  if (authorization.empty()) {
    throw HttpError(401, "a token is needed: Authorization: Bearer TOKEN", "Authorization");
  }
  constexpr std::string_view kScheme = "Bearer ";
  const std::string_view given = authorization;
  if (!given.starts_with(kScheme) ||
      !is_same_secret(given.substr(kScheme.size()), options_.token)) {
    throw HttpError(403, "the token is not the right one", "Authorization");
  }
}

HttpAnswer Service::failure(int code, const std::string& what, const std::string& where) {
  HttpAnswer answer{code, "application/json", encode_error(what, where), {}};
  if (code == 429 || code == 503) answer.headers.emplace_back("Retry-After", "1");
  if (code == 401) answer.headers.emplace_back("WWW-Authenticate", "Bearer");
  return answer;
}

void Service::reload(std::function<void(bool)> done) { reloads_.ask(std::move(done)); }

bool Service::open_package() {
  try {
    model_.reload(options_.package, options_.model.verifies);
    ++metrics_.reloads;
    ++package_;
    if (options_.model.verifies) metrics_.verified_package = package_.load();
    if (opened_) opened_(package_);
    log_("serving step " + std::to_string(model_.current().step) + " of " + options_.package);
    return true;
  } catch (const std::exception& error) {
    ++metrics_.reloads_refused;
    log_(std::string("the package was not opened again, the old one goes on: ") + error.what());
    return false;
  }
}

std::optional<HttpAnswer> Service::answer_admin(const HttpRequest& request,
                                                const std::string& path) {
  if (path == "/admin/figures") {
    check_method(request, "GET");
    return json_answer(metrics_.json(model_figures()));
  }
  if (path == "/admin/versions") {
    check_method(request, "GET");
    return json_answer(versions_text());
  }
  if (path == "/admin/rollback") {
    check_method(request, "POST");
    const std::string wanted = query_of(request.target, "version");
    if (wanted.empty()) throw HttpError(400, "say which: /admin/rollback?version=STEP", "version");
    const std::int64_t step = version_in(wanted);
    metrics_.updates.is_held = true;
    if (!model_.roll_back(step)) throw HttpError(404, "version " + wanted + " is gone", "version");
    log_("went back to step " + wanted + "; updates wait for /admin/resume");
    return json_answer(versions_text());
  }
  if (path == "/admin/resume") {
    check_method(request, "POST");
    metrics_.updates.is_held = false;
    return json_answer(versions_text());
  }
  if (path == "/admin/drain") {
    check_method(request, "POST");
    if (drain_) drain_();
    return json_answer("{\"draining\":true}\n");
  }
  return std::nullopt;
}

void Service::answer_reload(const HttpRequest& request, std::function<void(HttpAnswer)> done) {
  check_token(request.authorization);
  check_method(request, "POST");
  if (reload_) {
    reload_();
    return done({202, "application/json", "{\"reloading\":true}\n", {}});
  }
  reload([this, done = std::move(done)](bool is_open) {
    if (!is_open) return done(failure(500, "the package was not opened again; the log says why"));
    done(json_answer("{\"version\":" + std::to_string(model_.current().step) + "}\n"));
  });
}

HttpAnswer Service::answer_model(const HttpRequest& request, const std::string& path) {
  const std::string base = "/v2/models/" + info_.name;
  if (path != base && !path.starts_with(base + "/")) {
    throw HttpError(404, "there is no such model; " + info_.name + " is served");
  }
  std::string rest = path.substr(base.size());
  constexpr std::string_view kVersions = "/versions/";
  if (rest.starts_with(kVersions)) {
    rest = rest.substr(kVersions.size());
    const std::size_t end = std::min(rest.find('/'), rest.size());
    version_in(rest.substr(0, end));
    rest = rest.substr(end);
  }
  if (rest.empty()) {
    check_method(request, "GET");
    return json_answer(encode_metadata(info_, steps()));
  }
  if (rest == "/ready") {
    check_method(request, "GET");
    check_ready();
    return json_answer("{\"name\":\"" + info_.name + "\",\"ready\":true}\n");
  }
  throw HttpError(404, "there is nothing at this address");
}

HttpAnswer Service::answer(const HttpRequest& request) {
  const std::string path = path_of(request.target);
  if (path == "/v2/health/live") {
    check_method(request, "GET");
    return json_answer("{\"live\":true}\n");
  }
  if (path == "/v2/health/ready") {
    check_method(request, "GET");
    check_ready();
    return json_answer("{\"ready\":true}\n");
  }
  if (request.is_admin && path == "/") {  // the page holds nothing; it asks for the token
    check_method(request, "GET");
    return {200,
            "text/html; charset=utf-8",
            std::string(live_page()),
            {{"Cache-Control", "no-store"},
             {"Content-Security-Policy",
              "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
              "connect-src 'self'"}}};
  }
  check_token(request.authorization);
  if (request.is_admin) {
    if (auto answer = answer_admin(request, path)) return std::move(*answer);
  }
  if (path == "/metrics") {
    check_method(request, "GET");
    return {200, "text/plain; version=0.0.4", metrics_.text(model_figures()), {}};
  }
  if (path == "/v2" || path == "/v2/") {
    check_method(request, "GET");
    return json_answer("{\"name\":\"tessera\",\"version\":\"" + std::to_string(kVersionMajor) +
                       "." + std::to_string(kVersionMinor) + "." + std::to_string(kVersionPatch) +
                       "\",\"extensions\":[\"binary_tensor_data\"]}\n");
  }
  if (path.starts_with("/v2/models/")) return answer_model(request, path);
  throw HttpError(404, "there is nothing at this address");
}

HttpAnswer Service::counted(HttpAnswer answer, Clock::time_point arrived) {
  metrics_.answered(answer.code);
  metrics_.total.add(Clock::now() - arrived);
  return answer;
}

void Service::handle(HttpRequest request, std::function<void(HttpAnswer)> done) {
  const auto arrived = Clock::now();
  ++metrics_.received;
  const auto finish = [this, done = std::move(done), arrived](HttpAnswer answer) {
    done(counted(std::move(answer), arrived));
  };
  try {
    if (request.target.size() > 6 && path_of(request.target).ends_with("/infer")) {
      infer(std::move(request), finish);
    } else if (request.is_admin && path_of(request.target) == "/admin/reload") {
      answer_reload(request, finish);
    } else {
      finish(answer(request));
    }
  } catch (const HttpError& error) {
    finish(failure(error.code(), error.what(), error.where()));
  } catch (const std::exception& error) {
    finish(incident(error.what()));
  }
}

Clock::time_point Service::deadline_of(const std::string& timeout,
                                       Clock::time_point arrived) const {
  const auto time = number_in(timeout, "Request-Timeout-Ms");
  return arrived + (time ? std::chrono::milliseconds(std::min<std::uint64_t>(*time, 3'600'000))
                         : options_.latency_budget);
}

std::optional<HttpAnswer> Service::refusal(std::uint64_t num_bytes,
                                           const std::string& authorization,
                                           const std::string& timeout,
                                           std::shared_ptr<Room>& room) {
  const auto arrived = Clock::now();
  try {
    check_token(authorization);  // who is not let in learns nothing of the queue
    if (!is_ready_ || is_draining_) return std::nullopt;
    room = batcher_.keep_room(num_bytes, deadline_of(timeout, arrived));
    return std::nullopt;
  } catch (const HttpError& error) {
    const bool is_told = error.code() == 401 || error.code() == 403 || error.code() == 429;
    if (!is_told) return std::nullopt;  // later, with the rest of what is wrong
    ++metrics_.received;
    return counted(failure(error.code(), error.what(), error.where()), arrived);
  }
}

void Service::infer(HttpRequest request, std::function<void(HttpAnswer)> done) {
  const auto arrived = Clock::now();
  check_token(request.authorization);
  const std::string path = path_of(request.target);
  const std::string address = path.substr(0, path.size() - std::string_view("/infer").size());
  const std::string base = "/v2/models/" + info_.name;
  std::optional<std::int64_t> step;
  if (address.starts_with(base + "/versions/")) {
    step = version_in(address.substr(base.size() + std::string_view("/versions/").size()));
  } else if (address != base) {
    HttpRequest model;  // the same answers for what is not there
    model.method = "GET";
    answer_model(model, address);
    throw HttpError(404, "there is nothing at this address");
  }
  check_method(request, "POST");
  check_ready();
  if (!request.content_encoding.empty() && request.content_encoding != "identity") {
    throw HttpError(
        415,
        "bodies in '" + request.content_encoding.substr(0, 40) + "' are not read; send them plain",
        "Content-Encoding");
  }
  const auto json_bytes = number_in(request.json_bytes, "Inference-Header-Content-Length");
  Job job;
  job.step = step;
  job.arrived = arrived;
  job.deadline = deadline_of(request.timeout, arrived);
  job.num_bytes = request.body.size();
  job.room = std::move(request.room);
  batcher_.check_room(job.num_bytes, job.deadline, job.room != nullptr);
  job.request = parser_.parse(request.body, json_bytes);
  const std::vector<FeatureBags> bags = job.request.bags();
  try {
    model_.lease().check({job.request.num_samples, job.request.dense, bags});
  } catch (const BadRequest& error) {
    throw HttpError(error.is_malformed() ? 400 : 422, error.what(), error.where());
  }
  job.done = [this, done = std::move(done)](const InferRequest& asked, Outcome outcome) {
    done(from(asked, std::move(outcome)));
  };
  batcher_.add(std::move(job));
}

HttpAnswer Service::incident(const std::string& what) {
  const std::string number = std::to_string(++num_incidents_);
  log_("incident " + number + ": " + what);
  return failure(500, "incident " + number + "; the log says more");
}

HttpAnswer Service::from(const InferRequest& request, Outcome outcome) {
  if (outcome.code == 500) return incident(outcome.error);
  if (outcome.code != 200) return failure(outcome.code, outcome.error, outcome.where);
  InferAnswer encoded;
  try {
    encoded = encode_answer(request, info_, outcome.step, outcome.logits);
  } catch (const HttpError& error) {
    return failure(error.code(), error.what(), error.where());
  } catch (const std::exception& error) {
    return incident(error.what());
  }
  HttpAnswer answer{200, "application/json", std::move(encoded.body), {}};
  if (encoded.json_bytes > 0) {
    answer.type = "application/octet-stream";
    answer.headers.emplace_back("Inference-Header-Content-Length",
                                std::to_string(encoded.json_bytes));
  }
  answer.headers.emplace_back("Tessera-Version", std::to_string(outcome.step));
  return answer;
}

}  // namespace tessera::serving
