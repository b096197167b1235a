#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <span>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "embedding/table_pass.h"
#include "kernels/table_lookup.h"
#include "kernels/table_sort.h"
#include "kernels/table_update.h"

namespace tessera::embedding::detail {
namespace {

using kernels::EntrySource;
using kernels::RowEntry;

// Below about 20 microseconds of work another thread is not worth waking.
constexpr std::int64_t kSerialPositions = 512;
// Inside a page the processor guesses which lines come next.
constexpr std::int64_t kPageBytes = 4096;
// Pieces per thread: enough that a thread with short ones takes more of them.
constexpr std::int64_t kPiecesPerThread = 8;

template <typename Value>
Value* at_least(std::vector<Value>& buffer, std::size_t count) {
  if (buffer.size() < count) buffer.resize(count);
  return buffer.data();
}

/// Calls `body(thread, job)` for every job; a thread that is done takes the next.
template <typename Body>
void share_jobs(std::int64_t num_jobs, std::int64_t num_threads, const Body& body) {
  if (num_threads <= 1 || num_jobs <= 1) {
    for (std::int64_t job = 0; job < num_jobs; ++job) body(0, job);
    return;
  }
  std::atomic<std::int64_t> next{0};
  at::parallel_for(0, num_threads, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t thread = begin; thread < end; ++thread) {
      for (std::int64_t job = next++; job < num_jobs; job = next++) body(thread, job);
    }
  });
}

std::int64_t threads_for(std::int64_t num_positions) {
  return num_positions < kSerialPositions || at::in_parallel_region() ? 1 : at::get_num_threads();
}

/// Calls `body(feature, begin, end)` for pieces of the bags of all features, on several threads.
template <typename Body>
void share_bags(const TablePass& pass, const Body& body) {
  const std::int64_t num_threads = threads_for(pass.num_positions);
  const std::int64_t step =
      num_threads == 1
          ? std::max<std::int64_t>(pass.num_bags, 1)
          : std::max<std::int64_t>(pass.num_bags / (num_threads * kPiecesPerThread), 1);
  std::int64_t num_jobs = 0;
  for (const auto& feature : pass.features) num_jobs += (feature.num_bags + step - 1) / step;
  share_jobs(num_jobs, num_threads, [&](std::int64_t, std::int64_t job) {
    for (const auto& feature : pass.features) {
      const std::int64_t pieces = (feature.num_bags + step - 1) / step;
      if (job < pieces) {
        return body(feature, job * step, std::min((job + 1) * step, feature.num_bags));
      }
      job -= pieces;
    }
  });
}

void keep_smallest(std::atomic<std::int64_t>& bad, std::int64_t found) {
  std::int64_t seen = bad.load();
  while (found >= 0 && (seen < 0 || found < seen) && !bad.compare_exchange_weak(seen, found)) {
  }
}

/// Sorts one table's entries, already filled in, with all threads.
void sort_together(const kernels::RadixPlan& plan, std::span<RowEntry> entries, RowEntry* spare,
                   std::int64_t num_threads, std::vector<std::uint32_t>& counts) {
  const auto size = static_cast<std::int64_t>(entries.size());
  const std::int64_t digits = plan.num_digits();
  at_least(counts, static_cast<std::size_t>(digits * num_threads));
  const auto piece_of = [&](std::span<RowEntry> all, std::int64_t piece) {
    const std::int64_t begin = size * piece / num_threads;
    return all.subspan(begin, size * (piece + 1) / num_threads - begin);
  };
  std::span<RowEntry> from = entries;
  std::span<RowEntry> to(spare, entries.size());
  for (int pass = 0; pass < plan.num_passes; ++pass) {
    at::parallel_for(0, num_threads, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t piece = begin; piece < end; ++piece) {
        kernels::count_digits(plan, pass, piece_of(from, piece), counts.data() + piece * digits);
      }
    });
    kernels::place_digits(plan, static_cast<int>(num_threads), counts.data());
    at::parallel_for(0, num_threads, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t piece = begin; piece < end; ++piece) {
        kernels::scatter_digits(plan, pass, piece_of(from, piece), counts.data() + piece * digits,
                                to.data());
      }
    });
    std::swap(from, to);
  }
  if (from.data() != entries.data()) std::copy(from.begin(), from.end(), entries.begin());
}

/// Whether sources of `next` lie where `last` says, too.
bool continues(const kernels::GradientSegment& last, const kernels::GradientSegment& next) {
  return last.stride == next.stride &&
         last.base - last.first * last.stride == next.base - next.first * next.stride;
}

