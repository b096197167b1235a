#include "serving/service.h"

#include <charconv>
#include <exception>
#include <string_view>

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

void check_method(const HttpRequest& request, std::string_view wanted) {
  if (request.method != wanted) {
    throw HttpError(
        405, "this address takes " + std::string(wanted) + ", not " + request.method.substr(0, 16));
  }
}

HttpAnswer json_answer(std::string body) { return {200, "application/json", std::move(body), {}}; }

}  // namespace

Service::Service(Model& model, const ServerOptions& options, Log log)
    : model_(model),
      options_(options),
      log_(std::move(log)),
      parser_(model.lease().model(), options.limits),
      batcher_(model, options, metrics_, log_) {}

std::shared_ptr<const ModelInfo> Service::info() const {
  return std::make_shared<ModelInfo>(model_.lease().model());
}

void Service::check_token(const HttpRequest& request) const {
  if (options_.token.empty()) return;
  if (request.authorization.empty()) {
    throw HttpError(401, "a token is needed: Authorization: Bearer TOKEN", "Authorization");
  }
  constexpr std::string_view kScheme = "Bearer ";
  const std::string_view given = request.authorization;
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

bool Service::reload() {
  try {
    model_.reload(options_.package);
    ++metrics_.reloads;
    log_("serving step " + std::to_string(info()->step) + " of " + options_.package);
    return true;
  } catch (const std::exception& error) {
    ++metrics_.reloads_refused;
    log_(std::string("the package was not opened again, the old one goes on: ") + error.what());
    return false;
  }
}

HttpAnswer Service::answer(const HttpRequest& request) {
  const std::string path = path_of(request.target);
  if (path == "/v2/health/live") {
    check_method(request, "GET");
    return json_answer("{\"live\":true}\n");
  }
  if (path == "/v2/health/ready") {
    check_method(request, "GET");
    if (is_draining_) throw HttpError(503, "the server is draining");
    return json_answer("{\"ready\":true}\n");
  }
  check_token(request);
  const auto model = info();
  if (request.is_admin) {
    if (path == "/admin/versions") {
      check_method(request, "GET");
      return json_answer("{\"versions\":[" + std::to_string(model->step) + "]}\n");
    }
    if (path == "/admin/reload") {
      check_method(request, "POST");
      if (!reload()) throw HttpError(500, "the package was not opened again; the log says why");
      return json_answer("{\"version\":" + std::to_string(info()->step) + "}\n");
    }
    if (path == "/admin/drain") {
      check_method(request, "POST");
      if (drain_) drain_();
      return json_answer("{\"draining\":true}\n");
    }
  }
  if (path == "/metrics") {
    check_method(request, "GET");
    return {200,
            "text/plain; version=0.0.4",
            metrics_.text(model->step, model_.mapped_bytes(), !is_draining_),
            {}};
  }
  if (path == "/v2" || path == "/v2/") {
    check_method(request, "GET");
    return json_answer("{\"name\":\"tessera\",\"version\":\"" + std::to_string(kVersionMajor) +
                       "." + std::to_string(kVersionMinor) + "." + std::to_string(kVersionPatch) +
                       "\",\"extensions\":[\"binary_tensor_data\"]}\n");
  }
  const std::string base = "/v2/models/" + model->name;
  const std::string version = base + "/versions/" + std::to_string(model->step);
  if (path == base || path == version) {
    check_method(request, "GET");
    return json_answer(encode_metadata(*model));
  }
  if (path == base + "/ready" || path == version + "/ready") {
    check_method(request, "GET");
    if (is_draining_) throw HttpError(503, "the server is draining");
    return json_answer("{\"name\":\"" + model->name + "\",\"ready\":true}\n");
  }
  if (path.starts_with(base + "/versions/")) {
    throw HttpError(404, "there is no such version; " + std::to_string(model->step) + " is served");
  }
  if (path.starts_with("/v2/models/")) {
    throw HttpError(404, "there is no such model; " + model->name + " is served");
  }
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
    } else {
      finish(answer(request));
    }
  } catch (const HttpError& error) {
    finish(failure(error.code(), error.what(), error.where()));
  } catch (const std::exception& error) {
    const std::string number = std::to_string(++num_incidents_);
    log_("incident " + number + ": " + error.what());
    finish(failure(500, "incident " + number + "; the log says more"));
  }
}

void Service::infer(HttpRequest request, std::function<void(HttpAnswer)> done) {
  const auto arrived = Clock::now();
  check_token(request);
  // The address of the model with another last word: the same answers for what is not there.
  const auto model = info();
  const std::string path = path_of(request.target);
  const std::string base = "/v2/models/" + model->name;
  if (path != base + "/infer" &&
      path != base + "/versions/" + std::to_string(model->step) + "/infer") {
    HttpRequest other = request;
    other.target = path.substr(0, path.size() - std::string_view("/infer").size());
    other.method = "GET";
    answer(other);
    throw HttpError(404, "there is nothing at this address");
  }
  check_method(request, "POST");
  if (is_draining_) throw HttpError(503, "the server is draining");
  if (!request.content_encoding.empty() && request.content_encoding != "identity") {
    throw HttpError(
        415,
        "bodies in '" + request.content_encoding.substr(0, 40) + "' are not read; send them plain",
        "Content-Encoding");
  }
  const auto json_bytes = number_in(request.json_bytes, "Inference-Header-Content-Length");
  const auto timeout = number_in(request.timeout, "Request-Timeout-Ms");
  Job job;
  job.request = parser_.parse(request.body, json_bytes);
  const std::vector<FeatureBags> bags = job.request.bags();
  try {
    model_.lease().check({job.request.num_samples, job.request.dense, bags});
  } catch (const BadRequest& error) {
    throw HttpError(error.is_malformed() ? 400 : 422, error.what(), error.where());
  }
  job.arrived = arrived;
  job.deadline =
      arrived + (timeout ? std::chrono::milliseconds(std::min<std::uint64_t>(*timeout, 3'600'000))
                         : options_.latency_budget);
  job.num_bytes = request.body.size();
  job.done = [this, done = std::move(done)](const InferRequest& asked, Outcome outcome) {
    done(from(asked, std::move(outcome)));
  };
  batcher_.add(std::move(job));
}

HttpAnswer Service::from(const InferRequest& request, Outcome outcome) {
  if (outcome.code == 500) {
    const std::string number = std::to_string(++num_incidents_);
    log_("incident " + number + ": " + outcome.error);
    return failure(500, "incident " + number + "; the log says more");
  }
  if (outcome.code != 200) return failure(outcome.code, outcome.error, outcome.where);
  InferAnswer encoded = encode_answer(request, *outcome.model, outcome.logits);
  HttpAnswer answer{200, "application/json", std::move(encoded.body), {}};
  if (encoded.json_bytes > 0) {
    answer.type = "application/octet-stream";
    answer.headers.emplace_back("Inference-Header-Content-Length",
                                std::to_string(encoded.json_bytes));
  }
  answer.headers.emplace_back("Tessera-Version", std::to_string(outcome.model->step));
  return answer;
}

}  // namespace tessera::serving
