// tests/simulator/table_keys.h — the keys of the shipped store's table, as the shipped code asks
// for them. What happens on the way of a call is the world's.

#pragma once

#include <string>
#include <vector>

#include "comm/shared_keys.h"
#include "comm/store/table.h"

namespace tessera::simulator {

class TableKeys : public comm::SharedKeys {
 public:
  std::string claim(const std::string& key, const std::string& value) override {
    return ask(comm::store::Operation::kCompareSet, {key, "", value}).parts.at(0);
  }
  bool has_all(const std::vector<std::string>& keys) override {
    return ask(comm::store::Operation::kCheck, keys).parts.at(0) == "1";
  }
  std::string get(const std::string& key) override {
    return ask(comm::store::Operation::kGet, {key}).parts.at(0);
  }
  void set(const std::string& key, const std::string& value) override {
    ask(comm::store::Operation::kSet, {key, value});
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return std::stoll(ask(comm::store::Operation::kAdd, {key, std::to_string(amount)}).parts.at(0));
  }

 private:
  virtual comm::store::Packet ask(comm::store::Operation operation,
                                  std::vector<std::string> parts) = 0;
};

}  // namespace tessera::simulator
