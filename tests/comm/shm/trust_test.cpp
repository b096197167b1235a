// Another user writes the group's record, listens in its place, or connects to it: the ranks never
// map what is not theirs. And: no word of a record or of a header is used before it is checked.

#include <gtest/gtest.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/call_agreement.h"
#include "comm/shm/creation.h"
#include "comm/shm/handover.h"
#include "group_fixture.h"

namespace tessera::comm::shm::testing {
namespace {

constexpr uid_t kNobody = 65534;
constexpr std::size_t kMiB = std::size_t{1} << 20;

/// The store as somebody else has left it for one rank.
class ForgedBootstrap final : public FileBootstrap {
 public:
  ForgedBootstrap(const std::string& directory, std::string record)
      : FileBootstrap(directory), record_(std::move(record)) {}
  std::string get(const std::string& key, Clock::time_point deadline) override {
    const std::string value = FileBootstrap::get(key, deadline);
    return key == "shm/segment" && !record_.empty() ? record_ : value;
  }

 private:
  std::string record_;
};

bool is_mapped(const std::string& what) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find(what) != std::string::npos) return true;
  }
  return false;
}

/// What three ranks say when rank 1 reads `record`.
std::vector<std::string> texts_with_record(const std::string& record) {
  const TemporaryDirectory keys;
  std::vector<std::string> texts(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      ForgedBootstrap bootstrap(keys.path(), rank == 1 ? record : "");
      TestMonitor monitor;
      try {
        ShmTransport::create(rank, 3, bootstrap, monitor, {});
      } catch (const Failure& failure) {
        EXPECT_EQ(failure.kind(), FailureKind::kAborted);
        texts[static_cast<std::size_t>(rank)] = failure.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return texts;
}

/// Another user's process, ended with its owner. It writes one line and waits.
class Stranger {
 public:
  /// `work` writes its line to the descriptor.
  explicit Stranger(const std::function<void(int)>& work) {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("no pipe");
    pid_ = fork();
    if (pid_ == 0) {
      if (setgid(kNobody) != 0 || setuid(kNobody) != 0) _exit(1);
      work(ends[1]);
      _exit(0);
    }
    close(ends[1]);
    output_ = ends[0];
  }
  ~Stranger() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    close(output_);
  }
  std::string line() const {
    std::string text;
    for (char c = 0; read(output_, &c, 1) == 1 && c != '\n';) text += c;
    return text;
  }

 private:
  pid_t pid_ = -1;
  int output_ = -1;
};

void say(int output, const std::string& line) {
  const std::string text = line + "\n";
  EXPECT_EQ(write(output, text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

class OtherUser : public ::testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "becoming another user needs root";
  }
};

TEST_F(OtherUser, WhoNamesAFileInTheRecordIsRefusedByAll) {
  const TemporaryDirectory folder;
  ASSERT_EQ(chmod(folder.path().c_str(), 0777), 0);
  const std::string path = folder.path() + "/bait";
  const Stranger stranger([&](int output) {
    const int file = open(path.c_str(), O_RDWR | O_CREAT, 0666);
    EXPECT_EQ(fchmod(file, 0666), 0);
    const Sizes sizes = Layout::complete(3, {65536, 4194304, 524288, 0});
    EXPECT_EQ(ftruncate(file, static_cast<off_t>(Layout(3, sizes).total_bytes())), 0);
    say(output, "ok 65536 4194304 524288 0 " + path);
    pause();
  });
  const auto texts = texts_with_record(stranger.line());
  EXPECT_EQ(texts[1].rfind("comm.shm: rank 1: the store's record of the group's segment is not "
                           "believable: 'ok 65536 4194304 524288 0 ",
                           0),
            0U)
      << texts[1];
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_EQ(texts[2], texts[1]);
  EXPECT_FALSE(is_mapped(path));
}

TEST_F(OtherUser, WhoListensInRankZerosPlaceIsRefusedByAll) {
  // Plays rank 0 as well as it can, and tells how many bytes it was sent.
  const Stranger stranger([](int output) {
    const Sizes sizes = Layout::complete(3, {.heap_bytes = 0});
    const std::size_t total = Layout(3, sizes).total_bytes();
    const auto segment = Segment::create("", 4096, total);
    const Listener listener;
    say(output, "ok " + listener.name());
    pollfd request{listener.socket(), POLLIN, 0};
    poll(&request, 1, 10000);
    const int line = accept(listener.socket(), nullptr, nullptr);
    char bytes[100];
    say(output, std::to_string(recv(line, bytes, sizeof(bytes), 0)));
    pause();
  });
  const auto texts = texts_with_record(stranger.line());
  EXPECT_EQ(
      texts[1].rfind("comm.shm: rank 1: the group's segment is offered by user 65534 (pid ", 0), 0U)
      << texts[1];
  EXPECT_NE(texts[1].find("not by user 0: not believable, and nothing of it was used."),
            std::string::npos)
      << texts[1];
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_EQ(texts[2], texts[1]);
  EXPECT_EQ(stranger.line(), "0");
}

TEST_F(OtherUser, WhoConnectsToRankZeroGetsNothing) {
  Listener listener;
  const Stranger stranger([&](int output) {
    const int line = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    sockaddr_un place{};
    place.sun_family = AF_UNIX;
    const std::string name = "tessera-" + listener.name();
    std::memcpy(place.sun_path + 1, name.data(), name.size());
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    if (connect(line, reinterpret_cast<sockaddr*>(&place), length) != 0) _exit(1);
    send(line, "hello 1 2", 9, MSG_NOSIGNAL);
    say(output, "sent");
    char bytes[100];
    const ssize_t received = recv(line, bytes, sizeof(bytes), 0);
    say(output, received > 0 ? "got something" : "nothing");
    pause();
  });
  EXPECT_EQ(stranger.line(), "sent");
  EXPECT_FALSE(listener.accept().has_value());
  EXPECT_EQ(stranger.line(), "nothing");
  auto line = Line::connect(listener.name());
  ASSERT_TRUE(line.has_value());
  EXPECT_TRUE(listener.accept().has_value());
}

TEST(Record, AnythingButTheNameOfALineIsRefused) {
  const std::string digits(32, 'a');
  for (const std::string& record :
       {std::string("ok"), std::string("ok "), "ok " + digits + "0", "ok " + std::string(32, 'g'),
        "ok " + std::string(32, 'A'), digits, "ok  " + digits, "ok " + digits.substr(1),
        std::string("\x1b[2Jok\n"), std::string(100000, 'x')}) {
    const auto texts = texts_with_record(record);
    EXPECT_NE(texts[1].find("record of the group's segment is not believable: '"),
              std::string::npos)
        << texts[1];
    EXPECT_EQ(texts[0], texts[1]);
    EXPECT_EQ(texts[1].find('\x1b'), std::string::npos);
    EXPECT_LT(texts[1].size(), 400U);
  }
}

// What is handed over.

std::string refusal_of(int file, std::size_t bytes) {
  try {
    Segment::adopt(file, bytes);
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.kind(), FailureKind::kAborted);
    return failure.what();
  }
  return "";
}

int anonymous_file(std::size_t bytes, mode_t mode, int seals) {
  const int file = memfd_create("test", MFD_ALLOW_SEALING | MFD_CLOEXEC);
  EXPECT_EQ(fchmod(file, mode), 0);
  EXPECT_EQ(ftruncate(file, static_cast<off_t>(bytes)), 0);
  EXPECT_EQ(seals == 0 ? 0 : fcntl(file, F_ADD_SEALS, seals), 0);
  return file;
}

constexpr int kAllSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

TEST(Adoption, TakesWhatCreateMakes) {
  const TemporaryDirectory folder;
  for (const std::string& directory : {std::string(), folder.path()}) {
    const auto made = Segment::create(directory, 4096, 2 * kMiB);
    made->base()[100] = std::byte{7};
    const auto taken = Segment::adopt(dup(made->file()), 2 * kMiB);
    EXPECT_EQ(taken->base()[100], std::byte{7});
    EXPECT_TRUE(folder.entries().empty());
    struct stat status{};
    ASSERT_EQ(fstat(made->file(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600U);
    EXPECT_EQ(status.st_nlink, 0U);
  }
  EXPECT_EQ(refusal_of(anonymous_file(kMiB, 0600, kAllSeals), kMiB), "");
}

TEST(Adoption, AnAnonymousSegmentCannotChangeItsLength) {
  const auto made = Segment::create("", 4096, 2 * kMiB);
  EXPECT_NE(ftruncate(made->file(), 4096), 0);
  EXPECT_NE(ftruncate(made->file(), 4 * kMiB), 0);
  EXPECT_TRUE(made->commit(kMiB, kMiB));
}

TEST(Adoption, RefusesWhatIsNotASegmentOfThisUser) {
  const auto says = [](const std::string& text, const std::string& why) {
    EXPECT_EQ(text, "comm.shm: what was handed over as the group's segment is not believable: " +
                        why + ". Nothing of it was used.");
  };
  says(refusal_of(anonymous_file(kMiB, 0644, kAllSeals), kMiB), "other users may open it");
  says(refusal_of(anonymous_file(kMiB, 0602, kAllSeals), kMiB), "other users may open it");
  for (const int seals : {0, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SHRINK | F_SEAL_GROW}) {
    says(refusal_of(anonymous_file(kMiB, 0600, seals), kMiB), "its length is not sealed");
  }
  says(refusal_of(anonymous_file(kMiB, 0600, kAllSeals), 2 * kMiB),
       "it is 1048576 bytes long, not 2097152");
  says(refusal_of(anonymous_file(kMiB, 0600, kAllSeals), kMiB - 1),
       "it is 1048576 bytes long, not 1048575");
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/named";
  const int named = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  EXPECT_EQ(ftruncate(named, 4096), 0);
  says(refusal_of(named, 4096), "it has a name");
  EXPECT_FALSE(is_mapped(path));
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  close(ends[1]);
  says(refusal_of(ends[0], 4096), "it is no file");
  if (geteuid() != 0) return;
  const int foreign = anonymous_file(kMiB, 0600, kAllSeals);
  EXPECT_EQ(fchown(foreign, kNobody, kNobody), 0);
  says(refusal_of(foreign, kMiB), "it belongs to user 65534, not to user 0");
}

TEST(Sizes, ThatNobodyChoosesAreNotBelieved) {
  for (const int size : {1, 2, 3, 64}) {
    const Sizes good = Layout::complete(size, {.heap_bytes = std::size_t{1} << 30});
    EXPECT_EQ(Layout::why_not_believable(size, good), "");
    const auto changed = [&](std::size_t Sizes::* which, std::size_t bytes) {
      Sizes sizes = good;
      sizes.*which = bytes;
      return Layout::why_not_believable(size, sizes);
    };
    EXPECT_EQ(changed(&Sizes::slot_bytes, 0), "slots of 0 bytes");
    EXPECT_EQ(changed(&Sizes::ring_bytes, 128), "rings of 128 bytes");
    EXPECT_EQ(changed(&Sizes::mailbox_bytes, 257), "mailboxes of 257 bytes");
    EXPECT_EQ(changed(&Sizes::heap_bytes, 4096), "heaps of 4096 bytes");
    for (const auto which :
         {&Sizes::slot_bytes, &Sizes::ring_bytes, &Sizes::mailbox_bytes, &Sizes::heap_bytes}) {
      for (const std::size_t bytes :
           {SIZE_MAX, SIZE_MAX - 4095, std::size_t{1} << 63, std::size_t{1} << 41}) {
        EXPECT_NE(changed(which, bytes), "") << bytes;
      }
    }
  }
}

TEST(Offsets, MustLieInOneHeap) {
  const Layout layout(3, Layout::complete(3, {.heap_bytes = 4 * kMiB}));
  const std::uint64_t first = layout.heap(0);
  const std::uint64_t last = layout.heap(2) + 4 * kMiB;
  EXPECT_TRUE(layout.is_in_a_heap(first, 4 * kMiB, 64));
  EXPECT_TRUE(layout.is_in_a_heap(layout.heap(2), 4 * kMiB, 64));
  EXPECT_TRUE(layout.is_in_a_heap(last, 0, 1));
  for (const std::uint64_t offset :
       {std::uint64_t{0}, std::uint64_t{1}, first - 1, last + 1, last + kHeapStagger, UINT64_MAX,
        std::uint64_t{1} << 63, first + 4 * kMiB + 1, layout.heap(1) - 1}) {
    EXPECT_FALSE(layout.is_in_a_heap(offset, 1, 1)) << offset;
  }
  for (const std::uint64_t bytes :
       {4 * kMiB + 1, 4 * kMiB + kHeapStagger, UINT64_MAX, UINT64_MAX - first + 1}) {
    EXPECT_FALSE(layout.is_in_a_heap(first, bytes, 1)) << bytes;
  }
  EXPECT_FALSE(layout.is_in_a_heap(first + 4, 4, 8));
  EXPECT_FALSE(layout.is_in_a_heap(last - 4, 5, 1));
}

// What a peer wrote.

constexpr std::int64_t kCount = 100000;  // larger than a slot

Board board_of(ShmTransport& transport) {
  const auto block = transport.allocate(4096);
  const std::uint64_t place = transport.place_of(block.get(), 4096);
  const ShmOptions options = small_options();
  const Layout layout(
      transport.size(),
      Layout::complete(transport.size(), {options.slot_bytes, options.ring_bytes,
                                          options.mailbox_bytes, options.heap_bytes}));
  return {static_cast<std::byte*>(block.get()) - place, layout};
}

/// Rank 1 comes to the first call with a header of its own making; what rank 0 says to it.
std::string answer_to(const Call& call, const std::function<void(const Board&, CallHeader&)>& forge,
                      const std::function<void(ShmTransport&)>& run) {
  const auto texts = texts_of_threads(2, small_options(), [&](ShmTransport& transport) {
    if (transport.rank() == 0) return run(transport);
    const Board board = board_of(transport);
    CallHeader& header = board.header(1, 1);
    header.sequence = call.sequence;
    header.signature = signature_of(call);
    forge(board, header);
    publish(header.arrived, 1, board.rank(1).progress);
    // Stays until rank 0 has said what it thinks of it.
    transport.recv(call_of(Operator::kRecv, DataType::kUInt8), {nullptr, 0}, 0, 5);
  });
  EXPECT_EQ(texts[1], texts[0]);
  return texts[0];
}

TEST(Headers, WithOffsetsOutsideTheHeapsEndTheGroup) {
  const Call sum = call_of(Operator::kAllReduce, DataType::kFloat32, ReduceOp::kSum);
  const Call gather = call_of(Operator::kAllGather, DataType::kFloat32);
  const Layout layout(2, Layout::complete(2, {1024, 32 * 1024, 1024, std::size_t{16} << 20}));
  const std::string why = " which is not believable. Its part of the shared memory is damaged.";
  for (const std::uint64_t offset :
       {std::uint64_t{8}, std::uint64_t{UINT64_MAX}, std::uint64_t{1} << 62,
        std::uint64_t{layout.total_bytes()}, std::uint64_t{layout.heap(1) + 16 * kMiB - 4},
        std::uint64_t{layout.heap(0) - 8}}) {
    const std::string sum_text = answer_to(
        sum,
        [&](const Board&, CallHeader& header) {
          header.count = kCount;
          header.offset = offset;
        },
        [&](ShmTransport& transport) {
          const auto block = transport.allocate(kCount * 4);
          transport.all_reduce(sum, {block.get(), kCount});
        });
    EXPECT_EQ(sum_text,
              "comm.all_reduce #1: rank 1 says it has 100000 elements of float32 at "
              "offset " +
                  std::to_string(offset) + " of a segment of " +
                  std::to_string(layout.total_bytes()) + " bytes," + why);
    std::vector<float> output(2 * kCount);
    const std::vector<Piece> pieces{{output.data(), kCount}, {output.data() + kCount, kCount}};
    const std::string gather_text = answer_to(
        gather,
        [&](const Board&, CallHeader& header) {
          header.count = kCount;
          header.offset = offset;
          header.digest = digest_of(pieces);
        },
        [&](ShmTransport& transport) {
          transport.all_gather(gather, {output.data(), kCount}, pieces);
        });
    EXPECT_NE(gather_text.find(why), std::string::npos) << gather_text;
  }
}

TEST(Headers, WithPiecesOutsideTheHeapsEndTheGroup) {
  for (const Operator op : {Operator::kAllToAll, Operator::kReduceScatter}) {
    const bool reduces = op == Operator::kReduceScatter;
    const Call call =
        call_of(op, DataType::kFloat32, reduces ? std::optional(ReduceOp::kSum) : std::nullopt);
    std::vector<float> input(2 * kCount);
    std::vector<float> output(2 * kCount);
    const std::vector<Piece> inputs{{input.data(), kCount}, {input.data() + kCount, kCount}};
    const std::vector<Piece> outputs{{output.data(), kCount}, {output.data() + kCount, kCount}};
    for (const std::int64_t offset : {std::int64_t{8}, std::int64_t{-8}, std::int64_t{1} << 61}) {
      const std::string text = answer_to(
          call,
          [&](const Board& board, CallHeader& header) {
            header.count = kCount;
            header.flags = kInHeap | kUniform;
            header.digest = digest_of(inputs);
            const PeerCounts counts = board.counts(1, 1);
            for (int rank = 0; rank < 2; ++rank) {
              counts.sends[rank] = counts.receives[rank] = kCount;
              counts.offsets[rank] = offset;
            }
          },
          [&](ShmTransport& transport) {
            if (reduces) {
              transport.reduce_scatter(call, inputs, outputs[0]);
            } else {
              transport.all_to_all(call, inputs, outputs);
            }
          });
      EXPECT_NE(text.find(": rank 1 says it has 100000 elements of float32 at offset "),
                std::string::npos)
          << text;
    }
  }
}

TEST(Headers, WithMoreThanASlotHoldsEndTheGroup) {
  const Call call = call_of(Operator::kAllToAll, DataType::kFloat32);
  float values[4] = {};
  const std::vector<Piece> inputs{{values, 1}, {values + 1, 1}};
  const std::vector<Piece> outputs{{values + 2, 1}, {values + 3, 1}};
  for (const std::int64_t count : {std::int64_t{-1}, std::int64_t{1} << 40, std::int64_t{257}}) {
    const std::string text = answer_to(
        call,
        [&](const Board& board, CallHeader& header) {
          header.count = 1;
          header.flags = kInSlot | kUniform;
          header.digest = digest_of(inputs);
          board.counts(1, 1).sends[0] = 1;
          board.counts(1, 1).sends[1] = count;
        },
        [&](ShmTransport& transport) { transport.all_to_all(call, inputs, outputs); });
    EXPECT_NE(text.find("which is not believable"), std::string::npos) << text;
  }
}

TEST(Mailboxes, WithImpossibleContentsEndTheGroup) {
  struct Forgery {
    std::uint64_t written;
    std::uint64_t bytes;
    std::int64_t count;
    std::int32_t tag;
    std::uint32_t dtype;
  };
  const auto type = static_cast<std::uint32_t>(DataType::kFloat32);
  for (const Forgery& forgery : std::vector<Forgery>{{4096, 4, 1, 5, type},
                                                     {33, 4, 1, 5, type},
                                                     {64, 1 << 20, 1, 5, type},
                                                     {64, 4, -1, 5, type},
                                                     {64, UINT64_MAX, -1, 5, 1},
                                                     {64, 4, 1, 5, 77}}) {
    const auto texts = texts_of_threads(2, small_options(), [&](ShmTransport& transport) {
      float value = 0;
      if (transport.rank() == 0) {
        transport.recv(call_of(Operator::kRecv), {&value, 1}, 1, 5);
        return;
      }
      const Board board = board_of(transport);
      std::byte* mail = board.mail(1, 0);
      std::memset(mail, 0, 64);
      std::memcpy(mail, &forgery.bytes, 8);
      std::memcpy(mail + 8, &forgery.count, 8);
      std::memcpy(mail + 16, &forgery.tag, 4);
      std::memcpy(mail + 20, &forgery.dtype, 4);
      publish(board.mailbox(1, 0).written, forgery.written, board.rank(0).inbox);
      transport.recv(call_of(Operator::kRecv), {&value, 1}, 0, 5);
    });
    EXPECT_EQ(texts[0].rfind("comm.recv: rank 1 says it has ", 0), 0U) << texts[0];
    EXPECT_EQ(texts[1], texts[0]);
  }
}

TEST(FailureRecord, ThatIsDamagedIsReadWithinItsBounds) {
  const auto texts = texts_of_threads(1, small_options(), [](ShmTransport& transport) {
    FailureRecord& record = board_of(transport).group().failure;
    record.kind = 12345;
    record.ranks = ~std::uint64_t{0};
    record.length = UINT32_MAX;
    record.state = 2;
    try {
      transport.barrier(call_of(Operator::kBarrier));
    } catch (const Failure& failure) {
      EXPECT_EQ(failure.kind(), FailureKind::kAborted);
      EXPECT_EQ(failure.ranks().size(), kMaxRanks);  // named, never looked up
      EXPECT_EQ(std::string(failure.what()).size(), std::strlen(failure.what()));
      throw;
    }
  });
  EXPECT_LE(texts[0].size(), FailureRecord::kMaxText);
}

}  // namespace
}  // namespace tessera::comm::shm::testing