/// The backward pass of a call on the CPU: sort the ids of each table, then step its rows. Every
/// row is stepped by one thread, so the result does not depend on how many there are.
class Backward {
 public:
  Backward(const TablePass& pass, const float* gradient, float limit, Workspace& workspace,
           std::vector<TableTarget>& targets)
      : pass_(pass), workspace_(workspace), targets_(targets) {
    source_ = pass.is_sequence || pass.is_weighted ? EntrySource::kPosition : EntrySource::kBag;
    // Means and limits are cheaper once per bag than once per id.
    const bool has_work = limit < std::numeric_limits<float>::infinity() ||
                          std::any_of(
                              pass.features.begin(), pass.features.end(),
                              [](const auto& feature) { return feature.is_mean; });
    is_gathered_ = has_work && !pass.is_sequence && pass.num_positions >= 2 * pass.num_bags;
    count_entries();
    describe_gradients(gradient, limit);
    num_threads_ = threads_for(pass.num_positions);
  }

  /// Sorts the next tables, one per thread; false if all are sorted.
  bool prepare() { return sort(std::max<std::int64_t>(num_threads_, 1)) > 0; }

  void run() {
    sort(static_cast<std::int64_t>(pass_.num_tables));
    if (is_gathered_) gather_all();
    workspace_.sorted_for = 0;  // a second pass of the same call sorts again
    cut();
    make_sparse_targets();
    std::int64_t most_columns = 1;
    for (const TableTarget& target : targets_) {
      most_columns = std::max(most_columns, target.rows.num_columns);
    }
    const std::int64_t room = (kernels::buffer_floats(most_columns) + 15) / 16 * 16;
    float* buffers = at_least(workspace_.rows, static_cast<std::size_t>(room * num_threads_));
    share_jobs(static_cast<std::int64_t>(workspace_.pieces.size()), num_threads_,
               [&](std::int64_t thread, std::int64_t job) {
                 hand_over(workspace_.pieces[job], buffers + thread * room);
               });
  }

 private:
  std::int64_t positions_of(const kernels::TableFeature& feature) const {
    return pass_.ids.offset(feature.first_bag + feature.num_bags) -
           pass_.ids.offset(feature.first_bag);
  }
  std::int64_t size_of(std::size_t table) const {
    return workspace_.firsts[table + 1] - workspace_.firsts[table];
  }
  std::span<RowEntry> entries_of(std::size_t table) const {
    return {workspace_.entries.data() + workspace_.firsts[table],
            static_cast<std::size_t>(size_of(table))};
  }

  kernels::RadixPlan plan_of(std::size_t table) const {
    const TableTarget& target = targets_[table];
    const std::int64_t row_bytes =
        target.rows.num_columns * (target.rows.element == kernels::Element::kFloat32 ? 4 : 2);
    const bool is_dense = target.rows.num_rows * row_bytes < size_of(table) * kPageBytes;
    // A coalesced gradient has rising rows.
    const bool is_free = target.kind != TableTarget::Kind::kSparse;
    return kernels::radix_plan(target.rows.num_rows, is_dense && is_free
                                                         ? kernels::RowOrder::kSpread
                                                         : kernels::RowOrder::kRising);
  }

  bool is_wanted(std::size_t table) const {
    return targets_[table].kind != TableTarget::Kind::kNone && targets_[table].rows.num_rows > 0;
  }

  void count_entries() {
    auto& firsts = workspace_.firsts;
    firsts.assign(pass_.num_tables + 1, 0);
    for (std::size_t f = 0; f < pass_.features.size(); ++f) {
      const auto table = static_cast<std::size_t>(pass_.table_of[f]);
      if (is_wanted(table)) firsts[table + 1] += positions_of(pass_.features[f]);
    }
    for (std::size_t table = 0; table < pass_.num_tables; ++table) {
      firsts[table + 1] += firsts[table];
    }
    const auto total = static_cast<std::size_t>(firsts.back());
    if (workspace_.sorted_for != pass_.number || pass_.number == 0) {
      workspace_.sorted_for = pass_.number;
      workspace_.is_sorted.assign(pass_.num_tables, false);
    }
    at_least(workspace_.entries, total);
    at_least(workspace_.spare, total);
    if (pass_.is_weighted && !pass_.is_sequence) {
      at_least(workspace_.bag_of, static_cast<std::size_t>(pass_.num_positions));
    }
  }

