// npz archives of NumPy: a zip of arrays, each of them a column.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <optional>

#include "data/arrow_abi.h"
#include "data/columns.h"

#ifdef TESSERA_HAS_ZLIB
#include <zlib.h>
#endif

namespace tessera::workloads::data {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::int64_t kBatchRows = 8192;
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 40;  // of one array

/// An array that lies in memory.
struct Array {
  std::string name;  // of the column
  std::string type;  // as NumPy writes it: "<i8"
  std::int64_t num_rows = 0;
  std::int64_t width = -1;  // of two dimensions: values per row
  std::vector<char> bytes;
  std::size_t begin = 0;  // of the values
};

template <class T>
T number_at(std::string_view bytes, std::size_t place) {
  T value = 0;
  std::memcpy(&value, bytes.data() + place, sizeof(T));
  return value;
}

class Archive {
 public:
  explicit Archive(const std::string& path) : path_(path) {
    fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd_ < 0) fail(std::string("cannot be opened: ") + std::strerror(errno));
    struct stat facts{};
    if (::fstat(fd_, &facts) == 0) size_ = static_cast<std::uint64_t>(facts.st_size);
  }
  ~Archive() { ::close(fd_); }
  Archive(const Archive&) = delete;
  Archive& operator=(const Archive&) = delete;

  std::vector<Array> arrays() {
    std::vector<Array> all;
    find_directory();
    const std::string directory = read(directory_begin_, directory_bytes_);
    std::size_t at = 0;
    for (std::uint64_t i = 0; i < num_members_; ++i) {
      Member member = next_member(directory, at);
      if (!member.name.ends_with(".npy")) continue;
      Array array;
      array.name = member.name.substr(0, member.name.size() - 4);
      array.bytes = unpacked(member);
      read_head(array);
      all.push_back(std::move(array));
    }
    if (all.empty()) fail("is a zip archive without NumPy arrays; unpack it first");
    for (const Array& array : all) {
      if (array.num_rows != all[0].num_rows) {
        fail("array '" + array.name + "' has " + std::to_string(array.num_rows) + " rows, array '" +
             all[0].name + "' " + std::to_string(all[0].num_rows));
      }
    }
    return all;
  }

 private:
  struct Member {
    std::string name;
    std::uint32_t method = 0;
    std::uint64_t packed_bytes = 0;
    std::uint64_t num_bytes = 0;
    std::uint64_t begin = 0;  // of its own header
    std::uint32_t crc = 0;
  };

  [[noreturn]] void fail(const std::string& what) const {
    throw DataError(path_ + ": " + what + ".");
  }
  [[noreturn]] void damaged() const { fail("is damaged: the zip archive does not fit together"); }

  std::string read(std::uint64_t begin, std::uint64_t count) const {
    if (begin > size_ || count > size_ - begin) damaged();
    std::string bytes(count, '\0');
    for (std::uint64_t done = 0; done < count;) {
      const ssize_t more =
          ::pread(fd_, bytes.data() + done, count - done, static_cast<off_t>(begin + done));
      if (more < 0 && errno == EINTR) continue;
      if (more <= 0) fail("cannot be read");
      done += static_cast<std::uint64_t>(more);
    }
    return bytes;
  }

  // At the end of the file, before a comment; that of large archives points to another one.
  void find_directory() {
    const std::uint64_t tail_bytes = std::min<std::uint64_t>(size_, 65535 + 22 + 20);
    const std::string tail = read(size_ - tail_bytes, tail_bytes);
    const std::size_t end = tail.rfind("PK\x05\x06");
    if (end == std::string::npos || tail.size() - end < 22) {
      fail("is cut short: the zip archive has no directory");
    }
    num_members_ = number_at<std::uint16_t>(tail, end + 10);
    directory_bytes_ = number_at<std::uint32_t>(tail, end + 12);
    directory_begin_ = number_at<std::uint32_t>(tail, end + 16);
    if (end >= 20 && tail.compare(end - 20, 4, "PK\x06\x07") == 0) {
      const std::string large = read(number_at<std::uint64_t>(tail, end - 20 + 8), 56);
      if (!large.starts_with("PK\x06\x06")) damaged();
      num_members_ = number_at<std::uint64_t>(large, 32);
      directory_bytes_ = number_at<std::uint64_t>(large, 40);
      directory_begin_ = number_at<std::uint64_t>(large, 48);
    }
  }

