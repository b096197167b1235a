// tessera/serving/model.h — predictions from a package, without LibTorch, ranks or autograd.
//
//   tessera::serving::Model model("pkg/");
//   auto lease = model.lease();               // one version for the whole request
//   lease.predict(request, logits);           // spans in, spans out
//
// A model made with `keep_versions` takes updates from a training while it answers.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/export.h"
#include "tessera/serving/package.h"

namespace tessera::serving {

/// The bags of one feature: sample s has the next `lengths[s]` of the ids.
struct FeatureBags {
  std::span<const std::int64_t> ids;
  std::span<const std::int32_t> lengths;
  std::span<const float> weights;  // one per id, or none
};

/// Samples to be scored; what the spans show must live until predict returns.
struct Request {
  std::int64_t num_samples = 0;
  std::span<const float> dense;  // [samples, num_dense]
  /// One per feature of the model, in its order.
  std::span<const FeatureBags> features;
};

/// A request that makes no sense to this model. `where` names the input and the place in it, such
/// as "cat_3.values[17]".
class TESSERA_API BadRequest : public std::runtime_error {
 public:
  BadRequest(const std::string& what, std::string where, bool is_malformed = false)
      : std::runtime_error(what), where_(std::move(where)), is_malformed_(is_malformed) {}
  ~BadRequest() override;
  const std::string& where() const noexcept { return where_; }
  /// Makes no sense to any model: lengths that are negative, or do not sum to the ids.
  bool is_malformed() const noexcept { return is_malformed_; }

 private:
  std::string where_;
  bool is_malformed_;
};

/// 1 / (1 + exp(-x)).
TESSERA_API float sigmoid(float x) noexcept;

struct ModelOptions {
  bool verifies = false;  // all sums of the package first
  /// Earlier versions that stay, to go back to. 0: the model takes no updates, and a reload forgets
  /// what was there.
  int keep_versions = 0;
  UnknownIds unknown = UnknownIds::kDefault;
};

/// What a prediction took, and found.
struct PredictFigures {
  std::chrono::nanoseconds lookup{0};
  std::chrono::nanoseconds dense{0};
  std::int64_t num_unknown = 0;  // ids without a row, in tables that grow
};

/// A version of a model: the package, or what an update has made of it.
struct VersionInfo {
  std::int64_t step = 0;
  bool is_current = false;
  std::int64_t made = 0;          // seconds since 1970
  std::int64_t rows_updated = 0;  // that differ from the version before
  std::int64_t commit = 0;        // of the published checkpoint in its folder; 0: the package
  std::string source;             // SHA-256 of the checkpoint's manifest
};

struct UpdateReport {
  std::int64_t step = 0;
  std::int64_t rows_updated = 0;
  bool is_whole = false;  // no deltas led there: all rows were read
};

/// A package that answers. Safe to use from several threads, and after a fork from several
/// processes, which share all memory: an update of one is seen by all.
class TESSERA_API Model {
  struct Workspace;
  struct State;

 public:
  /// Opens and checks the package: see Package. Throws checkpoint::Error.
  explicit Model(const std::string& path, bool verifies = false);
  Model(const std::string& path, const ModelOptions& options);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  /// One version of the model, for as long as this lives. Used by one thread at a time.
  class TESSERA_API Lease {
   public:
    Lease(Lease&&) noexcept;
    Lease& operator=(Lease&&) = delete;
    ~Lease();

    /// Names and sizes, of the package as it was opened.
    const ModelInfo& model() const noexcept;
    /// The step of this version.
    std::int64_t step() const noexcept;
    /// Throws BadRequest unless sizes, lengths, ids and weights fit the model. Reads no rows.
    void check(const Request& request) const;
    /// Writes a logit per sample. A sample's number does not depend on the others: to the last bit,
    /// it is that of the sample alone. Throws BadRequest. Allocates nothing once it has seen a
    /// request of this size.
    void predict(const Request& request, std::span<float> logits);
    /// Of the last request that was predicted.
    const PredictFigures& figures() const noexcept;

   private:
    friend class Model;
    Lease(State* state, std::unique_ptr<Workspace> workspace);
    State* state_;
    std::unique_ptr<Workspace> workspace_;
  };

  /// The current version. The model must outlive the lease.
  Lease lease();
  /// The version of a step, if it is still there.
  std::optional<Lease> lease(std::int64_t step);

  /// Brings up to `most_bytes` of the tables into memory and computes samples of all batch sizes up
  /// to `most_samples`, so that the first requests find everything in place. Stops early when
  /// `goes_on` says so. Returns the bytes of tables.
  std::int64_t warm_up(std::int64_t most_bytes, std::int64_t most_samples,
                       const std::function<bool()>& goes_on = {});

  /// Compares all rows of the package that is served now with their sums. Throws
  /// checkpoint::Error naming the file and the place. False if `goes_on` ended it early.
  bool verify(const std::function<bool()>& goes_on = {}) const;

  /// Opens another package, checks it and lets later leases have it; those that live keep theirs.
  /// Throws checkpoint::Error, also if its inputs are not the same, and changes nothing then.
  void reload(const std::string& path, bool verifies = false);

  /// May refuse a version that is ready by throwing; `now` is the one before.
  using Canary = std::function<void(Lease& next, Lease& now)>;
  /// Brings the model to the step of a published checkpoint: changed rows are rounded as an export
  /// of that step would round them, to the bit. Later leases have it; those that live keep theirs.
  /// Throws checkpoint::Error if the checkpoint is damaged, holds another model or rows that cannot
  /// be kept, what `canary` throws, and std::runtime_error while leases hold on to all versions
  /// that could be replaced, or if somebody went back meanwhile. Nothing has changed then.
  UpdateReport update(const checkpoint::Reader& reader, const Canary& canary = {});

  /// All that are still there, oldest first.
  std::vector<VersionInfo> versions() const;
  VersionInfo current() const;
  /// Lets later leases have an earlier version, at once: it waits for no update, and one that is
  /// being read is given up. False if it is not there any more.
  bool roll_back(std::int64_t step);

  std::int64_t mapped_bytes() const;

  // ---- Several processes
  /// Takes back the leases of a process that is gone.
  void release_process(int process) noexcept;
  /// For a process that only reads from now on: memory of the tables cannot be written any more.
  void give_up_writing() noexcept;
  /// Before the first update of a process that takes the place of one that has died.
  void take_over_writing();

 private:
  embedding::RowTable table_of_package(std::size_t table) const;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::serving
