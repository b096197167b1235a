// The one file that sees Boost: connections, timeouts, limits and signals. What is answered is
// service.h's affair.

#include <atomic>
#include <csignal>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <boost/asio/dispatch.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>

#include "serving/service.h"
#include "tessera/serving/server.h"

namespace tessera::serving {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using ErrorCode = boost::system::error_code;

struct Shared {
  Shared(Service& service, const ServerOptions& options) : service(service), options(options) {}
  Service& service;
  const ServerOptions& options;
  std::atomic<int> num_open{0};  // requests without an answer on its way out
};

std::string text_of(beast::string_view text) { return {text.data(), text.size()}; }

// One connection: a request, its answer, the next request.
class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(tcp::socket socket, Shared& shared, bool is_admin)
      : stream_(std::move(socket)), shared_(shared), is_admin_(is_admin) {
    ++shared_.service.metrics().connections;
  }
  ~Session() { --shared_.service.metrics().connections; }

  void start(bool is_too_many) {
    asio::dispatch(stream_.get_executor(), [self = shared_from_this(), is_too_many] {
      if (is_too_many) {
        self->keeps_alive_ = false;
        self->shared_.service.metrics().refused("connections");
        self->write(self->shared_.service.failure(503, "there are too many connections"));
      } else {
        self->wait();
      }
    });
  }

  /// Ends a connection that has no request. Others end after their answer.
  void drain() {
    asio::dispatch(stream_.get_executor(), [self = shared_from_this()] {
      if (self->is_idle_) self->close();
    });
  }

 private:
  const ServerLimits& limits() const { return shared_.options.limits; }

  // Idle until a byte comes; from then on the headers have their time.
  void wait() {
    if (buffer_.size() > 0) return read_header();
    if (shared_.service.is_draining()) return close();
    is_idle_ = true;
    stream_.expires_after(limits().idle_time);
    stream_.async_read_some(buffer_.prepare(4096),
                            [self = shared_from_this()](ErrorCode error, std::size_t count) {
                              self->is_idle_ = false;
                              if (error) return self->close();
                              self->buffer_.commit(count);
                              self->read_header();
                            });
  }

  void read_header() {
    parser_.emplace();
    parser_->header_limit(limits().header_bytes);
    parser_->body_limit(limits().body_bytes);
    stream_.expires_after(limits().header_time);
    http::async_read_header(stream_, buffer_, *parser_,
                            [self = shared_from_this()](ErrorCode error, std::size_t) {
                              if (error) return self->fail(error);
                              self->take_header();
                            });
  }

  void take_header() {
    const auto& head = parser_->get();
    keeps_alive_ = head.keep_alive();
    const bool has_length = parser_->content_length() || parser_->chunked();
    if (head.method() == http::verb::post && !has_length && !is_admin_) {
      return refuse(411, "a POST needs a Content-Length");
    }
    if (parser_->content_length() && *parser_->content_length() > limits().body_bytes) {
      return refuse(413, "the body has " + std::to_string(*parser_->content_length()) +
                             " bytes; the limit is " + std::to_string(limits().body_bytes));
    }
    if (beast::iequals(head[http::field::expect], "100-continue")) {
      auto answer = std::make_shared<http::response<http::empty_body>>(http::status::continue_, 11);
      stream_.expires_after(limits().header_time);
      http::async_write(stream_, *answer,
                        [self = shared_from_this(), answer](ErrorCode error, std::size_t) {
                          if (error) return self->close();
                          self->read_body();
                        });
      return;
    }
    read_body();
  }

  void read_body() {
    stream_.expires_after(limits().request_time);
    http::async_read(stream_, buffer_, *parser_,
                     [self = shared_from_this()](ErrorCode error, std::size_t) {
                       if (error) return self->fail(error);
                       self->answer();
                     });
  }

  void answer() {
    auto message = parser_->release();
    HttpRequest request;
    request.method = text_of(message.method_string());
    request.target = text_of(message.target());
    request.is_admin = is_admin_;
    request.authorization = text_of(message[http::field::authorization]);
    request.content_encoding = text_of(message[http::field::content_encoding]);
    request.json_bytes = text_of(message["Inference-Header-Content-Length"]);
    request.timeout = text_of(message["Request-Timeout-Ms"]);
    request.body = std::move(message.body());
    is_head_ = message.method() == http::verb::head;
    if (is_head_) request.method = "GET";
    stream_.expires_never();
    ++shared_.num_open;
    shared_.service.handle(std::move(request), [self = shared_from_this()](HttpAnswer answer) {
      asio::post(self->stream_.get_executor(), [self, answer = std::move(answer)]() mutable {
        self->write(std::move(answer), true);
      });
    });
  }

