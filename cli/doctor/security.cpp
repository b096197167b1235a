#include "doctor/security.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <thread>

#include "core/private_address.h"
#include "core/secret.h"
#include "launch/scratch.h"
#include "launch/store_host.h"
#include "programs/captured_program.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::seconds kLimit{60};
constexpr std::chrono::milliseconds kLookEvery{20};

struct Process {
  int parent = 0;
  std::string name;
};

std::map<int, Process> all_processes() {
  std::map<int, Process> processes;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/proc", ignored)) {
    const int pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0) continue;
    std::ifstream file(entry.path() / "stat");
    std::string text;
    std::getline(file, text);
    const std::size_t begin = text.find('(');
    const std::size_t end = text.rfind(')');
    if (begin == std::string::npos || end == std::string::npos || end + 4 >= text.size()) continue;
    processes[pid] = {std::atoi(text.c_str() + end + 4), text.substr(begin + 1, end - begin - 1)};
  }
  return processes;
}

// What a process of our job is to its user; empty if it is none.
std::string role_of(int pid, const std::map<int, Process>& processes) {
  const Process& process = processes.at(pid);
  int depth = 0;
  for (int above = pid; above != getpid(); ++depth) {
    const auto found = processes.find(above);
    if (found == processes.end() || depth > 20) return "";
    above = found->second.parent;
  }
  if (depth == 0) return "";
  if (process.name == "tessera-store" || process.name == "tessera-guard") {
    return process.name.substr(sizeof("tessera-") - 1);
  }
  return depth == 1 ? "launcher" : "rank";
}

std::set<std::string> socket_numbers_of(int pid) {
  std::set<std::string> numbers;
  std::error_code ignored;
  for (const auto& entry :
       fs::directory_iterator("/proc/" + std::to_string(pid) + "/fd", ignored)) {
    const std::string target = fs::read_symlink(entry.path(), ignored).string();
    if (target.starts_with("socket:[")) numbers.insert(target.substr(8, target.size() - 9));
  }
  return numbers;
}

// The kernel writes addresses as words of this machine's byte order.
std::string readable_address(const std::string& digits) {
  unsigned char bytes[16] = {};
  const std::size_t num_words = digits.size() / 8;
  for (std::size_t i = 0; i < num_words && i < 4; ++i) {
    const auto word = static_cast<std::uint32_t>(std::stoul(digits.substr(8 * i, 8), nullptr, 16));
    std::copy_n(reinterpret_cast<const unsigned char*>(&word), 4, bytes + 4 * i);
  }
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(num_words == 1 ? AF_INET : AF_INET6, bytes, text, sizeof(text));
  return text;
}

// Sockets that wait for others, by their number.
std::map<std::string, OpenSocket> waiting_sockets() {
  std::map<std::string, OpenSocket> sockets;
  for (const std::string table : {"tcp", "tcp6", "udp", "udp6"}) {
    std::ifstream file("/proc/net/" + table);
    std::string line;
    std::getline(file, line);
    while (std::getline(file, line)) {
      std::istringstream text(line);
      std::vector<std::string> words;
      for (std::string word; text >> word;) words.push_back(word);
      const bool is_udp = table[0] == 'u';
      if (words.size() < 10 || words[3] != (is_udp ? "07" : "0A")) continue;
      OpenSocket& socket = sockets[words[9]];
      socket.protocol = table.substr(0, 3);
      socket.address = readable_address(words[1].substr(0, words[1].find(':')));
    }
  }
  std::ifstream file("/proc/net/unix");
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream text(line);
    std::string number, count, protocol, flags, type, state, inode, path;
    text >> number >> count >> protocol >> flags >> type >> state >> inode >> path;
    if (flags != "00010000" || path.empty()) continue;  // not listening
    struct stat status{};
    stat(path.c_str(), &status);
    sockets[inode] = {"", "unix", path, static_cast<int>(status.st_mode & 0777)};
  }
  return sockets;
}

using Kind = std::tuple<std::string, std::string, std::string>;

