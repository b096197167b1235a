// src/serving/store.h — the versions of one model: rows, dense layers, and who reads which.
//
// A version begins as the package. An update never writes what a version may read: changed rows go
// to free row slots behind the table, and the version's directory names, for every 256 rows, a page
// with the slots of these rows (none: the rows lie where the package has them). The directory of a
// table that grows leads from the hash of an id to a page of ids and slots (id_pages.h). A version
// is a directory per table and a block of dense weights.
//
// A reader writes the number of the version into a line of its own before it reads, and looks once
// more whether the version is still live; a writer takes a version's memory back when it is no
// longer live and stands in no reader's line. So a reader sees one version, whole, for as long as
// it wants, and nobody waits for anybody.
//
// Which version is current is chosen by the writer, and by any process that goes back. Who chooses
// one pins it first, and lets go of the one that was chosen before; what is pinned cannot be
// retired. So the current version is live at every moment, whoever is interrupted where.
//
// All of it lies in shared memory that was mapped before processes were forked: any number of
// readers, in any of them, and one writer at a time. A writer that dies leaves the versions that
// are live as they are.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "serving/dense_plan.h"
#include "serving/id_pages.h"
#include "serving/shared_memory.h"
#include "tessera/serving/package.h"

namespace tessera::serving {

inline constexpr std::int64_t kPageRows = 256;
inline constexpr std::uint32_t kNoPage = UINT32_MAX;

/// The line of one reader.
struct alignas(64) ReaderLine {
  std::atomic<std::int32_t> owner{0};     // its process; 0: nobody's
  std::atomic<std::int32_t> version{-1};  // number of the version it reads
};

/// What is known of a version.
struct alignas(64) VersionLine {
  /// 0: gone, or in the making; 1: live; more by one for everybody who has it pinned.
  std::atomic<std::int32_t> life{0};
  std::atomic<std::int64_t> order{0};  // in which versions were made, or gone back to
  std::atomic<std::int64_t> step{0};
  std::atomic<std::int64_t> commit{0};    // of the checkpoint in its root; 0: the package
  std::atomic<std::int64_t> made{0};      // seconds since 1970
  std::atomic<std::int64_t> num_rows{0};  // that differ from the version it was made from
  std::array<char, 65> source{};          // SHA-256 of the checkpoint's manifest
};

class Store {
 public:
  /// Opens a package, and makes room for `kept` earlier versions besides the newest; 0: updates are
  /// not taken. Throws checkpoint::Error.
  Store(const std::string& path, bool verifies, int kept, UnknownIds unknown = {});
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  const Package& package() const noexcept { return package_; }
  const ModelInfo& model() const noexcept { return package_.model(); }
  const DensePlan& plan() const noexcept { return plan_; }
  bool takes_updates() const noexcept { return num_versions_ > 1; }
  UnknownIds unknown() const noexcept { return unknown_; }

  // ---- Readers
  /// A line for this process. Throws std::runtime_error if there are none left.
  ReaderLine& claim_line();
  static void return_line(ReaderLine& line) noexcept;
  /// Takes back what processes have left that are gone.
  void release_process(std::int32_t process) noexcept;

  /// Holds the newest version for the reader of `line`, or the one of `step`; the step may be gone.
  int hold(ReaderLine& line) const noexcept;
  std::optional<int> hold(ReaderLine& line, std::int64_t step) const noexcept;
  static void drop(ReaderLine& line) noexcept;

  const VersionLine& version(int number) const noexcept { return versions_[number]; }
  const float* dense(int number) const noexcept;
  /// Rows of a table with all slots, and of `ids` the slots they have in a version.
  const embedding::RowTable& rows(std::size_t table) const noexcept { return rows_[table]; }
  bool has_slots(int number, std::size_t table) const noexcept;
  /// Returns how many ids have no row; those read what is meant for them.
  std::int64_t find_slots(int number, std::size_t table, std::span<const std::int64_t> ids,
                          std::int64_t* slots) const noexcept;
  /// Ids of a growing table that a version knows.
  std::int64_t num_ids(int number, std::size_t table) const noexcept;

  // ---- Versions
  int current() const noexcept { return number_in(choice_->load()); }
  /// Numbers of those that are live, oldest first. Each was when it was looked at: beside a writer
  /// they may be those of several moments, or none.
  std::vector<int> live() const;
  /// Makes a live version the current one, also beside a writer. False if it is not live.
  bool make_current(std::int64_t step);

  // ---- One writer at a time
  /// A version in the making, out of the current one. Nobody sees it until it is committed.
  class Draft {
   public:
    /// Throws std::runtime_error if readers hold on to all that could be replaced.
    explicit Draft(Store& store);
    Draft(const Draft&) = delete;
    Draft& operator=(const Draft&) = delete;

