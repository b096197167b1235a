// src/comm/store_keys.h — a c10d store as the ranks' protocols see it.

#pragma once

#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/shared_keys.h"

namespace tessera::comm {

class StoreKeys final : public SharedKeys {
 public:
  explicit StoreKeys(c10d::Store& store) : store_(store) {}
  std::string claim(const std::string& key, const std::string& value) override {
    const auto settled = store_.compareSet(key, {}, as_bytes(value));
    return {settled.begin(), settled.end()};
  }
  bool has_all(const std::vector<std::string>& keys) override { return store_.check(keys); }
  std::string get(const std::string& key) override { return store_.get_to_str(key); }
  void set(const std::string& key, const std::string& value) override {
    store_.set(key, as_bytes(value));
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return store_.add(key, amount);
  }

 private:
  static std::vector<std::uint8_t> as_bytes(const std::string& text) {
    return {text.begin(), text.end()};
  }

  c10d::Store& store_;
};

}  // namespace tessera::comm