void look(std::map<Kind, OpenSocket>& found) {
  const auto processes = all_processes();
  const auto sockets = waiting_sockets();
  for (const auto& [pid, process] : processes) {
    const std::string role = role_of(pid, processes);
    if (role.empty()) continue;
    for (const std::string& number : socket_numbers_of(pid)) {
      const auto entry = sockets.find(number);
      if (entry == sockets.end()) continue;
      OpenSocket socket = entry->second;
      socket.holder = role;
      found[{socket.holder, socket.protocol, socket.address}] = socket;
    }
  }
}

void run_job(Security& security) {
  const std::string worker = launch::find_worker_program();
  std::error_code ignored;
  const std::string launcher = fs::read_symlink("/proc/self/exe", ignored).string();
  if (worker.empty()) {
    security.problems.emplace_back(
        "there is no tessera-worker program, so no job could be looked at");
    return;
  }
  std::map<Kind, OpenSocket> found;
  std::atomic<bool> is_over{false};
  std::thread watcher([&] {
    while (!is_over) {
      look(found);
      std::this_thread::sleep_for(kLookEvery);
    }
  });
  const Outcome outcome = run_program(
      {launcher, "run", "-n", "2", "--no-prefix", "--", worker, "doctor-rank", "--quick"}, kLimit);
  is_over = true;
  watcher.join();
  security.job_ran = outcome.was_started && !outcome.timed_out && outcome.status == 0;
  if (!security.job_ran) security.problems.emplace_back("the job of two ranks did not end well");
  for (const auto& [kind, socket] : found) security.sockets.push_back(socket);
}

void read_folder(Security& security) {
  security.folder = launch::scratch_parent();
  for (const std::string& taken : launch::taken_scratch_parents()) {
    security.problems.push_back(taken + " is not private to this user; jobs use " +
                                security.folder + ". Remove it");
  }
  // The last launcher removes it when it ends; the next one makes it so.
  security.folder_mode = 0700;
  struct stat status{};
  if (lstat(security.folder.c_str(), &status) == 0) {
    security.folder_mode = static_cast<int>(status.st_mode & 0777);
  }
}

void read_secret(Security& security) {
  for (const char* name : {core::kSecretFileVariable, core::kSecretVariable}) {
    const char* value = std::getenv(name);
    if (security.secret.empty() && value != nullptr && *value != '\0') security.secret = name;
  }
  try {
    core::Secret::from_environment();
  } catch (const core::SecretError& error) {
    security.secret_error = error.what();
    security.problems.push_back(security.secret_error);
  }
}

void read_addresses(Security& security) {
  std::string chosen;
  for (const char* name : {"TESSERA_INTERFACE", "GLOO_SOCKET_IFNAME"}) {
    const char* value = std::getenv(name);
    if (chosen.empty() && value != nullptr) chosen = value;
  }
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> guard(list, &freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    const sockaddr* address = entry->ifa_addr;
    const bool is_up = (entry->ifa_flags & IFF_UP) != 0 && (entry->ifa_flags & IFF_LOOPBACK) == 0;
    // Link-local addresses of IPv6 are on every interface and say nothing.
    if (!is_up || address == nullptr) continue;
    const void* bytes = nullptr;
    if (address->sa_family == AF_INET) {
      bytes = &reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
    } else if (address->sa_family == AF_INET6) {
      const auto* place = &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
      if (!IN6_IS_ADDR_LINKLOCAL(place)) bytes = place;
    }
    if (bytes == nullptr) continue;
    char text[INET6_ADDRSTRLEN] = "";
    inet_ntop(address->sa_family, bytes, text, sizeof(text));
    security.addresses.push_back(
        {entry->ifa_name, text, core::is_private(*address), entry->ifa_name == chosen});
  }
  const bool is_found = std::any_of(security.addresses.begin(), security.addresses.end(),
                                    [](const HostAddress& address) { return address.is_chosen; });
  if (!chosen.empty() && !is_found) {
    security.problems.push_back("the interface '" + chosen +
                                "' that the environment names has no address on this host");
  }
  for (const HostAddress& address : security.addresses) {
    if (address.is_chosen && !address.is_private) {
      security.problems.push_back(
          address.interface + " has the public address " + address.address +
          ": tensors between hosts would be open to whoever can read that network");
    }
  }
}

std::string octal(int mode) {
  char text[8];
  std::snprintf(text, sizeof(text), "%04o", static_cast<unsigned>(mode));
  return text;
}