    /// Where the new bytes of a row go.
    std::uint8_t* row(std::size_t table, std::int64_t row);
    /// The same by id, in a table that grows: new ones get a row. Throws checkpoint::Error if there
    /// is no room for more ids.
    std::uint8_t* row_of_id(std::size_t table, std::int64_t id);
    /// Where the new bytes go of what ids without a row read.
    std::uint8_t* unknown_row(std::size_t table);
    void remove_id(std::size_t table, std::int64_t id);
    /// Forgets all ids of a table.
    void clear_ids(std::size_t table);
    float* dense() noexcept;
    int number() const noexcept { return number_; }
    std::int64_t num_rows() const noexcept { return num_rows_; }
    /// Says what it is. Only who knows its number may read it yet.
    void publish(std::int64_t step, std::int64_t commit, const std::string& source);
    /// Makes it live and the current one, and lets go of versions beyond those that are kept.
    /// Throws std::runtime_error if one was chosen meanwhile, be it the one from which it was made.
    void commit();

   private:
    friend class Store;
    struct OfPackage {};
    /// The first version, as long as nobody can see it.
    Draft(Store& store, OfPackage) : store_(store), choice_(0), parent_(-1), number_(0) {}

    std::uint32_t take_row(std::size_t table);
    std::uint32_t take_page(std::size_t table);
    IdPage& own_page(std::size_t table, std::uint64_t entry);
    void show_page(std::size_t table, std::uint64_t entry, std::uint32_t depth, std::uint32_t page);
    void split(std::size_t table, std::uint64_t entry);
    std::uint32_t& slot_of_id(std::size_t table, std::int64_t id, bool& is_new);

    Store& store_;
    std::uint64_t choice_;  // that was in force when it was begun
    int parent_;
    int number_;
    std::int64_t num_rows_ = 0;
  };

  /// Lets go of a version, unless it is the current one, or about to be.
  void retire(int number) noexcept;
  /// After another writer has died: finds out what is in use.
  void take_over();
  /// For a process that only reads from now on.
  void give_up_writing() const noexcept;
  std::int64_t updated_bytes() const noexcept;

 private:
  struct Control;
  // Numbers of one kind that are not in use. Those that were let go are found again by a look at
  // all that is in use, now and then.
  struct Free {
    std::uint32_t next = 0;  // never used from here on
    std::uint32_t limit = 0;
    std::uint32_t look_at = 0;  // where a look is worth it
    std::vector<std::uint32_t> returned;
    bool wants_look() const { return returned.empty() && next >= std::min(look_at, limit); }
    std::uint32_t take();
    void keep(const std::vector<bool>& is_used);
  };

  std::uint32_t* directory(int number, std::size_t table) const noexcept;
  std::uint32_t* page(std::size_t table, std::uint32_t number) const noexcept;
  IdPage& id_page(std::size_t table, std::uint32_t number) const noexcept;
  bool is_growing(std::size_t table) const noexcept { return model().tables[table].is_growing; }
  /// The entry of a directory that leads to an id.
  std::uint64_t entry_of(std::size_t table, std::uint64_t hash) const noexcept {
    return num_bits_[table] == 0 ? 0 : hash >> (64U - num_bits_[table]);
  }
  std::uint8_t* bytes_of_slot(std::size_t table, std::uint32_t slot) const noexcept;
  /// Calls `take` with every slot of a page.
  template <typename Take>
  void each_slot(std::size_t table, std::uint32_t page_number, const Take& take) const;
  void fill_ids();
  // Whose choice is in force, counted, and the number of the version.
  static int number_in(std::uint64_t choice) noexcept { return static_cast<int>(choice & 0xFF); }
  static std::uint64_t choice_after(std::uint64_t choice, int number) noexcept {
    return ((choice >> 8U) + 1) << 8U | static_cast<std::uint64_t>(number);
  }
  bool is_live(int number) const noexcept { return versions_[number].life.load() != 0; }
  /// False if it is not live.
  bool pin(int number) noexcept;
  void unpin(int number) noexcept { versions_[number].life.fetch_sub(1); }
  void retire_beyond_kept();
  void collect(std::size_t table, int draft);
  bool is_held(int number) const noexcept;
  std::int64_t next_order() const noexcept;

  int kept_;
  int num_versions_;
  UnknownIds unknown_;
  Package package_;
  DensePlan plan_;
  std::vector<embedding::RowTable> rows_;   // with all slots
  std::vector<std::uint32_t> first_spare_;  // slot of each table
  std::vector<std::size_t> num_pages_;      // entries of each table's directory
  std::vector<std::uint32_t> num_bits_;     // of a hash that choose an entry; tables that grow
  std::vector<std::size_t> directory_at_;   // in a version's directory
  std::vector<std::size_t> pages_at_;       // in pages_, bytes
  std::vector<std::size_t> spare_at_;       // in spare_, bytes
  std::vector<std::size_t> spare_offset_;   // from the spare space's first byte to its first row
  std::size_t directory_size_ = 0;          // of one version
  SharedMemory control_memory_;
  SharedMemory dense_memory_;
  SharedMemory directories_;
  SharedMemory pages_;
  SharedMemory spare_;
  Control* control_ = nullptr;
  VersionLine* versions_ = nullptr;
  std::atomic<std::uint64_t>* choice_ = nullptr;
  // The writer's own.
  std::vector<Free> free_rows_;
  std::vector<Free> free_pages_;
};

}  // namespace tessera::serving
