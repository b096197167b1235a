// The one file that sees Boost: connections, timeouts, limits and signals. What is answered is
// service.h's affair.

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <boost/asio/dispatch.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#if TESSERA_HAS_TLS
#include <boost/asio/ssl/context.hpp>
#include <boost/beast/ssl.hpp>
#endif

#include "core/start_threads.h"
#include "serving/server_process.h"
#include "serving/service.h"
#include "serving/verification.h"
#include "tessera/serving/server.h"

namespace tessera::serving {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using ErrorCode = boost::system::error_code;
// TCP and Unix sockets alike.
using Plain = beast::basic_stream<asio::generic::stream_protocol>;

#if TESSERA_HAS_TLS
namespace ssl = asio::ssl;
using Tls = beast::ssl_stream<Plain>;
using TlsContext = ssl::context;

std::shared_ptr<TlsContext> tls_context(const TlsOptions& options) {
  auto context = std::make_shared<TlsContext>(ssl::context::tls_server);
  const auto check = [](const ErrorCode& error, const std::string& flag, const std::string& file) {
    if (error) throw std::invalid_argument(flag + " " + file + ": " + error.message());
  };
  ErrorCode error;
  context->set_options(ssl::context::default_workarounds | ssl::context::no_tlsv1 |
                       ssl::context::no_tlsv1_1 | ssl::context::no_compression);
  context->use_certificate_chain_file(options.certificate, error);
  check(error, "--tls-cert", options.certificate);
  context->use_private_key_file(options.key, ssl::context::pem, error);
  check(error, "--tls-key", options.key);
  if (::SSL_CTX_check_private_key(context->native_handle()) != 1) {
    throw std::invalid_argument("--tls-key " + options.key + " is not the key of " +
                                options.certificate);
  }
  if (!options.client_authority.empty()) {
    context->load_verify_file(options.client_authority, error);
    check(error, "--tls-client-ca", options.client_authority);
    context->set_verify_mode(ssl::verify_peer | ssl::verify_fail_if_no_peer_cert);
  }
  return context;
}
#else
struct TlsContext {};
std::shared_ptr<TlsContext> tls_context(const TlsOptions&) {
  throw std::invalid_argument("--tls-cert: this build has no TLS; install libssl-dev");
}
#endif

struct Shared {
  Shared(Service& service, const ServerOptions& options) : service(service), options(options) {}
  Service& service;
  const ServerOptions& options;
  std::shared_ptr<TlsContext> tls;  // of the data port
  std::atomic<int> num_open{0};     // requests without an answer on its way out
};

std::string text_of(beast::string_view text) { return {text.data(), text.size()}; }

// A connection, for whoever ends them all.
class AnySession {
 public:
  AnySession() = default;
  AnySession(const AnySession&) = delete;
  AnySession& operator=(const AnySession&) = delete;
  virtual ~AnySession() = default;
  virtual void drain() = 0;
};

// One connection: a request, its answer, the next request.
template <class Stream>
class Session : public AnySession, public std::enable_shared_from_this<Session<Stream>> {
  static constexpr bool kIsTls = !std::is_same_v<Stream, Plain>;
  static constexpr std::size_t kLeastPiece = 64 << 10;  // of a body

 public:
  template <class... Arguments>
  Session(Shared& shared, bool is_admin, Arguments&&... stream)
      : stream_(std::forward<Arguments>(stream)...),
        timer_(stream_.get_executor()),
        shared_(shared),
        is_admin_(is_admin) {
    ++shared_.service.gauges().connections;
  }
  ~Session() override { --shared_.service.gauges().connections; }

  void start(bool is_too_many) {
    asio::dispatch(stream_.get_executor(), [self = this->shared_from_this(), is_too_many] {
      if (is_too_many) {
        self->shared_.service.metrics().refused(Refusal::kConnections);
        if (kIsTls) return self->close();  // who has not shaken hands cannot be told
        self->keeps_alive_ = false;
        self->write(self->shared_.service.failure(503, "there are too many connections"));
      } else {
        self->begin();
      }
    });
  }

  /// Ends a connection that has no request. Others end after their answer.
  void drain() override {
    asio::dispatch(stream_.get_executor(), [self = this->shared_from_this()] {
      if (self->is_idle_) self->close();
    });
  }

 private:
  const ServerLimits& limits() const { return shared_.options.limits; }

  Plain& lowest() { return beast::get_lowest_layer(stream_); }

