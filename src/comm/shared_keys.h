// src/comm/shared_keys.h — a store of keys that ranks share, as far as their protocols need it. No
// LibTorch: the simulator has one of its own.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::comm {

/// Calls may take long, and throw when the store is gone.
class SharedKeys {
 public:
  SharedKeys() = default;
  SharedKeys(const SharedKeys&) = delete;
  SharedKeys& operator=(const SharedKeys&) = delete;
  virtual ~SharedKeys() = default;

  /// Sets the key unless it is there; returns what is there then.
  virtual std::string claim(const std::string& key, const std::string& value) = 0;
  virtual bool has_all(const std::vector<std::string>& keys) = 0;
  bool has(const std::string& key) { return has_all({key}); }
  /// The value of a key that is there.
  virtual std::string get(const std::string& key) = 0;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Adds to the number behind the key, 0 at first; returns the sum.
  virtual std::int64_t add(const std::string& key, std::int64_t amount) = 0;
};

}  // namespace tessera::comm