  Member next_member(std::string_view directory, std::size_t& at) const {
    if (directory.size() < at + 46 || directory.substr(at, 4) != "PK\x01\x02") damaged();
    Member member;
    member.method = number_at<std::uint16_t>(directory, at + 10);
    member.crc = number_at<std::uint32_t>(directory, at + 16);
    member.packed_bytes = number_at<std::uint32_t>(directory, at + 20);
    member.num_bytes = number_at<std::uint32_t>(directory, at + 24);
    const std::size_t name = number_at<std::uint16_t>(directory, at + 28);
    const std::size_t extra = number_at<std::uint16_t>(directory, at + 30);
    const std::size_t comment = number_at<std::uint16_t>(directory, at + 32);
    member.begin = number_at<std::uint32_t>(directory, at + 42);
    if (directory.size() < at + 46 + name + extra + comment) damaged();
    member.name = directory.substr(at + 46, name);
    read_large(member, directory.substr(at + 46 + name, extra));
    at += 46 + name + extra + comment;
    return member;
  }

  // Sizes of 4 GiB and more, in the order in which the short ones are full.
  void read_large(Member& member, std::string_view extra) const {
    while (extra.size() >= 4) {
      const std::size_t size = number_at<std::uint16_t>(extra, 2);
      if (extra.size() < 4 + size) damaged();
      if (number_at<std::uint16_t>(extra, 0) == 1) {
        std::size_t place = 4;
        for (std::uint64_t* value : {&member.num_bytes, &member.packed_bytes, &member.begin}) {
          if (*value != 0xffffffffU) continue;
          if (place + 8 > 4 + size) damaged();
          *value = number_at<std::uint64_t>(extra, place);
          place += 8;
        }
      }
      extra.remove_prefix(4 + size);
    }
  }

  std::vector<char> unpacked(const Member& member) const {
    const std::string head = read(member.begin, 30);
    if (!head.starts_with("PK\x03\x04")) damaged();
    const std::uint64_t begin =
        member.begin + 30 + number_at<std::uint16_t>(head, 26) + number_at<std::uint16_t>(head, 28);
    const std::string packed = read(begin, member.packed_bytes);
    if (member.num_bytes > kMostBytes) damaged();
    // What is packed is never a thousandth of itself and less: a size that was made up is refused.
    if (member.num_bytes / 1100 > member.packed_bytes + 64) damaged();
    std::vector<char> bytes(member.num_bytes);
    if (member.method == 0) {
      if (packed.size() != bytes.size()) damaged();
      std::copy(packed.begin(), packed.end(), bytes.begin());
    } else if (member.method == 8) {
      inflate_into(packed, bytes, member.name);
    } else {
      fail("array '" + member.name + "' is packed by a method other than deflate; use " +
           "numpy.savez_compressed");
    }
    check_sum(member, bytes);
    return bytes;
  }

#ifdef TESSERA_HAS_ZLIB
  void inflate_into(const std::string& packed, std::vector<char>& bytes,
                    const std::string& name) const {
    z_stream stream{};
    if (inflateInit2(&stream, -15) != Z_OK) throw std::bad_alloc();
    std::size_t taken = 0;
    std::size_t made = 0;
    int code = Z_OK;
    while (code == Z_OK) {
      const std::size_t in = std::min<std::size_t>(packed.size() - taken, 1U << 30);
      const std::size_t out = std::min<std::size_t>(bytes.size() - made, 1U << 30);
      stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data() + taken));
      stream.avail_in = static_cast<uInt>(in);
      stream.next_out = reinterpret_cast<Bytef*>(bytes.data() + made);
      stream.avail_out = static_cast<uInt>(out);
      code = ::inflate(&stream, Z_NO_FLUSH);
      taken += in - stream.avail_in;
      made += out - stream.avail_out;
      if (code == Z_OK && in == stream.avail_in && out == stream.avail_out) code = Z_BUF_ERROR;
    }
    inflateEnd(&stream);
    if (code != Z_STREAM_END || made != bytes.size()) fail("array '" + name + "' is damaged");
  }
  void check_sum(const Member& member, const std::vector<char>& bytes) const {
    const auto* data = reinterpret_cast<const Bytef*>(bytes.data());
    if (crc32_z(0, data, bytes.size()) != member.crc) {
      fail("array '" + member.name + "' is damaged: its sum does not fit");
    }
  }