std::string meaning_of(const OpenSocket& socket) {
  if (socket.is_abstract()) return "hands segments of memory to processes of this user alone";
  if (socket.protocol == "unix")
    return "mode " + octal(socket.mode) + ", asks for the job's secret";
  if (socket.holder == "launcher")
    return "torch's own store; served only if a program of the job asks for it";
  if (socket.holder == "store") return "asks for the job's secret";
  if (socket.protocol == "udp") return "failure reports, signed with the job's secret";
  return "the comparison of calls, which asks for the job's secret, and Gloo, whose pairs prove it "
         "once and then trust their network";
}

}  // namespace

bool OpenSocket::is_open_to_hosts() const {
  return protocol != "unix" && !address.starts_with("127.") && address != "::1" &&
         !address.starts_with("::ffff:127.");
}

// A name that is in no file system has no mode: everybody may connect, and is told to leave.
bool OpenSocket::is_abstract() const { return protocol == "unix" && address.starts_with('@'); }

bool OpenSocket::is_open_to_users() const {
  return protocol != "unix" || is_abstract() || (mode & 077) != 0;
}

Security examine_security() {
  Security security;
  run_job(security);
  read_folder(security);
  read_secret(security);
  read_addresses(security);
  for (const OpenSocket& socket : security.sockets) {
    if (socket.is_open_to_hosts()) {
      security.problems.push_back("a " + socket.holder + " listens on " + socket.address +
                                  ", which other hosts may reach");
    }
  }
  return security;
}

std::string as_text(const Security& security) {
  const auto count = [&](auto member) {
    return std::count_if(security.sockets.begin(), security.sockets.end(),
                         [&](const OpenSocket& socket) { return (socket.*member)(); });
  };
  std::ostringstream text;
  text << "secret     a new one for every job on one host\n           several hosts: ";
  if (!security.secret_error.empty()) {
    text << security.secret_error;
  } else if (security.secret.empty()) {
    text << "none in the environment; tessera run asks for --secret-file";
  } else {
    text << "from " << security.secret;
  }
  text << "\nfolder     " << security.folder << ", mode " << octal(security.folder_mode) << '\n';
  const char* label = "listens    ";
  for (const OpenSocket& socket : security.sockets) {
    const char* who = socket.is_open_to_hosts()   ? "other hosts"
                      : socket.is_open_to_users() ? "users of this host"
                                                  : "this user";
    text << label << socket.holder << ", " << socket.protocol << ' ' << socket.address
         << ", reached by " << who << ": " << meaning_of(socket) << '\n';
    label = "           ";
  }
  text << "reach      other hosts: " << count(&OpenSocket::is_open_to_hosts)
       << " kinds of sockets; other users of this host: " << count(&OpenSocket::is_open_to_users)
       << '\n';
  label = "networks   ";
  for (const HostAddress& address : security.addresses) {
    text << label << address.interface << ' ' << address.address << ", "
         << (address.is_private ? "private" : "public")
         << (address.is_chosen ? "; for jobs over several hosts" : "") << '\n';
    label = "           ";
  }
  for (const std::string& problem : security.problems) text << "WARN       " << problem << '\n';
  text << "More: docs/security.md\n";
  return text.str();
}

nlohmann::ordered_json as_json(const Security& security) {
  nlohmann::ordered_json sockets = nlohmann::ordered_json::array();
  for (const OpenSocket& socket : security.sockets) {
    sockets.push_back({{"holder", socket.holder},
                       {"protocol", socket.protocol},
                       {"address", socket.address},
                       {"other_hosts", socket.is_open_to_hosts()},
                       {"other_users", socket.is_open_to_users()}});
  }
  nlohmann::ordered_json addresses = nlohmann::ordered_json::array();
  for (const HostAddress& address : security.addresses) {
    addresses.push_back({{"interface", address.interface},
                         {"address", address.address},
                         {"private", address.is_private},
                         {"chosen", address.is_chosen}});
  }
  return {{"ok", security.problems.empty()},
          {"job_ran", security.job_ran},
          {"secret", {{"from", security.secret}, {"error", security.secret_error}}},
          {"folder", {{"path", security.folder}, {"mode", octal(security.folder_mode)}}},
          {"sockets", sockets},
          {"addresses", addresses},
          {"problems", security.problems}};
}

}  // namespace tessera::cli
