#include "comm/store/table.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace tessera::comm::store {
namespace {

// Counters are stored as text, as in LibTorch's stores.
std::int64_t number_in(const std::string& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw WireError("a value that is not a number");
  }
  return value;
}

void check_parts(const Packet& request, std::size_t count) {
  if (request.parts.size() != count) throw WireError("a request with parts missing");
}

}  // namespace

bool Table::has(const std::string& key) const {
  return values_.count(key) != 0 || queues_.count(key) != 0;
}

void Table::done(Client client, std::vector<std::string> parts) {
  answer_(client, {static_cast<std::uint8_t>(Status::kDone), std::move(parts)});
}

void Table::set(const std::string& key, std::string value) {
  values_[key] = std::move(value);
  wake(key);
}

void Table::serve(Client client, const Packet& request) {
  const auto operation = static_cast<Operation>(request.code);
  if (operation != Operation::kStopWaiting && waiting_.count(client) != 0) {
    throw WireError("a request before the last one was answered");
  }
  const auto& parts = request.parts;
  switch (operation) {
    case Operation::kSet:
      if (parts.empty() || parts.size() % 2 != 0) throw WireError("a key without a value");
      for (std::size_t i = 0; i < parts.size(); i += 2) set(parts[i], parts[i + 1]);
      return done(client);
    case Operation::kGet:
    case Operation::kWait:
      return await(client, {parts, operation});
    case Operation::kCheck: {
      const bool all = std::all_of(parts.begin(), parts.end(), [&](auto& key) { return has(key); });
      return done(client, {all ? "1" : "0"});
    }
    case Operation::kAdd: {
      check_parts(request, 2);
      const auto found = values_.find(parts[0]);
      const std::int64_t before = found == values_.end() ? 0 : number_in(found->second);
      std::int64_t sum = 0;
      if (__builtin_add_overflow(before, number_in(parts[1]), &sum)) {
        throw WireError("a sum beyond 64 bits");
      }
      set(parts[0], std::to_string(sum));
      return done(client, {std::to_string(sum)});
    }
    case Operation::kCompareSet: {
      check_parts(request, 3);
      const auto found = values_.find(parts[0]);
      const bool is_absent = found == values_.end();
      if (is_absent ? !parts[1].empty() : found->second != parts[1]) {
        return done(client, {is_absent ? parts[1] : found->second});
      }
      set(parts[0], parts[2]);
      return done(client, {parts[2]});
    }
    case Operation::kDelete:
      check_parts(request, 1);
      return done(client, {values_.erase(parts[0]) + queues_.erase(parts[0]) != 0 ? "1" : "0"});
    case Operation::kCount:
      return done(client, {std::to_string(values_.size() + queues_.size())});
    case Operation::kAppend: {
      check_parts(request, 2);
      values_[parts[0]] += parts[1];
      wake(parts[0]);
      return done(client);
    }
    case Operation::kPush:
      check_parts(request, 2);
      queues_[parts[0]].push_back(parts[1]);
      wake(parts[0]);
      return done(client);
    case Operation::kPop:
      check_parts(request, 2);
      if (parts[1] != "1" && queues_.count(parts[0]) == 0) {
        return answer_(client, {static_cast<std::uint8_t>(Status::kNothing), {}});
      }
      return await(client, {{parts[0]}, operation});
    case Operation::kLength: {
      check_parts(request, 1);
      const auto found = queues_.find(parts[0]);
      return done(client, {std::to_string(found == queues_.end() ? 0 : found->second.size())});
    }
    case Operation::kList: {
      std::vector<std::string> keys;
      for (const auto& entry : values_) keys.push_back(entry.first);
      for (const auto& entry : queues_) keys.push_back(entry.first);
      return done(client, std::move(keys));
    }
    case Operation::kStopWaiting:
      forget(client);
      return answer_(client, {static_cast<std::uint8_t>(Status::kStopped), {}});
  }
  throw WireError("an operation that is not known");
}

void Table::await(Client client, Waiting waiting) {
  if (try_to_answer(client, waiting)) return;
  for (const std::string& key : waiting.keys) waiting_for_[key].insert(client);
  waiting_[client] = std::move(waiting);
}

bool Table::try_to_answer(Client client, const Waiting& waiting) {
  if (waiting.operation == Operation::kPop) {
    const auto found = queues_.find(waiting.keys[0]);
    if (found == queues_.end()) return false;
    std::string value = std::move(found->second.front());
    found->second.pop_front();
    if (found->second.empty()) queues_.erase(found);
    done(client, {std::move(value)});
    return true;
  }
  std::vector<std::string> values;
  for (const std::string& key : waiting.keys) {
    const auto found = values_.find(key);
    if (waiting.operation == Operation::kWait ? !has(key) : found == values_.end()) return false;
    if (waiting.operation == Operation::kGet) values.push_back(found->second);
  }
  done(client, std::move(values));
  return true;
}

void Table::wake(const std::string& key) {
  const auto found = waiting_for_.find(key);
  if (found == waiting_for_.end()) return;
  const std::set<Client> clients = found->second;
  for (const Client client : clients) {
    const Waiting waiting = waiting_.at(client);
    if (try_to_answer(client, waiting)) forget(client);
  }
}

void Table::forget(Client client) {
  const auto found = waiting_.find(client);
  if (found == waiting_.end()) return;
  for (const std::string& key : found->second.keys) {
    const auto waiting = waiting_for_.find(key);
    if (waiting == waiting_for_.end()) continue;
    waiting->second.erase(client);
    if (waiting->second.empty()) waiting_for_.erase(waiting);
  }
  waiting_.erase(found);
}

}  // namespace tessera::comm::store