#else
  void inflate_into(const std::string&, std::vector<char>&, const std::string& name) const {
    fail("array '" + name + "' is packed, and this build has no zlib; use numpy.savez");
  }
  void check_sum(const Member&, const std::vector<char>&) const {}
#endif

  // The text of a key of the head, up to what ends it.
  std::string value_of(const Array& array, std::string_view head, std::string_view key,
                       char end) const {
    const std::size_t place = head.find("'" + std::string(key) + "':");
    if (place == std::string_view::npos)
      fail("array '" + array.name + "' has no " + std::string(key));
    std::string_view rest = head.substr(place + key.size() + 3);
    rest.remove_prefix(std::min(rest.size(), rest.find_first_not_of(' ')));
    return std::string(rest.substr(0, rest.find(end)));
  }

  void read_head(Array& array) const {
    const std::string_view bytes(array.bytes.data(), array.bytes.size());
    const std::string what = "array '" + array.name + "' ";
    if (bytes.size() < 12 || !bytes.starts_with("\x93NUMPY")) fail(what + "is no NumPy array");
    const bool is_first = bytes[6] == 1;
    const std::size_t begin = is_first ? 10 : 12;
    const std::size_t size =
        is_first ? number_at<std::uint16_t>(bytes, 8) : number_at<std::uint32_t>(bytes, 8);
    if (bytes.size() < begin + size) fail(what + "is cut short");
    const std::string_view head = bytes.substr(begin, size);
    array.begin = begin + size;
    array.type = value_of(array, head, "descr", ',');
    if (array.type.size() < 4 || array.type.front() != '\'') {
      fail(what + "is an array of structures; save each column under a name of its own");
    }
    array.type = array.type.substr(1, array.type.size() - 2);
    if (value_of(array, head, "fortran_order", ',') == "True") array.width = -2;
    std::vector<std::int64_t> shape;
    const std::string text = value_of(array, head, "shape", ')');
    for (const char* at = text.data(); at < text.data() + text.size(); ++at) {
      std::int64_t value = 0;
      const auto [stop, error] = std::from_chars(at, text.data() + text.size(), value);
      if (error != std::errc()) continue;
      shape.push_back(value);
      at = stop;
    }
    if (shape.empty() || shape.size() > 2 || (shape.size() == 2 && array.width == -2)) {
      fail(what + "has shape " + text + "); a column has one dimension, or two in C order");
    }
    array.num_rows = shape[0];
    array.width = shape.size() == 2 ? shape[1] : -1;
    if (array.type[1] == 'O') fail(what + "holds Python objects; save numbers or texts");
    if (array.type.size() < 3 || array.type[0] == '>') {
      fail(what + "has the type '" + array.type + "', whose bytes are in another order");
    }
    check_length(array, what);
  }

  void check_length(const Array& array, const std::string& what) const {
    std::uint64_t size = 0;
    const char* end = array.type.data() + array.type.size();
    std::from_chars(array.type.data() + 2, end, size);
    if (array.type[1] == 'U') size *= 4;
    const auto width = static_cast<unsigned __int128>(array.width < 0 ? 1 : array.width);
    const auto bytes = width * static_cast<std::uint64_t>(array.num_rows) * size;
    if (array.num_rows < 0 || bytes != array.bytes.size() - array.begin) {
      fail(what + "has another length than its shape says");
    }
  }

  std::string path_;
  int fd_ = -1;
  std::uint64_t size_ = 0;
  std::uint64_t num_members_ = 0;
  std::uint64_t directory_begin_ = 0;
  std::uint64_t directory_bytes_ = 0;
};

void append_utf8(std::string& text, std::uint32_t point) {
  if (point < 0x80) {
    text += static_cast<char>(point);
  } else if (point < 0x800) {
    text += static_cast<char>(0xc0U | point >> 6U);
    text += static_cast<char>(0x80U | (point & 0x3fU));
  } else if (point < 0x10000) {
    text += static_cast<char>(0xe0U | point >> 12U);
    text += static_cast<char>(0x80U | (point >> 6U & 0x3fU));
    text += static_cast<char>(0x80U | (point & 0x3fU));
  } else {
    text += static_cast<char>(0xf0U | point >> 18U);
    text += static_cast<char>(0x80U | (point >> 12U & 0x3fU));
    text += static_cast<char>(0x80U | (point >> 6U & 0x3fU));
    text += static_cast<char>(0x80U | (point & 0x3fU));
  }
}

