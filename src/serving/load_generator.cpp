#include "serving/load_generator.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string_view>
#include <system_error>

namespace tessera::serving {
namespace {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

// The number behind a header's name, or -1.
std::int64_t header_number(std::string_view head, std::string_view name) {
  for (std::size_t place = head.find('\n'); place != std::string_view::npos;
       place = head.find('\n', place + 1)) {
    const std::string_view line = head.substr(place + 1);
    if (line.size() < name.size() + 1 || line[name.size()] != ':') continue;
    const bool is_same = std::equal(name.begin(), name.end(), line.begin(), [](char a, char b) {
      return std::tolower(static_cast<unsigned char>(a)) ==
             std::tolower(static_cast<unsigned char>(b));
    });
    if (!is_same) continue;
    std::size_t begin = name.size() + 1;
    while (begin < line.size() && line[begin] == ' ') ++begin;
    std::int64_t number = -1;
    std::from_chars(line.data() + begin, line.data() + line.size(), number);
    return number;
  }
  return -1;
}

// A connection asks one request at a time.
class Asker {
 public:
  Asker(int poller, const LoadOptions& options) : poller_(poller), options_(options) { connect(); }
  Asker(const Asker&) = delete;
  Asker& operator=(const Asker&) = delete;
  ~Asker() {
    if (fd_ >= 0) ::close(fd_);
  }

  bool is_free() const { return request_ == nullptr; }
  Time due() const { return due_; }
  std::size_t number() const { return number_; }       // of the request
  std::string_view answer() const { return answer_; }  // once it is whole

  // False if the connection is gone.
  bool ask(const std::string& request, std::size_t number, Time due) {
    request_ = &request;
    number_ = number;
    sent_ = 0;
    due_ = due;
    answer_.clear();
    return send();
  }

  // What has come; the code of a whole answer, 0 if more is to come, -1 if the connection is gone.
  int look() {
    if (sent_ < request_->size() && !send()) return -1;
    char bytes[65536];
    while (true) {
      const ssize_t count = ::recv(fd_, bytes, sizeof(bytes), MSG_DONTWAIT);
      if (count < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
      if (count <= 0) return -1;
      answer_.append(bytes, static_cast<std::size_t>(count));
      const std::size_t head = answer_.find("\r\n\r\n");
      if (head == std::string::npos) continue;
      const std::int64_t length =
          header_number(std::string_view(answer_).substr(0, head), "content-length");
      if (length < 0) return -1;
      if (answer_.size() < head + 4 + static_cast<std::size_t>(length)) continue;
      request_ = nullptr;
      return std::atoi(answer_.c_str() + std::min<std::size_t>(9, answer_.size()));
    }
  }

  void connect() {
    if (fd_ >= 0) ::close(fd_);
    request_ = nullptr;
    fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(options_.port));
    ::inet_pton(AF_INET, options_.host.c_str(), &address.sin_addr);
    if (fd_ < 0 ||
        ::connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      throw std::system_error(errno, std::generic_category(),
                              options_.host + ":" + std::to_string(options_.port));
    }
    const int yes = 1;
    ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = this;
    ::epoll_ctl(poller_, EPOLL_CTL_ADD, fd_, &event);
    writes_ = false;
  }

 private:
  bool send() {
    while (sent_ < request_->size()) {
      const ssize_t count = ::send(fd_, request_->data() + sent_, request_->size() - sent_,
                                   MSG_NOSIGNAL | MSG_DONTWAIT);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && errno != EAGAIN) return false;
      if (count < 0) break;
      sent_ += static_cast<std::size_t>(count);
    }
    const bool writes = sent_ < request_->size();
    if (writes != writes_) {
      epoll_event event{};
      event.events = EPOLLIN | (writes ? EPOLLOUT : 0U);
      event.data.ptr = this;
      ::epoll_ctl(poller_, EPOLL_CTL_MOD, fd_, &event);
      writes_ = writes;
    }
    return true;
  }

  int poller_;
  const LoadOptions& options_;
  int fd_ = -1;
  const std::string* request_ = nullptr;
  std::size_t number_ = 0;
  std::size_t sent_ = 0;
  bool writes_ = false;
  Time due_;
  std::string answer_;
};

}  // namespace

