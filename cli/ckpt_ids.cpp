#include "ckpt_ids.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <map>
#include <string_view>
#include <vector>

#include "data/whole_file.h"
#include "usage.h"

namespace tessera::cli {
namespace {

using checkpoint::Reader;

// Ids read at a time.
constexpr std::int64_t kBlock = std::int64_t{1} << 16;
constexpr std::string_view kMark = ".bucket_rows";

/// Tables that grow: the names of people, and those of their tensors.
std::map<std::string, std::string> growing_tables(const Reader& reader) {
  std::map<std::string, std::string> found;
  for (const auto& tensor : reader.tensors()) {
    if (!tensor.name.ends_with(kMark)) continue;
    const std::string whole = tensor.name.substr(0, tensor.name.size() - kMark.size());
    found.emplace(whole.substr(whole.rfind('.') + 1), whole);
  }
  return found;
}

std::string chosen(const Reader& reader, const std::string& table) {
  const auto known = growing_tables(reader);
  std::string names;
  for (const auto& [name, whole] : known) names += (names.empty() ? "" : ", ") + name;
  if (known.empty()) throw UsageError("ckpt: " + reader.folder() + " has no table that grows");
  if (table.empty()) {
    if (known.size() == 1) return known.begin()->second;
    throw UsageError("ckpt: ids needs --table, one of " + names);
  }
  const auto found = known.find(table);
  if (found == known.end()) {
    throw UsageError("ckpt: no table '" + table + "' grows; there are " + names);
  }
  return found->second;
}

using Rows = std::vector<std::array<std::int64_t, 4>>;

void for_blocks(const Reader& reader, const std::string& name,
                const std::function<void(const Rows&)>& take) {
  const std::int64_t count = reader.find(name + ".ids")->shape.at(0);
  if (reader.find(name + ".counts") == nullptr) {
    throw UsageError("ckpt: " + reader.folder() +
                     " is a publication, which has ids and rows but no counts; use ckpt export");
  }
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t size = std::min(kBlock, count - begin);
    Rows rows(static_cast<std::size_t>(size));
    const auto read = [&](const char* list, std::size_t column) {
      std::vector<std::int64_t> numbers(rows.size());
      reader.read(name + list, {{begin}, {size}}, reinterpret_cast<std::byte*>(numbers.data()));
      for (std::size_t i = 0; i < rows.size(); ++i) rows[i][column] = numbers[i];
    };
    read(".ids", 0);
    read(".counts", 2);
    read(".last_step", 3);
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i][1] = begin + static_cast<std::int64_t>(i);
    take(rows);
  }
}

/// Takes the bytes of a file, one part after the other.
using Put = std::function<void(std::string_view)>;

template <class Number>
std::string_view bytes_of(const std::vector<Number>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number)};
}

void write_csv(const Reader& reader, const std::string& name, const Put& put) {
  put("id,row,count,last_step\n");
  for_blocks(reader, name, [&](const Rows& rows) {
    std::string text;
    for (const auto& row : rows) {
      for (std::size_t column = 0; column < row.size(); ++column) {
        text += std::to_string(row[column]) + (column + 1 < row.size() ? ',' : '\n');
      }
    }
    put(text);
  });
}

void write_npy(const Reader& reader, const std::string& name, const Put& put) {
  const std::int64_t count = reader.find(name + ".ids")->shape.at(0);
  std::string head =
      "{'descr': '<i8', 'fortran_order': False, 'shape': (" + std::to_string(count) + ", 4), }";
  constexpr std::size_t kBefore = 10;  // magic, version, length
  head.resize((kBefore + head.size()) / 64 * 64 + 63 - kBefore, ' ');
  head += '\n';
  const auto size = static_cast<unsigned>(head.size());
  const char begin[] = {'\x93',
                        'N',
                        'U',
                        'M',
                        'P',
                        'Y',
                        1,
                        0,
                        static_cast<char>(size & 0xff),
                        static_cast<char>(size >> 8)};
  put({begin, sizeof(begin)});
  put(head);
  for_blocks(reader, name, [&](const Rows& rows) { put(bytes_of(rows)); });
}

/// One tensor for each column.
void write_safetensors(const Reader& reader, const std::string& name, const Put& put) {
  constexpr std::array kColumns = {"id", "row", "count", "last_step"};
  const std::int64_t count = reader.find(name + ".ids")->shape.at(0);
  std::string head = "{";
  for (std::size_t column = 0; column < kColumns.size(); ++column) {
    const auto bytes_until = [&](std::size_t columns) {
      return std::to_string(static_cast<std::int64_t>(columns) * count * 8);
    };
    head += std::string(column == 0 ? "\"" : ",\"") + kColumns[column] +
            "\":{\"dtype\":\"I64\",\"shape\":[" + std::to_string(count) + "],\"data_offsets\":[" +
            bytes_until(column) + "," + bytes_until(column + 1) + "]}";
  }
  head += '}';
  head.resize((head.size() + 7) / 8 * 8, ' ');
  const std::uint64_t size = head.size();  // little-endian, as the machine is
  put({reinterpret_cast<const char*>(&size), sizeof(size)});
  put(head);
  for (std::size_t column = 0; column < kColumns.size(); ++column) {
    for_blocks(reader, name, [&](const Rows& rows) {
      std::vector<std::int64_t> numbers(rows.size());
      for (std::size_t i = 0; i < rows.size(); ++i) numbers[i] = rows[i][column];
      put(bytes_of(numbers));
    });
  }
}

}  // namespace

void list_ids(const Reader& reader, const std::string& table, const std::string& to) {
  const std::string name = chosen(reader, table);
  if (to.empty()) {
    return write_csv(reader, name, [](std::string_view text) {
      std::fwrite(text.data(), 1, text.size(), stdout);
    });
  }
  const auto write = to.ends_with(".csv")           ? write_csv
                     : to.ends_with(".npy")         ? write_npy
                     : to.ends_with(".safetensors") ? write_safetensors
                                                    : nullptr;
  if (write == nullptr) {
    throw UsageError("ckpt: ids are written to .csv, .npy or .safetensors, not " + to);
  }
  workloads::data::WholeFile file(to);
  write(reader, name, [&](std::string_view bytes) { file.write(bytes); });
  file.finish();
}

}  // namespace tessera::cli