  void begin() {
    if constexpr (kIsTls) {
      lowest().expires_after(limits().header_time);
      stream_.async_handshake(ssl::stream_base::server,
                              [self = this->shared_from_this()](ErrorCode error) {
                                if (error) return self->close();
                                self->wait();
                              });
    } else {
      wait();
    }
  }

  // Idle until a byte comes; from then on the headers have their time.
  void wait() {
    if (buffer_.size() > 0) return read_header();
    if (shared_.service.is_draining() && !is_admin_) return close();
    is_idle_ = true;
    lowest().expires_after(limits().idle_time);
    stream_.async_read_some(buffer_.prepare(4096),
                            [self = this->shared_from_this()](ErrorCode error, std::size_t count) {
                              self->is_idle_ = false;
                              if (error) return self->close();
                              self->buffer_.commit(count);
                              self->read_header();
                            });
  }

  // Time to read a request. The socket stays when it is up, so that the client can be told; what
  // the stream itself limits is closed.
  void allow(std::chrono::milliseconds time) {
    lowest().expires_never();
    timer_.expires_after(time);
    timer_.async_wait([weak = this->weak_from_this(), turn = ++turn_](ErrorCode error) {
      const auto self = weak.lock();
      if (error || self == nullptr || self->turn_ != turn) return;
      self->is_late_ = true;
      self->lowest().cancel();
    });
  }

  void read_header() {
    parser_.emplace();
    parser_->header_limit(limits().header_bytes);
    parser_->body_limit(limits().body_bytes);
    if (const ErrorCode error = read_what_is_here(false)) return fail(error);
    if (parser_->is_header_done()) return take_header();
    allow(limits().header_time);
    http::async_read_header(stream_, buffer_, *parser_,
                            [self = this->shared_from_this()](ErrorCode error, std::size_t) {
                              ++self->turn_;
                              if (error) return self->fail(error);
                              self->take_header();
                            });
  }

  // Reads what has come already, up to the end of the headers or of the request. Most requests are
  // there as a whole, and need neither a timer nor another turn.
  ErrorCode read_what_is_here(bool reads_body) {
    ErrorCode error;
    parser_->eager(reads_body);
    buffer_.consume(parser_->put(buffer_.data(), error));
    return error == http::error::need_more ? ErrorCode() : error;
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
    if (!kIsTls && !is_admin_ && parser_->content_length() && head.method() == http::verb::post &&
        head.target().ends_with("/infer")) {
      skipped_ = *parser_->content_length();
      refusal_ = shared_.service.refusal(skipped_, text_of(head[http::field::authorization]),
                                         text_of(head["Request-Timeout-Ms"]), room_);
      if (refusal_ && !beast::iequals(head[http::field::expect], "100-continue")) {
        allow(limits().request_time);
        return skip();
      }
      if (refusal_) {  // the client waits for leave to send
        keeps_alive_ = false;
        return write(std::move(*refusal_));
      }
    }
    if (beast::iequals(head[http::field::expect], "100-continue")) {
      auto answer = std::make_shared<http::response<http::empty_body>>(http::status::continue_, 11);
      lowest().expires_after(limits().header_time);
      http::async_write(stream_, *answer,
                        [self = this->shared_from_this(), answer](ErrorCode error, std::size_t) {
                          if (error) return self->close();
                          self->read_body();
                        });
      return;
    }
    read_body();
  }

  // Lets the body of a refused request pass without reading it: a server that has too much to do
  // must not spend its time on what it will not answer.
  void skip() {
    const std::size_t here = std::min<std::size_t>(buffer_.size(), skipped_);
    buffer_.consume(here);
    skipped_ -= here;
    // TCP drops the bytes and copies none; a Unix socket fills this.
    static thread_local std::array<char, 256 << 10> dropped;
    while (skipped_ > 0) {
      const ssize_t count =
          ::recv(lowest().socket().native_handle(), dropped.data(),
                 std::min<std::uint64_t>(skipped_, dropped.size()), MSG_TRUNC | MSG_DONTWAIT);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        lowest().socket().async_wait(asio::socket_base::wait_read,
                                     [self = this->shared_from_this()](ErrorCode error) {
                                       if (error) return self->fail(error);
                                       self->skip();
                                     });
        return;
      }
      if (count <= 0) return close();
      skipped_ -= static_cast<std::uint64_t>(count);
    }
    ++turn_;
    lowest().expires_never();
    write(std::move(*refusal_));
  }