  void describe_gradients(const float* gradient, float limit) {
    gradient_ = gradient;
    limit_ = limit;
    if (is_gathered_) {
      workspace_.places.assign(pass_.features.size(), 0);
      std::int64_t next = 0;
      for (std::size_t f = 0; f < pass_.features.size(); ++f) {
        workspace_.places[f] = next;
        next += pass_.features[f].num_bags * pass_.features[f].rows.num_columns;
      }
      at_least(workspace_.gathered, static_cast<std::size_t>(next));
    }
    auto& segments = workspace_.segments;
    segments.clear();
    segments.reserve(pass_.features.size());
    workspace_.gradients.assign(pass_.num_tables, {});
    for (std::size_t table = 0; table < pass_.num_tables; ++table) {
      kernels::RowGradients& gradients = workspace_.gradients[table];
      gradients.data = is_gathered_ ? workspace_.gathered.data() : gradient;
      gradients.segments = segments.data() + segments.size();
      if (!is_gathered_) gradients.limit = limit;
      if (pass_.is_weighted) gradients.weights = pass_.ids.weights;
      if (pass_.is_weighted && !pass_.is_sequence) gradients.bag_of = workspace_.bag_of.data();
      for (std::size_t f = 0; f < pass_.features.size(); ++f) {
        const kernels::TableFeature& feature = pass_.features[f];
        if (static_cast<std::size_t>(pass_.table_of[f]) != table) continue;
        kernels::GradientSegment segment;
        if (pass_.is_sequence) {
          segment = {pass_.ids.offset(feature.first_bag), feature.output, feature.rows.num_columns};
        } else if (is_gathered_) {
          segment = {feature.first_bag, workspace_.places[f], feature.rows.num_columns};
        } else {
          segment = {feature.first_bag, feature.output, feature.output_stride};
          if (feature.is_mean) gradients.bags = &pass_.ids;
        }
        // Features whose gradients go on where those of the one before would are one segment: those
        // of all ranks, if all rows are equally wide.
        const bool goes_on = gradients.num_segments > 0 && continues(segments.back(), segment);
        if (goes_on) continue;
        segments.push_back(segment);
        ++gradients.num_segments;
      }
    }
  }

  /// Copies the gradients of bags `begin` to `end - 1` of a feature to where they lie together.
  void gather(std::size_t f, std::int64_t begin, std::int64_t end) {
    const kernels::TableFeature& feature = pass_.features[f];
    const std::int64_t columns = feature.rows.num_columns;
    const bool is_limited = limit_ < std::numeric_limits<float>::infinity();
    for (std::int64_t bag = begin; bag < end; ++bag) {
      const float* from = gradient_ + feature.output + bag * feature.output_stride;
      float* to = workspace_.gathered.data() + workspace_.places[f] + bag * columns;
      std::memcpy(to, from, static_cast<std::size_t>(columns) * sizeof(float));
      if (is_limited) {
        for (std::int64_t c = 0; c < columns; ++c) {
          to[c] = to[c] > limit_ ? limit_ : (to[c] < -limit_ ? -limit_ : to[c]);
        }
      }
      if (feature.is_mean) {
        const std::int64_t count = pass_.ids.offset(feature.first_bag + bag + 1) -
                                   pass_.ids.offset(feature.first_bag + bag);
        const float factor = 1.0F / static_cast<float>(std::max<std::int64_t>(count, 1));
        for (std::int64_t c = 0; c < columns; ++c) to[c] *= factor;
      }
    }
  }

  void gather_all() {
    share_bags(pass_,
               [&](const kernels::TableFeature& feature, std::int64_t begin, std::int64_t end) {
                 gather(static_cast<std::size_t>(&feature - pass_.features.data()), begin, end);
               });
  }

  void fill(std::size_t table) {
    RowEntry* entries = entries_of(table).data();
    std::uint32_t* bag_of =
        pass_.is_weighted && !pass_.is_sequence ? workspace_.bag_of.data() : nullptr;
    for (std::size_t f = 0; f < pass_.features.size(); ++f) {
      const kernels::TableFeature& feature = pass_.features[f];
      if (static_cast<std::size_t>(pass_.table_of[f]) != table) continue;
      kernels::fill_entries(pass_.ids, feature, 0, feature.num_bags, source_, entries, bag_of);
      entries += positions_of(feature);
    }
  }

