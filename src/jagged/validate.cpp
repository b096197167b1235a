#include "tessera/jagged/validate.h"

#include <algorithm>
#include <set>

#include <ATen/Functions.h>

#include "jagged/composed.h"
#include "kernels/jagged.h"
#include "tessera/core/check.h"
#include "tessera/jagged/operators.h"

namespace tessera::jagged {
namespace {

// Key and sample of a bag, for people.
std::string bag_name(const KeyedJaggedTensor& features, std::int64_t bag) {
  const auto& begins = features.lengths_offset_per_key();
  const auto after = std::upper_bound(begins.begin(), begins.end(), bag);
  const auto key = static_cast<std::size_t>(after - begins.begin()) - 1;
  return std::string("feature '")
      .append(features.keys()[key])
      .append("', sample ")
      .append(std::to_string(bag - begins[key]));
}

void validate_lengths(const KeyedJaggedTensor& features) {
  const at::Tensor& given_lengths = features.lengths_or_none();
  const at::Tensor& given_offsets = features.offsets_or_none();
  const std::int64_t num_values = features.values().size(0);
  if (given_offsets.defined()) {
    const at::Tensor offsets = given_offsets.cpu().to(at::kLong).contiguous();
    const auto* at = offsets.const_data_ptr<std::int64_t>();
    const std::int64_t bags = offsets.numel() - 1;
    TESSERA_CHECK_VALUE(at[0] == 0, "jagged.validate: the first offset is ", at[0], ", not 0.");
    for (std::int64_t bag = 0; bag < bags; ++bag) {
      TESSERA_CHECK_VALUE(at[bag + 1] >= at[bag], "jagged.validate: ", bag_name(features, bag),
                          " begins at ", at[bag], " and ends at ", at[bag + 1], ".");
    }
    TESSERA_CHECK_VALUE(at[bags] == num_values, "jagged.validate: the last offset is ", at[bags],
                        ", but there are ", num_values, " values.");
  }
  if (given_lengths.defined()) {
    const at::Tensor lengths = given_lengths.cpu().to(at::kLong).reshape({-1}).contiguous();
    const auto* length = lengths.const_data_ptr<std::int64_t>();
    std::int64_t sum = 0;
    for (std::int64_t bag = 0; bag < lengths.numel(); ++bag) {
      TESSERA_CHECK_VALUE(length[bag] >= 0, "jagged.validate: ", bag_name(features, bag),
                          " has a length of ", length[bag], ".");
      sum += length[bag];
    }
    TESSERA_CHECK_VALUE(sum == num_values, "jagged.validate: the lengths add up to ", sum,
                        ", but there are ", num_values, " values.");
    if (given_offsets.defined()) {
      const at::Tensor other = offsets_to_lengths(given_offsets.cpu().to(at::kLong));
      const at::Tensor different = lengths.ne(other).nonzero();
      if (different.numel() > 0) {
        const auto bag = different[0].item<std::int64_t>();
        TESSERA_CHECK_VALUE(false, "jagged.validate: ", bag_name(features, bag),
                            " has a length of ", length[bag], ", but the offsets say ",
                            other[bag].item<std::int64_t>(), ".");
      }
    }
  }
}

void validate_inverse(const KeyedJaggedTensor& features) {
  if (!features.inverse_indices_or_none()) return;
  TESSERA_CHECK_VALUE(features.variable_stride_per_key(),
                      "jagged.validate: there are inverse indices, but no variable batch.");
  const auto& [names, rows] = features.inverse_indices();
  const at::Tensor index = rows.cpu().to(at::kLong).contiguous();
  for (std::size_t f = 0; f < names.size(); ++f) {
    TESSERA_CHECK_VALUE(features.has_key(names[f]),
                        "jagged.validate: there are inverse indices "
                        "for feature '",
                        names[f], "', which is no key.");
    const std::int64_t stride = features.stride_per_key()[features.index_of(names[f])];
    const at::Tensor row = index[static_cast<std::int64_t>(f)];
    const std::int64_t bad = kernels::first_outside(row.const_data_ptr<std::int64_t>(),
                                                    std::int64_t{0}, row.numel(), stride);
    TESSERA_CHECK_VALUE(bad < 0, "jagged.validate: feature '", names[f], "', sample ", bad,
                        " has inverse index ", bad < 0 ? 0 : row[bad].item<std::int64_t>(),
                        "; the feature has ", stride, " samples.");
  }
}

}  // namespace

std::string BadId::text() const {
  return std::string("feature '")
      .append(feature)
      .append("', sample ")
      .append(std::to_string(sample))
      .append(" has id ")
      .append(std::to_string(id))
      .append("; there are ")
      .append(std::to_string(num_embeddings))
      .append(" rows");
}

std::optional<BadId> find_bad_id(const KeyedJaggedTensor& features, std::size_t feature,
                                 std::int64_t num_embeddings) {
  const JaggedTensor bags = features.feature(feature);
  detail::check_integers(bags.values(), "jagged.find_bad_id", "the ids");
  const at::Tensor ids = bags.values().cpu().contiguous();
  const std::int64_t bad =
      ids.scalar_type() == at::kInt
          ? kernels::first_outside(ids.const_data_ptr<std::int32_t>(), std::int64_t{0}, ids.numel(),
                                   num_embeddings)
          : kernels::first_outside(ids.const_data_ptr<std::int64_t>(), std::int64_t{0}, ids.numel(),
                                   num_embeddings);
  if (bad < 0) return std::nullopt;
  const at::Tensor offsets = bags.offsets().cpu().to(at::kLong).contiguous();
  const auto* begin = offsets.const_data_ptr<std::int64_t>();
  const std::int64_t sample = std::upper_bound(begin, begin + offsets.numel(), bad) - begin - 1;
  return BadId{features.keys()[feature], sample, ids[bad].item<std::int64_t>(), num_embeddings};
}

void validate(const KeyedJaggedTensor& features,
              const std::vector<std::pair<std::string, std::int64_t>>& num_embeddings) {
  std::set<std::string> seen;
  for (const auto& key : features.keys()) {
    TESSERA_CHECK_VALUE(seen.insert(key).second, "jagged.validate: key '", key, "' appears twice.");
  }
  validate_lengths(features);
  validate_inverse(features);
  for (const auto& [name, rows] : num_embeddings) {
    TESSERA_CHECK_VALUE(features.has_key(name), "jagged.validate: there is no feature '", name,
                        "' among the keys.");
    const auto bad = find_bad_id(features, features.index_of(name), rows);
    TESSERA_CHECK_VALUE(!bad, "jagged.validate: ", bad ? bad->text() : "", ".");
  }
}

}  // namespace tessera::jagged
