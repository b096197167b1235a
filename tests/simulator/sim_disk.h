// tests/simulator/sim_disk.h — a disk in memory that can lose what was not synced.
//
// Names and contents are kept twice: as processes see them, and as they would be after a crash.
// What lies between, changes that no sync has brought to the disk, is kept in order; a crash keeps
// some of it, as the seed says: a first part (`kOrdered`, as file systems with a journal do) or any
// part (`kUnordered`, all that the rules of POSIX promise). Of contents not synced a crash keeps a
// part, nothing, or a length with zeros.

#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "simulator/random.h"
#include "tessera/checkpoint/disk.h"

namespace tessera::simulator {

class SimDisk final : public checkpoint::Disk {
 public:
  enum class Order { kOrdered, kUnordered };

  SimDisk(Random& random, Order order);

  /// Calls are counted from the last `begin`. `crash_at`: before that call everything stops, and
  /// nothing has an effect any more; 0: never. One in `one_error_in` calls fails; 0: none.
  /// `between` is called once, before call `between_at`.
  struct Plan {
    std::int64_t crash_at = 0;
    std::uint64_t one_error_in = 0;
    std::int64_t between_at = 0;
    std::function<void()> between;
  };
  void begin(Plan plan);
  std::int64_t num_calls() const { return num_calls_; }
  bool has_stopped() const { return has_stopped_; }
  int num_open() const { return static_cast<int>(open_.size()); }

  /// The power is back: what is there now is what a crash at this moment left.
  void restart();

  int open(int parent, const std::string& name, int flags) override;
  ssize_t read(int fd, void* data, std::size_t num_bytes, std::uint64_t begin) override;
  int look(int fd, struct stat& facts) override;
  int look_at(int parent, const std::string& name, struct stat& facts) override;
  int list(int fd, std::vector<std::string>& names) override;
  void pause(int milliseconds) override;
  int make_folder(const std::string& path) override;
  int create(const std::string& path) override;
  ssize_t write(int fd, const void* data, std::size_t num_bytes) override;
  int sync(int fd) override;
  int close(int fd) override;
  int sync_folder(const std::string& path) override;
  int rename(const std::string& from, const std::string& to) override;
  int exchange(const std::string& first, const std::string& second) override;
  int remove(const std::string& path) override;
  int remove_folder(const std::string& path) override;
  int open_lock(const std::string& path) override;
  std::uint64_t random() override;

 private:
  struct Node;
  using NodePtr = std::shared_ptr<Node>;
  struct Node {
    bool is_folder = false;
    std::uint64_t number = 0;
    std::string content;
    std::string synced;  // the part of it that is on the disk
    std::map<std::string, NodePtr> names;
    std::map<std::string, NodePtr> synced_names;
  };
  /// Names that change together; null: the name goes.
  struct Entry {
    NodePtr folder;
    std::string name;
    NodePtr node;
  };
  using Change = std::vector<Entry>;

  bool fails(int usual_error);
  static int refuse(int number);
  NodePtr find(const std::string& path, NodePtr from = nullptr) const;
  NodePtr folder_of(const std::string& path) const;
  NodePtr node_of(int fd) const;
  NodePtr make(bool is_folder);
  void apply(Change change);
  static void fill(const Node& node, struct stat& facts);
  NodePtr survivor(const NodePtr& node, std::map<const Node*, NodePtr>& made);

  Random& random_;
  Order order_;
  NodePtr top_;
  std::map<int, NodePtr> open_;
  std::vector<Change> unsynced_;
  Plan plan_;
  std::int64_t num_calls_ = 0;
  bool has_stopped_ = false;
  bool is_between_ = false;
  int next_fd_ = 1'000'000;
  std::uint64_t next_number_ = 1;
};

}  // namespace tessera::simulator