  void read_body() {
    if (!kIsTls && parser_->content_length()) return receive_body();
    if (!parser_->is_done()) {
      if (const ErrorCode error = read_what_is_here(true)) return fail(error);
    }
    if (parser_->is_done()) return answer();
    allow(limits().request_time);
    http::async_read(stream_, buffer_, *parser_,
                     [self = this->shared_from_this()](ErrorCode error, std::size_t) {
                       ++self->turn_;
                       if (error) return self->fail(error);
                       self->answer();
                     });
  }

  // The body goes straight to where it is kept, in as few pieces as it comes in: the parser takes
  // it through a buffer of 4 KiB, 18 times for 16 samples.
  void receive_body() {
    const auto size = static_cast<std::size_t>(*parser_->content_length());
    std::string& body = parser_->get().body();
    num_received_ = std::min(buffer_.size(), size);
    body.reserve(size);
    body.assign(static_cast<const char*>(buffer_.data().data()), num_received_);
    buffer_.consume(num_received_);
    if (num_received_ < size) allow(limits().request_time);
    receive_more();
  }

  void receive_more() {
    const auto size = static_cast<std::size_t>(*parser_->content_length());
    std::string& body = parser_->get().body();
    while (num_received_ < size) {
      // Memory is taken as the body comes, not as it is announced.
      if (body.size() == num_received_) {
        body.resize(std::min(size, num_received_ + std::max(kLeastPiece, num_received_)));
      }
      const ssize_t count = ::recv(lowest().socket().native_handle(), body.data() + num_received_,
                                   body.size() - num_received_, MSG_DONTWAIT);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        lowest().socket().async_wait(asio::socket_base::wait_read,
                                     [self = this->shared_from_this()](ErrorCode error) {
                                       if (error) return self->fail(error);
                                       self->receive_more();
                                     });
        return;
      }
      if (count <= 0) return close();
      num_received_ += static_cast<std::size_t>(count);
    }
    ++turn_;
    answer();
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
    request.room = std::move(room_);
    is_head_ = message.method() == http::verb::head;
    if (is_head_) request.method = "GET";
    lowest().expires_never();
    ++shared_.num_open;
    shared_.service.handle(std::move(request), [self =
                                                    this->shared_from_this()](HttpAnswer answer) {
      asio::dispatch(self->stream_.get_executor(), [self, answer = std::move(answer)]() mutable {
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
    if (is_late_) return refuse(408, "the request came too slowly");
    if (error.category() == http::make_error_code(http::error::bad_target).category() &&
        error != http::error::end_of_stream && error != http::error::partial_message) {
      return refuse(400, "not an HTTP request: " + error.message());
    }
    close();
  }

  void refuse(int code, const std::string& what) {
    room_.reset();
    keeps_alive_ = false;
    ++shared_.service.metrics().received;
    shared_.service.metrics().answered(code);
    write(shared_.service.failure(code, what));
  }

  void write(HttpAnswer answer, bool is_counted = false) {
    if (shared_.service.is_draining()) keeps_alive_ = false;
    encode(answer);
    num_written_ = kIsTls ? 0 : send_now();
    if (num_written_ == response_.size()) return written({}, is_counted);
    lowest().expires_after(limits().request_time);
    asio::async_write(stream_, asio::buffer(response_) + num_written_,
                      [self = this->shared_from_this(), is_counted](ErrorCode error, std::size_t) {
                        self->written(error, is_counted);
                      });
  }

  void encode(const HttpAnswer& answer) {
    response_.clear();
    const auto line = [this](beast::string_view name, beast::string_view value) {
      response_.append(name.data(), name.size()).append(": ");
      response_.append(value.data(), value.size()).append("\r\n");
    };
    const auto reason = http::obsolete_reason(static_cast<http::status>(answer.code));
    response_.append("HTTP/1.1 ").append(std::to_string(answer.code)).append(" ");
    response_.append(reason.data(), reason.size()).append("\r\n");
    line("Server", "tessera");
    line("Content-Type", answer.type);
    for (const auto& [name, value] : answer.headers) line(name, value);
    if (!keeps_alive_) line("Connection", "close");
    line("Content-Length", std::to_string(answer.body.size()));
    response_.append("\r\n");
    if (!is_head_) response_.append(answer.body);
  }

  // How much of the answer the socket takes at once, which is all of most; errors come again.
  std::size_t send_now() {
    const ssize_t count = ::send(lowest().socket().native_handle(), response_.data(),
                                 response_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    return count < 0 ? 0 : static_cast<std::size_t>(count);
  }

  void written(ErrorCode error, bool is_counted) {
    if (is_counted) --shared_.num_open;
    if (error) {
      if (is_counted) ++shared_.service.metrics().cancelled;
      return close();
    }
    if (!keeps_alive_) return linger();
    is_head_ = false;
    if (buffer_.size() == 0) return wait();
    // The next request is here: not on top of this one's stack.
    asio::post(stream_.get_executor(), [self = this->shared_from_this()] { self->wait(); });
  }

  // Lets the answer arrive before the socket goes: a client that is still sending would otherwise
  // see a reset in its place.
  void linger() {
    if constexpr (kIsTls) {
      lowest().expires_after(std::chrono::milliseconds(500));
      stream_.async_shutdown([self = this->shared_from_this()](ErrorCode) { self->close(); });
      return;
    }
    ErrorCode ignored;
    lowest().socket().shutdown(asio::socket_base::shutdown_send, ignored);
    lowest().expires_after(std::chrono::milliseconds(500));
    drop();
  }
  void drop() {
    buffer_.clear();
    stream_.async_read_some(buffer_.prepare(16384),
                            [self = this->shared_from_this()](ErrorCode error, std::size_t count) {
                              self->dropped_ += count;
                              if (error || self->dropped_ > (std::size_t{64} << 20)) {
                                return self->close();
                              }
                              self->drop();
                            });
  }

  void close() {
    room_.reset();
    ErrorCode ignored;
    lowest().socket().shutdown(asio::socket_base::shutdown_both, ignored);
    lowest().close();
  }

  Stream stream_;
  asio::steady_timer timer_;  // of what is read now
  int turn_ = 0;              // which reading that is
  bool is_late_ = false;
  Shared& shared_;
  bool is_admin_;
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  std::optional<HttpAnswer> refusal_;  // of a request whose body is not read
  std::uint64_t skipped_ = 0;          // bytes of it that are still to come
  std::size_t num_received_ = 0;       // bytes of a body that is read
  std::shared_ptr<Room> room_;         // kept for the one whose body is read
  std::string response_;               // that is being written, headers and all
  std::size_t num_written_ = 0;
  bool keeps_alive_ = true;
  bool is_idle_ = false;
  bool is_head_ = false;
  std::size_t dropped_ = 0;
};

// Takes connections on one address.
class Door : public std::enable_shared_from_this<Door> {
 public:
  Door(asio::io_context& context, Shared& shared, const Listener& listener, bool is_admin)
      : context_(context),
        // The listener is shared with other processes; this one closes its own number of it.
        listener_(context, ::fcntl(listener.fd(), F_DUPFD_CLOEXEC, 0)),
        retry_(context),
        shared_(shared),
        is_admin_(is_admin),
        is_unix_(listener.is_unix()) {}

  void accept() {
    listener_.async_wait(asio::posix::stream_descriptor::wait_read,
                         [self = shared_from_this()](ErrorCode error) {
                           if (error) return;
                           self->take();
                         });
  }

  /// No more connections; those without a request end.
  void close() {
    asio::post(listener_.get_executor(), [self = shared_from_this()] {
      ErrorCode ignored;
      self->listener_.close(ignored);
      for (const auto& weak : self->sessions_) {
        if (const auto session = weak.lock()) session->drain();
      }
    });
  }

 private:
  // A few at a time: the requests of those that are there want their turn.
  void take() {
    for (int i = 0; i < 16; ++i) {
      const int fd =
          ::accept4(listener_.native_handle(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd < 0) {
        if (errno == ECONNABORTED || errno == EINTR) continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK) break;
        return accept_later();
      }
      open(fd);
    }
    accept();
  }

  void open(int fd) {
    const int yes = 1;
    if (!is_unix_) ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    ErrorCode error;
    // One thread needs no order beside its own.
    Plain::socket_type socket(shared_.options.io_threads > 1
                                  ? asio::any_io_executor(asio::make_strand(context_))
                                  : asio::any_io_executor(context_.get_executor()));
    socket.assign(asio::generic::stream_protocol(is_unix_ ? AF_UNIX : AF_INET, 0), fd, error);
    if (error) {
      ::close(fd);
      return;
    }
    const auto num_open = shared_.service.gauges().connections.load();
    const bool is_too_many = num_open >= shared_.options.limits.connections && !is_admin_;
#if TESSERA_HAS_TLS
    if (shared_.tls != nullptr && !is_admin_) {
      return start<Tls>(is_too_many, std::move(socket), *shared_.tls);
    }
#endif
    start<Plain>(is_too_many, std::move(socket));
  }

  template <class Stream, class... Arguments>
  void start(bool is_too_many, Arguments&&... arguments) {
    auto session = std::make_shared<Session<Stream>>(shared_, is_admin_,
                                                     std::forward<Arguments>(arguments)...);
    remember(session);
    session->start(is_too_many);
  }

  // Out of descriptors: those that wait are taken when others have ended.
  void accept_later() {
    retry_.expires_after(std::chrono::milliseconds(100));
    retry_.async_wait([self = shared_from_this()](ErrorCode error) {
      if (!error) self->accept();
    });
  }

  void remember(const std::shared_ptr<AnySession>& session) {
    if (sessions_.size() >= 2 * num_kept_) {
      std::erase_if(sessions_, [](const auto& weak) { return weak.expired(); });
      num_kept_ = std::max<std::size_t>(64, sessions_.size());
    }
    sessions_.push_back(session);
  }

  asio::io_context& context_;
  asio::posix::stream_descriptor listener_;
  asio::steady_timer retry_;
  Shared& shared_;
  bool is_admin_;
  bool is_unix_;
  std::vector<std::weak_ptr<AnySession>> sessions_;
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
bool has_tls() noexcept { return TESSERA_HAS_TLS != 0; }

void check_tls(const TlsOptions& options) { tls_context(options); }

int run_server_process(Model& model, const ServerOptions& options, const ServerProcess& process,
                       const std::function<void()>& on_ready,
                       const std::function<void(const std::string&)>& log) {
  const int num_threads = std::max(options.io_threads, 1);
  ProcessGauges& gauges = process.metrics.processes[static_cast<std::size_t>(process.number)];
  gauges.process = ::getpid();
  Service service(model, options, process.metrics, gauges, log);
  Shared shared(service, options);
  if (!options.tls.certificate.empty()) shared.tls = tls_context(options.tls);
  // Ends before what its connections count in.
  asio::io_context context(num_threads);
  std::vector<std::shared_ptr<Door>> doors;
  doors.push_back(std::make_shared<Door>(context, shared, process.data, false));
  if (process.admin != nullptr) {
    doors.push_back(std::make_shared<Door>(context, shared, *process.admin, true));
  }
  Drain drain(context, shared, doors);
  asio::signal_set signals(context, SIGTERM, SIGINT, SIGHUP);
  std::function<void(ErrorCode, int)> on_signal = [&](ErrorCode error, int number) {
    if (error) return;
    if (number != SIGHUP) {
      drain.start();
    } else if (!process.on_reload) {
      service.reload([](bool) {});
    }
    signals.async_wait(on_signal);
  };
  signals.async_wait(on_signal);
  service.on_drain(process.on_drain ? process.on_drain
                                    : [&] { asio::post(context, [&] { drain.start(); }); });
  if (process.on_reload) service.on_reload(process.on_reload);
  Verification verification(model, process.metrics, log);
  const bool verifies = options.verifies_later && process.verifies;
  service.set_package(process.package);
  if (options.model.verifies) process.metrics.verified_package = process.package;
  if (verifies) service.on_opened([&](std::int64_t number) { verification.start(number); });
  const auto warm_up = [&] {
    try {
      model.warm_up(options.warm_bytes, options.max_batch, [&] { return !service.is_draining(); });
    } catch (const std::exception& error) {
      log(std::string("could not warm up: ") + error.what());
    }
    service.be_ready();
    if (verifies) verification.start(process.package);
    if (!service.is_draining()) on_ready();
  };
  // Beside others that answer, a process takes no connection before it can answer too. A lone one
  // is asked whether it lives.
  const bool is_lone = options.processes <= 1;
  if (!is_lone) warm_up();
  for (const auto& door : doors) door->accept();
  std::vector<std::thread> threads =
      core::start_threads(static_cast<std::size_t>(num_threads) - 1, [&] { context.run(); });
  std::vector<std::thread> warming = core::start_threads(is_lone ? 1 : 0, warm_up);
  if (is_lone && warming.empty()) warm_up();
  std::move(warming.begin(), warming.end(), std::back_inserter(threads));
  context.run();
  for (std::thread& thread : threads) thread.join();
  verification.stop();
  service.stop();  // its workers post to the context
  return drain.is_late() ? 75 : 0;
}

}  // namespace tessera::serving