  // What could not be read: a limit, a timeout, or no HTTP at all.
  void fail(ErrorCode error) {
    if (error == http::error::body_limit) return refuse(413, "the body is too large");
    if (error == http::error::header_limit || error == http::error::buffer_overflow) {
      return refuse(431, "the headers are too large");
    }
    if (error == beast::error::timeout) return refuse(408, "the request came too slowly");
    if (error.category() == http::make_error_code(http::error::bad_target).category() &&
        error != http::error::end_of_stream && error != http::error::partial_message) {
      return refuse(400, "not an HTTP request: " + error.message());
    }
    close();
  }

  void refuse(int code, const std::string& what) {
    keeps_alive_ = false;
    ++shared_.service.metrics().received;
    shared_.service.metrics().answered(code);
    // Beast closes a socket whose time is up; there is nobody to tell then.
    if (code == 408) return close();
    write(shared_.service.failure(code, what));
  }

  void write(HttpAnswer answer, bool is_counted = false) {
    if (shared_.service.is_draining()) keeps_alive_ = false;
    response_.emplace(static_cast<http::status>(answer.code), 11);
    response_->set(http::field::server, "tessera");
    response_->set(http::field::content_type, answer.type);
    for (const auto& [name, value] : answer.headers) response_->set(name, value);
    response_->keep_alive(keeps_alive_);
    response_->body() = std::move(answer.body);
    response_->prepare_payload();
    if (is_head_) response_->body().clear();
    stream_.expires_after(limits().request_time);
    http::async_write(stream_, *response_,
                      [self = shared_from_this(), is_counted](ErrorCode error, std::size_t) {
                        if (is_counted) --self->shared_.num_open;
                        if (error) {
                          if (is_counted) ++self->shared_.service.metrics().cancelled;
                          return self->close();
                        }
                        if (!self->keeps_alive_) return self->linger();
                        self->is_head_ = false;
                        self->wait();
                      });
  }

  // Lets the answer arrive before the socket goes: a client that is still sending would otherwise
  // see a reset in its place.
  void linger() {
    ErrorCode ignored;
    stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
    stream_.expires_after(std::chrono::milliseconds(500));
    drop();
  }
  void drop() {
    buffer_.clear();
    stream_.async_read_some(buffer_.prepare(16384),
                            [self = shared_from_this()](ErrorCode error, std::size_t count) {
                              self->dropped_ += count;
                              if (error || self->dropped_ > (std::size_t{64} << 20)) {
                                return self->close();
                              }
                              self->drop();
                            });
  }

  void close() {
    ErrorCode ignored;
    stream_.socket().shutdown(tcp::socket::shutdown_both, ignored);
    stream_.close();
  }

  beast::tcp_stream stream_;
  Shared& shared_;
  bool is_admin_;
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  std::optional<http::response<http::string_body>> response_;
  bool keeps_alive_ = true;
  bool is_idle_ = false;
  bool is_head_ = false;
  std::size_t dropped_ = 0;
};

// Takes connections on one address.
class Door : public std::enable_shared_from_this<Door> {
 public:
  Door(asio::io_context& context, Shared& shared, const std::string& host, int port, bool is_admin)
      : context_(context),
        acceptor_(context),
        retry_(context),
        shared_(shared),
        is_admin_(is_admin) {
    ErrorCode error;
    const auto address = asio::ip::make_address(host, error);
    check(error, host, port);
    const tcp::endpoint endpoint(address, static_cast<unsigned short>(port));
    acceptor_.open(endpoint.protocol(), error);
    check(error, host, port);
    acceptor_.set_option(asio::socket_base::reuse_address(true), error);
    acceptor_.bind(endpoint, error);
    check(error, host, port);
    acceptor_.listen(asio::socket_base::max_listen_connections, error);
    check(error, host, port);
  }

  int port() const { return acceptor_.local_endpoint().port(); }

  void accept() {
    acceptor_.async_accept(asio::make_strand(context_), [self = shared_from_this()](
                                                            ErrorCode error, tcp::socket socket) {
      if (error == asio::error::operation_aborted) return;
      if (error) return self->accept_later();
      ErrorCode ignored;
      socket.set_option(tcp::no_delay(true), ignored);
      const auto num_open = self->shared_.service.metrics().connections.load();
      auto session = std::make_shared<Session>(std::move(socket), self->shared_, self->is_admin_);
      self->remember(session);
      session->start(num_open >= self->shared_.options.limits.connections && !self->is_admin_);
      self->accept();
    });
  }

