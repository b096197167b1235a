// src/serving/json_reader.h — reads JSON from strangers in one pass, numbers straight into arrays.

#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::serving {

/// Text that is not JSON, or not of the kind that was asked for.
class JsonError : public std::runtime_error {
 public:
  JsonError(const std::string& what, std::size_t place) : std::runtime_error(what), place_(place) {}
  std::size_t place() const noexcept { return place_; }  // the byte

 private:
  std::size_t place_;
};

/// A number that is JSON, but not of the type that was asked for.
class NumberError : public std::runtime_error {
 public:
  NumberError(const std::string& what, std::size_t index)
      : std::runtime_error(what), index_(index) {}
  std::size_t index() const noexcept { return index_; }  // in its array

 private:
  std::size_t index_;
};

class JsonReader {
 public:
  explicit JsonReader(std::string_view text, std::size_t place = 0) : text_(text), place_(place) {}

  std::size_t place() const noexcept { return place_; }

  /// Calls `member(key)` for each member of an object, which must read the value.
  template <typename Member>
  void object(const Member& member) {
    expect('{');
    if (take('}')) return;
    do {
      const std::string key = string();
      expect(':');
      member(key);
    } while (take(','));
    expect('}');
  }

  /// Calls `element(index)` for each element of an array, which must read it.
  template <typename Element>
  void array(const Element& element) {
    expect('[');
    if (take(']')) return;
    std::size_t index = 0;
    do {
      element(index++);
    } while (take(','));
    expect(']');
  }

  /// At most 64 KiB, decoded.
  std::string string();
  bool boolean();
  std::int64_t integer();
  /// Reads over any value, at most 32 levels deep.
  void skip() { skip(32); }
  /// Throws unless nothing but space follows.
  void finish();

  /// Appends the numbers of an array, or of an array of arrays of `inner` numbers each, in order.
  /// Throws NumberError for a number that does not fit the type, or when there are more than
  /// `most`.
  void numbers(std::vector<float>& to, std::size_t most, std::size_t inner);
  void numbers(std::vector<std::int64_t>& to, std::size_t most, std::size_t inner);
  void numbers(std::vector<std::int32_t>& to, std::size_t most, std::size_t inner);
  /// Ids of 64 bits: a number from 2^63 on is the id with the same bits, as training takes it.
  void ids(std::vector<std::int64_t>& to, std::size_t most);

 private:
  template <typename Number>
  void read_numbers(std::vector<Number>& to, std::size_t most, std::size_t inner);
  template <bool kUnsignedToo = false, typename Number>
  void read_flat(std::vector<Number>& to, std::size_t most);
  template <typename Number, bool kUnsignedToo = false>
  Number number(std::size_t index);
  std::string_view number_text();
  void skip(int levels);
  void skip_space();
  bool take(char c);
  void expect(char c);
  [[noreturn]] void fail(const std::string& what) const;

  std::string_view text_;
  std::size_t place_;
};

}  // namespace tessera::serving