  /// Sorts tables that are not sorted yet, at most `limit`, and returns how many it were.
  std::int64_t sort(std::int64_t limit) {
    // A table with more than its thread's share of the ids is sorted by all threads together, the
    // others by one each, largest first.
    std::int64_t num_sorted = 0;
    auto& order = workspace_.order;
    order.clear();
    const std::int64_t share = std::max<std::int64_t>(
        workspace_.firsts.back() / std::max<std::int64_t>(num_threads_, 1), 16384);
    std::int64_t most_counts = 1;
    for (std::size_t table = 0; table < pass_.num_tables && num_sorted < limit; ++table) {
      if (size_of(table) == 0 || workspace_.is_sorted[table]) continue;
      workspace_.is_sorted[table] = true;
      ++num_sorted;
      const kernels::RadixPlan plan = plan_of(table);
      if (num_threads_ > 1 && size_of(table) > share) {
        fill(table);
        sort_together(plan, entries_of(table), workspace_.spare.data() + workspace_.firsts[table],
                      num_threads_, workspace_.counts);
      } else {
        most_counts = std::max(most_counts, plan.num_counts());
        order.push_back(table);
      }
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return size_of(a) > size_of(b); });
    at_least(workspace_.counts, static_cast<std::size_t>(most_counts * num_threads_));
    share_jobs(static_cast<std::int64_t>(order.size()), num_threads_,
               [&](std::int64_t thread, std::int64_t job) {
                 const std::size_t table = order[job];
                 fill(table);
                 kernels::sort_entries(plan_of(table), entries_of(table),
                                       workspace_.spare.data() + workspace_.firsts[table],
                                       workspace_.counts.data() + thread * most_counts);
               });
    return num_sorted;
  }

  /// Pieces of the sorted entries that end where a row ends.
  void cut() {
    auto& pieces = workspace_.pieces;
    pieces.clear();
    const std::int64_t step =
        num_threads_ == 1 ? std::max<std::int64_t>(workspace_.firsts.back(), 1)
                          : std::max<std::int64_t>(
                                workspace_.firsts.back() / (num_threads_ * kPiecesPerThread), 256);
    for (std::size_t table = 0; table < pass_.num_tables; ++table) {
      const std::span<RowEntry> entries = entries_of(table);
      const std::int64_t size = size_of(table);
      for (std::int64_t begin = 0; begin < size;) {
        std::int64_t end = std::min(begin + step, size);
        while (end < size && kernels::row_of(entries[end]) == kernels::row_of(entries[end - 1])) {
          ++end;
        }
        pieces.push_back({table, begin, end, 0});
        begin = end;
      }
    }
  }

  static std::int64_t count_rows(std::span<const RowEntry> entries) {
    std::int64_t rows = entries.empty() ? 0 : 1;
    for (std::size_t i = 1; i < entries.size(); ++i) {
      if (kernels::row_of(entries[i]) != kernels::row_of(entries[i - 1])) ++rows;
    }
    return rows;
  }

  void make_sparse_targets() {
    std::vector<std::int64_t> num_rows(pass_.num_tables, 0);
    for (Workspace::Piece& piece : workspace_.pieces) {
      if (targets_[piece.table].kind != TableTarget::Kind::kSparse) continue;
      piece.row = num_rows[piece.table];
      num_rows[piece.table] +=
          count_rows(entries_of(piece.table).subspan(piece.begin, piece.end - piece.begin));
    }
    for (std::size_t table = 0; table < pass_.num_tables; ++table) {
      TableTarget& target = targets_[table];
      if (target.kind != TableTarget::Kind::kSparse) continue;
      target.indices = at::empty({num_rows[table]}, at::kLong);
      target.values = at::empty({num_rows[table], target.rows.num_columns}, at::kFloat);
    }
  }

  void hand_over(const Workspace::Piece& piece, float* buffer) {
    TableTarget& target = targets_[piece.table];
    const RowEntry* entries = entries_of(piece.table).data();
    const kernels::RowGradients& gradients = workspace_.gradients[piece.table];
    const auto& kernels = kernels::table_update_kernels();
    const std::int64_t columns = target.rows.num_columns;
    switch (target.kind) {
      case TableTarget::Kind::kNone:
        return;
      case TableTarget::Kind::kStep:
        return kernels.update(gradients, entries, piece.begin, piece.end, target.rows, target.state,
                              target.step, buffer);
      case TableTarget::Kind::kDense:
        return kernels.sum_rows(gradients, entries, piece.begin, piece.end, columns, true,
                                target.values.data_ptr<float>(), buffer);
      case TableTarget::Kind::kSparse: {
        auto* index = target.indices.data_ptr<std::int64_t>() + piece.row;
        for (std::int64_t i = piece.begin; i < piece.end; ++i) {
          const std::int64_t row = kernels::row_of(entries[i]);
          if (i == piece.begin || row != kernels::row_of(entries[i - 1])) *index++ = row;
        }
        return kernels.sum_rows(gradients, entries, piece.begin, piece.end, columns, false,
                                target.values.data_ptr<float>() + piece.row * columns, buffer);
      }
    }
  }

  const TablePass& pass_;
  Workspace& workspace_;
  std::vector<TableTarget>& targets_;
  EntrySource source_;
  bool is_gathered_ = false;
  const float* gradient_ = nullptr;
  float limit_ = 0;
  std::int64_t num_threads_ = 1;
};

}  // namespace