  /// No more connections; those without a request end.
  void close() {
    asio::post(acceptor_.get_executor(), [self = shared_from_this()] {
      ErrorCode ignored;
      self->acceptor_.close(ignored);
      for (const auto& weak : self->sessions_) {
        if (const auto session = weak.lock()) session->drain();
      }
    });
  }

 private:
  static void check(const ErrorCode& error, const std::string& host, int port) {
    if (!error) return;
    throw std::system_error(error.value(), std::generic_category(),
                            "serve: " + host + ":" + std::to_string(port));
  }

  // Out of descriptors: those that wait are taken when others have ended.
  void accept_later() {
    retry_.expires_after(std::chrono::milliseconds(100));
    retry_.async_wait([self = shared_from_this()](ErrorCode error) {
      if (!error) self->accept();
    });
  }

  void remember(const std::shared_ptr<Session>& session) {
    if (sessions_.size() >= 2 * num_kept_) {
      std::erase_if(sessions_, [](const auto& weak) { return weak.expired(); });
      num_kept_ = std::max<std::size_t>(64, sessions_.size());
    }
    sessions_.push_back(session);
  }

  asio::io_context& context_;
  tcp::acceptor acceptor_;
  asio::steady_timer retry_;
  Shared& shared_;
  bool is_admin_;
  std::vector<std::weak_ptr<Session>> sessions_;
  std::size_t num_kept_ = 64;
};

// Ends the server: no new connections, then when nothing is open, or time is up.
class Drain {
 public:
  Drain(asio::io_context& context, Shared& shared, std::vector<std::shared_ptr<Door>> doors)
      : context_(context), timer_(context), shared_(shared), doors_(std::move(doors)) {}

  void start() {
    if (shared_.service.is_draining()) return;
    shared_.service.start_draining();
    until_ = std::chrono::steady_clock::now() + shared_.options.drain_time;
    doors_.front()->close();  // the admin's door stays open: it tells that the server is draining
    watch();
  }
  bool is_late() const { return is_late_; }

 private:
  void watch() {
    const bool is_done = shared_.num_open == 0;
    is_late_ = !is_done && std::chrono::steady_clock::now() >= until_;
    if (is_done || is_late_) {
      for (const auto& door : doors_) door->close();
      // Answers that were just written leave the process first.
      timer_.expires_after(std::chrono::milliseconds(20));
      timer_.async_wait([this](ErrorCode) { context_.stop(); });
      return;
    }
    timer_.expires_after(std::chrono::milliseconds(10));
    timer_.async_wait([this](ErrorCode) { watch(); });
  }

  asio::io_context& context_;
  asio::steady_timer timer_;
  Shared& shared_;
  std::vector<std::shared_ptr<Door>> doors_;
  std::chrono::steady_clock::time_point until_;
  std::atomic<bool> is_late_{false};
};

}  // namespace

bool has_server() noexcept { return true; }

int serve(Model& model, const ServerOptions& options,
          const std::function<void(const ServerPorts&)>& on_ready,
          const std::function<void(const std::string&)>& log) {
  const int num_threads = std::max(options.io_threads, 1);
  Service service(model, options, log);
  Shared shared(service, options);
  bool is_late = false;
  {
    // Ends before what its connections count in.
    asio::io_context context(num_threads);
    std::vector<std::shared_ptr<Door>> doors;
    doors.push_back(std::make_shared<Door>(context, shared, options.host, options.port, false));
    if (options.admin_port >= 0) {
      doors.push_back(
          std::make_shared<Door>(context, shared, "127.0.0.1", options.admin_port, true));
    }
    Drain drain(context, shared, doors);
    asio::signal_set signals(context, SIGTERM, SIGINT, SIGHUP);
    std::function<void(ErrorCode, int)> on_signal = [&](ErrorCode error, int number) {
      if (error) return;
      if (number == SIGHUP) {
        service.reload();
      } else {
        drain.start();
      }
      signals.async_wait(on_signal);
    };
    signals.async_wait(on_signal);
    service.on_drain([&] { asio::post(context, [&] { drain.start(); }); });
    for (const auto& door : doors) door->accept();
    on_ready({doors.front()->port(), doors.size() > 1 ? doors.back()->port() : 0});
    std::vector<std::thread> threads;
    for (int i = 1; i < num_threads; ++i) threads.emplace_back([&] { context.run(); });
    context.run();
    for (std::thread& thread : threads) thread.join();
    service.stop();  // its workers post to the context
    is_late = drain.is_late();
  }
  const Metrics& metrics = service.metrics();
  log("answered " + std::to_string(metrics.num_answered()) + " of " +
      std::to_string(metrics.received.load()) + " requests, " +
      std::to_string(metrics.cancelled.load()) + " of them to clients that were gone");
  return is_late ? 75 : 0;
}

}  // namespace tessera::serving
