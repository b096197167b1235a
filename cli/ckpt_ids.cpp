#include "ckpt_ids.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/error.h"
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

void write_csv(const Reader& reader, const std::string& name, std::FILE* file) {
  std::fputs("id,row,count,last_step\n", file);
  for_blocks(reader, name, [&](const Rows& rows) {
    for (const auto& row : rows) {
      std::fprintf(file, "%lld,%lld,%lld,%lld\n", static_cast<long long>(row[0]),
                   static_cast<long long>(row[1]), static_cast<long long>(row[2]),
                   static_cast<long long>(row[3]));
    }
  });
}

void write_npy(const Reader& reader, const std::string& name, std::FILE* file) {
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
  std::fwrite(begin, 1, sizeof(begin), file);
  std::fwrite(head.data(), 1, head.size(), file);
  for_blocks(reader, name, [&](const Rows& rows) {
    std::fwrite(rows.data(), sizeof(rows[0]), rows.size(), file);
  });
}

/// One tensor for each column.
void write_safetensors(const Reader& reader, const std::string& name, std::FILE* file) {
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
  std::fwrite(&size, sizeof(size), 1, file);
  std::fwrite(head.data(), 1, head.size(), file);
  for (std::size_t column = 0; column < kColumns.size(); ++column) {
    for_blocks(reader, name, [&](const Rows& rows) {
      std::vector<std::int64_t> numbers(rows.size());
      for (std::size_t i = 0; i < rows.size(); ++i) numbers[i] = rows[i][column];
      std::fwrite(numbers.data(), sizeof(numbers[0]), numbers.size(), file);
    });
  }
}

}  // namespace

void list_ids(const Reader& reader, const std::string& table, const std::string& to) {
  const std::string name = chosen(reader, table);
  if (to.empty()) return write_csv(reader, name, stdout);
  const auto write = to.ends_with(".csv")           ? write_csv
                     : to.ends_with(".npy")         ? write_npy
                     : to.ends_with(".safetensors") ? write_safetensors
                                                    : nullptr;
  if (write == nullptr) {
    throw UsageError("ckpt: ids are written to .csv, .npy or .safetensors, not " + to);
  }
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(to.c_str(), "wb"),
                                                             std::fclose);
  if (file == nullptr) {
    throw checkpoint::Error(checkpoint::ErrorKind::kWrite, to + ": " + std::strerror(errno));
  }
  write(reader, name, file.get());
  if (std::fflush(file.get()) != 0 || std::ferror(file.get()) != 0) {
    throw checkpoint::Error(checkpoint::ErrorKind::kWrite, to + ": " + std::strerror(errno));
  }
}

}  // namespace tessera::cli