std::int64_t Workspace::bytes() const {
  const auto size = [](const auto& buffer) {
    return static_cast<std::int64_t>(buffer.capacity() * sizeof(buffer[0]));
  };
  return size(entries) + size(spare) + size(counts) + size(bag_of) + size(rows) + size(gathered) +
         size(places) + size(segments) + size(gradients) + size(firsts) + size(pieces) +
         size(order) + (device_bytes.defined() ? device_bytes.numel() : 0);
}

std::int64_t cpu_lookup(const TablePass& pass, float* output) {
  const auto& kernels = kernels::table_lookup_kernels();
  std::atomic<std::int64_t> bad{-1};
  share_bags(pass, [&](const kernels::TableFeature& feature, std::int64_t begin, std::int64_t end) {
    if (!pass.is_sequence) {
      return keep_smallest(bad, kernels.pooled(pass.ids, feature, begin, end, output));
    }
    const std::int64_t start = pass.ids.offset(feature.first_bag);
    keep_smallest(
        bad, kernels.sequence(pass.ids, feature, pass.ids.offset(feature.first_bag + begin) - start,
                              pass.ids.offset(feature.first_bag + end) - start, output));
  });
  return bad;
}

void cpu_weight_gradient(const TablePass& pass, const float* gradient, float* output) {
  share_bags(pass, [&](const kernels::TableFeature& feature, std::int64_t begin, std::int64_t end) {
    kernels::table_lookup_kernels().weight_gradient(pass.ids, feature, pass.is_sequence, begin, end,
                                                    gradient, output);
  });
}

bool cpu_prepare_backward(const TablePass& pass, Workspace& workspace,
                          std::vector<TableTarget>& targets) {
  return Backward(pass, nullptr, std::numeric_limits<float>::infinity(), workspace, targets)
      .prepare();
}

void cpu_backward(const TablePass& pass, const float* gradient, float limit, Workspace& workspace,
                  std::vector<TableTarget>& targets) {
  Backward(pass, gradient, limit, workspace, targets).run();
}

void cpu_step_rows(const kernels::TableRows& table, const kernels::RowState& state,
                   const kernels::RowStep& step, const at::Tensor& rows,
                   const at::Tensor& gradients, float limit) {
  const std::int64_t count = gradients.size(0);
  const std::int64_t* row = rows.defined() ? rows.const_data_ptr<std::int64_t>() : nullptr;
  const kernels::GradientSegment segment{0, 0, table.num_columns};
  kernels::RowGradients source;
  source.data = gradients.const_data_ptr<float>();
  source.segments = &segment;
  source.num_segments = 1;
  source.limit = limit;
  const std::int64_t grain = std::max<std::int64_t>(1, 32768 / table.num_columns);
  at::parallel_for(0, count, grain, [&](std::int64_t begin, std::int64_t end) {
    std::vector<RowEntry> entries(static_cast<std::size_t>(end - begin));
    for (std::int64_t i = begin; i < end; ++i) {
      entries[i - begin] = kernels::make_entry(row != nullptr ? row[i] : i, i);
    }
    std::vector<float> buffer(kernels::buffer_floats(table.num_columns));
    kernels::table_update_kernels().update(source, entries.data(), 0, end - begin, table, state,
                                           step, buffer.data());
  });
}

void step_rows(const kernels::TableRows& table, const kernels::RowState& state,
               const kernels::RowStep& step, const at::Tensor& rows, const at::Tensor& gradients,
               float limit) {
  if (gradients.size(0) == 0) return;
  (gradients.is_cuda() ? cuda_step_rows : cpu_step_rows)(table, state, step, rows, gradients,
                                                         limit);
}

}  // namespace tessera::embedding::detail