// What Arrow calls NumPy's type; nothing for texts and for what it has no word for.
const char* arrow_format(std::string_view type) {
  static constexpr std::pair<std::string_view, const char*> kTypes[] = {
      {"i1", "c"}, {"u1", "C"}, {"i2", "s"}, {"u2", "S"}, {"i4", "i"}, {"u4", "I"},
      {"i8", "l"}, {"u8", "L"}, {"f2", "e"}, {"f4", "f"}, {"f8", "g"}};
  for (const auto& [name, format] : kTypes) {
    if (type.substr(1) == name) return format;
  }
  return nullptr;
}

class NpzSource final : public ColumnSource {
 public:
  explicit NpzSource(const std::string& path) : arrays_(Archive(path).arrays()) {
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      names_.push_back(arrays_[i].name);
      chosen_.push_back(i);
    }
  }

  const std::vector<std::string>& names() const noexcept override { return names_; }
  void choose(const std::vector<std::size_t>& columns) override { chosen_ = columns; }
  bool next(std::vector<Column>& columns) override {
    columns.clear();
    const std::int64_t count = std::min(kBatchRows, arrays_[0].num_rows - done_);
    if (count <= 0) return false;
    for (const std::size_t i : chosen_) columns.push_back(column(arrays_[i], count));
    done_ += count;
    return true;
  }

 private:
  Column column(const Array& array, std::int64_t count) const {
    if (array.width < 0) return values(array, done_, count);
    Column list;
    list.kind = Column::Kind::kList;
    list.num_rows = count;
    for (std::int64_t i = 0; i <= count; ++i) list.begins.push_back(i * array.width);
    list.items.push_back(values(array, done_ * array.width, count * array.width));
    return list;
  }

  static Column values(const Array& array, std::int64_t first, std::int64_t count) {
    if (const char* format = arrow_format(array.type)) {
      const void* buffers[] = {nullptr, array.bytes.data() + array.begin};
      ArrowSchema schema{};
      schema.format = format;
      schema.name = array.name.c_str();
      ArrowArray values{};
      values.length = count;
      values.offset = first;
      values.n_buffers = 2;
      values.buffers = buffers;
      return column_of(schema, values, nullptr);
    }
    Column column;
    column.num_rows = count;
    const char kind = array.type[1];
    const char* begin = array.bytes.data() + array.begin;
    if (kind == 'b') {
      column.kind = Column::Kind::kBool;
      for (std::int64_t i = 0; i < count; ++i) column.own_wholes.push_back(begin[first + i] != 0);
      column.wholes = column.own_wholes.data();
    } else if (kind == 'S' || kind == 'U') {
      column.kind = Column::Kind::kText;
      take_texts(column, array, first, count);
    } else {
      column.kind = Column::Kind::kOther;
      column.type = "of NumPy's type '" + array.type + "'";
    }
    return column;
  }

  // Zeros at the end fill a text up and are none of it.
  static void take_texts(Column& column, const Array& array, std::int64_t first,
                         std::int64_t count) {
    const bool is_wide = array.type[1] == 'U';
    const std::size_t length = std::stoull(array.type.substr(2));
    const std::size_t size = is_wide ? 4 * length : length;
    const char* begin = array.bytes.data() + array.begin + static_cast<std::size_t>(first) * size;
    const auto texts = std::make_shared<std::vector<std::string>>(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < texts->size(); ++i, begin += size) {
      std::string& text = (*texts)[i];
      if (is_wide) {
        for (std::size_t k = 0; k < length; ++k) {
          const auto point = number_at<std::uint32_t>({begin, size}, 4 * k);
          append_utf8(text, point);
        }
      } else {
        text.assign(begin, size);
      }
      text.resize(text.find_last_not_of('\0') + 1);
    }
    column.texts.assign(texts->begin(), texts->end());
    column.memory = texts;
  }

  std::vector<Array> arrays_;
  std::vector<std::string> names_;
  std::vector<std::size_t> chosen_;
  std::int64_t done_ = 0;
};

}  // namespace

std::unique_ptr<ColumnSource> open_npz(const std::string& path) {
  return std::make_unique<NpzSource>(path);
}

}  // namespace tessera::workloads::data
