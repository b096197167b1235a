// tessera/serving/model.h — predictions from a package, without LibTorch, ranks or autograd.
//
//   tessera::serving::Model model("pkg/");
//   auto lease = model.lease();               // one version for the whole request
//   lease.predict(request, logits);           // spans in, spans out

#pragma once

#include <cstdint>
#include <memory>
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

/// A package that answers. Safe to use from several threads.
class TESSERA_API Model {
  struct Version;
  struct Workspace;
  struct State;

 public:
  /// Opens and checks the package: see Package. Throws checkpoint::Error.
  explicit Model(const std::string& path, bool verifies = false);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  /// One version of the model, for as long as this lives. Used by one thread at a time.
  class TESSERA_API Lease {
   public:
    Lease(Lease&&) noexcept;
    Lease& operator=(Lease&&) = delete;
    ~Lease();

    const ModelInfo& model() const noexcept;
    /// Throws BadRequest unless sizes, lengths, ids and weights fit the model. Reads no rows.
    void check(const Request& request) const;
    /// Writes a logit per sample. A sample's number does not depend on the others: to the last bit,
    /// it is that of the sample alone. Throws BadRequest. Allocates nothing once it has seen a
    /// request of this size.
    void predict(const Request& request, std::span<float> logits);

   private:
    friend class Model;
    Lease(State* state, std::shared_ptr<const Version> version,
          std::unique_ptr<Workspace> workspace);
    State* state_;
    std::shared_ptr<const Version> version_;
    std::unique_ptr<Workspace> workspace_;
  };

  /// The newest version. The model must outlive the lease.
  Lease lease();

  /// Opens another package, checks it and lets later leases have it; those that live keep theirs.
  /// Throws checkpoint::Error, also if its inputs are not the same, and changes nothing then.
  void reload(const std::string& path, bool verifies = false);

  std::int64_t mapped_bytes() const;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace tessera::serving
