#include "checkpoint/exchange.h"

#include <new>

#include <ATen/ops/from_blob.h>

#include "tessera/checkpoint/error.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"

namespace tessera::checkpoint {
namespace {

std::vector<std::string> gather(const comm::Group& group, const std::string& mine) {
  std::vector<std::int64_t> length{static_cast<std::int64_t>(mine.size())};
  const at::Tensor lengths =
      comm::all_gather(at::from_blob(length.data(), {1}, at::kLong), group).contiguous();
  std::vector<std::int64_t> rows(lengths.data_ptr<std::int64_t>(),
                                 lengths.data_ptr<std::int64_t>() + group.size());
  std::string bytes = mine;
  const at::Tensor all =
      comm::all_gather_v(at::from_blob(bytes.data(), {length[0]}, at::kByte), group, rows);
  const char* next = reinterpret_cast<const char*>(all.data_ptr<std::uint8_t>());
  std::vector<std::string> texts;
  for (const std::int64_t row : rows) {
    texts.emplace_back(next, static_cast<std::size_t>(row));
    next += row;
  }
  return texts;
}

// A message is kGood and the result, or the digit of the error's kind and its text.
constexpr char kGood = '+';
constexpr char kInvalid = '0' + static_cast<int>(ErrorKind::kInvalid);
constexpr char kRead = '0' + static_cast<int>(ErrorKind::kRead);

std::string marked(char mark, const std::string& text) {
  std::string message(1, mark);
  message.append(text);
  return message;
}

}  // namespace

std::vector<std::string> together(const std::optional<comm::Group>& group, const char* operation,
                                  const std::function<std::string()>& work) {
  if (!group || group->size() == 1) return {work()};
  std::string mine;
  try {
    mine = marked(kGood, work());
  } catch (const comm::Error&) {
    throw;  // the group itself is over
  } catch (const Error& error) {
    mine = marked(static_cast<char>('0' + static_cast<int>(error.kind())), error.what());
  } catch (const std::bad_alloc&) {
    mine = marked(kRead, "there is no memory left.");
  } catch (const c10::Error& error) {
    mine = marked(kInvalid, error.what_without_backtrace());
  } catch (const std::exception& error) {
    mine = marked(kInvalid, error.what());
  }
  std::vector<std::string> texts = gather(*group, mine);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty() || texts[rank][0] == kGood) continue;
    const auto kind = static_cast<ErrorKind>(texts[rank][0] - '0');
    throw Error(kind, std::string(operation) + ": rank " +
                          std::to_string(group->world_rank(static_cast<int>(rank))) + ": " +
                          texts[rank].substr(1));
  }
  for (std::string& text : texts) text = text.substr(1);
  return texts;
}

}  // namespace tessera::checkpoint
