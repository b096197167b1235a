#include "checkpoint/exchange.h"

#include <new>

#include "comm/agreement.h"
#include "tessera/checkpoint/error.h"
#include "tessera/comm/error.h"

namespace tessera::checkpoint {
namespace {

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
  std::vector<std::string> texts = comm::detail::exchange_texts(mine, *group);
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