double LoadReport::rate_of(int code) const {
  const auto found = codes.find(code);
  return found == codes.end() ? 0 : static_cast<double>(found->second) / seconds;
}

double LoadReport::quantile(std::vector<float>& times, double share) {
  if (times.empty()) return 0;
  std::sort(times.begin(), times.end());
  return times[static_cast<std::size_t>(share * static_cast<double>(times.size() - 1))];
}

LoadReport generate_load(const LoadOptions& options) {
  const int poller = ::epoll_create1(EPOLL_CLOEXEC);
  std::vector<std::unique_ptr<Asker>> askers;
  std::vector<Asker*> free;
  for (int i = 0; i < options.connections; ++i) {
    askers.push_back(std::make_unique<Asker>(poller, options));
    free.push_back(askers.back().get());
  }
  std::mt19937_64 random(options.seed);
  std::exponential_distribution<double> gap(options.rate > 0 ? options.rate : 1);
  const auto seconds = [](double count) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
  };
  LoadReport report;
  const Time start = Clock::now();
  const Time counted = start + seconds(options.warmup_seconds);
  Time end = counted + seconds(options.seconds);
  Time next = start;
  Time last = counted;
  std::size_t turn = 0;
  std::deque<Time> waiting;  // due, without a connection
  std::size_t num_asked = 0;
  const auto ask = [&](Time due) {
    Asker* asker = free.back();
    free.pop_back();
    const std::size_t number = turn++ % options.requests.size();
    const std::string& request = options.requests[number];
    if (!asker->ask(request, number, due)) {  // an idle connection that the server has closed
      asker->connect();
      asker->ask(request, number, due);
    }
    ++num_asked;
  };
  const auto count_due = [&](Time due) {
    if (due >= counted && due < end) ++report.num_due;
  };
  std::vector<epoll_event> events(static_cast<std::size_t>(options.connections));
  while (true) {
    Time now = Clock::now();
    if (options.rate > 0) {
      while (next <= now && next < end) {
        count_due(next);
        waiting.push_back(next);
        next += seconds(gap(random));
      }
    } else if (now < end) {
      for (std::size_t i = free.size(); i > 0; --i) {
        count_due(now);
        ask(now);
      }
    }
    while (!waiting.empty() && !free.empty()) {
      ask(waiting.front());
      waiting.pop_front();
    }
    const bool is_over = now >= end && waiting.empty() && num_asked == 0;
    if (is_over || now >= end + options.patience) break;
    const bool waits_for_time = options.rate > 0 && next < end;
    const auto pause = waits_for_time ? next - now : Clock::duration(std::chrono::milliseconds(50));
    // Nothing shorter than a millisecond can be slept here; the core is this program's own.
    const int sleep = static_cast<int>(std::clamp<std::int64_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(pause).count(), 0, 50));
    const int count = ::epoll_wait(poller, events.data(), options.connections, sleep);
    now = Clock::now();
    for (int i = 0; i < count; ++i) {
      auto* asker = static_cast<Asker*>(events[static_cast<std::size_t>(i)].data.ptr);
      if (asker->is_free()) {  // the server has closed it
        asker->connect();
        continue;
      }
      const Time due = asker->due();
      const int code = asker->look();
      if (code == 0) continue;
      --num_asked;
      if (options.on_answer && !options.on_answer(asker->number(), code, asker->answer())) {
        end = std::min(end, now);
      }
      const bool counts = due >= counted && due < end;
      if (code < 0) {
        report.num_unanswered += counts ? 1 : 0;
        asker->connect();
      } else if (counts) {
        ++report.codes[code];
        const auto time = std::chrono::duration<float>(now - due).count();
        report.times.push_back(time);
        if (code == 200) report.good_times.push_back(time);
        last = now;
      }
      free.push_back(asker);
    }
  }
  report.num_unanswered += waiting.size() + num_asked;
  report.seconds = std::chrono::duration<double>(std::max(last, end) - counted).count();
  askers.clear();
  ::close(poller);
  return report;
}

}  // namespace tessera::serving
