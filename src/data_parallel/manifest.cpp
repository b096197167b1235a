#include "tessera/data_parallel/manifest.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <sstream>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>

#include "data_parallel/gradient_buckets.h"
#include "data_parallel/names.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"
#include "tessera/core/version.h"

namespace tessera::data_parallel {
namespace {

constexpr int kMaxDifferences = 12;
constexpr int kNumWords = 4;  // of a digest

std::string describe(const std::string& name, const at::Tensor& tensor) {
  std::ostringstream out;
  out << "'" << name << "' " << tensor.scalar_type() << " " << tensor.sizes();
  if (tensor.layout() == at::kStrided) {
    if (!tensor.is_contiguous()) out << " strides " << tensor.strides();
  } else {
    out << " " << tensor.layout();
  }
  return out.str();
}

// Four words, each a hash of its own: ranks that agree by chance in one differ in the others.
std::array<std::int64_t, kNumWords> digest(const std::string& text) {
  std::array<std::uint64_t, kNumWords> words = {0x9e3779b97f4a7c15, 0xc2b2ae3d27d4eb4f,
                                                0x165667b19e3779f9, 0x27d4eb2f165667c5};
  for (const char character : text) {
    for (int i = 0; i < kNumWords; ++i) {
      words[i] =
          (words[i] ^ static_cast<unsigned char>(character)) * (0x100000001b3 + 2 * i * 0x51);
      words[i] ^= words[i] >> (29 + i);
    }
  }
  std::array<std::int64_t, kNumWords> result{};
  std::memcpy(result.data(), words.data(), sizeof(result));
  return result;
}

constexpr char kLineEnd = '\n';
constexpr char kSectionEnd = '\f';

std::string joined(const Manifest& manifest) {
  std::string text;
  for (const auto* section : {&manifest.parameters, &manifest.buffers, &manifest.options}) {
    for (const std::string& line : *section) {
      text.append(line);
      text.push_back(kLineEnd);
    }
    text.push_back(kSectionEnd);
  }
  return text;
}

Manifest parsed(const std::string& text) {
  Manifest manifest;
  const std::array<std::vector<std::string>*, 3> sections = {&manifest.parameters,
                                                             &manifest.buffers, &manifest.options};
  std::size_t section = 0;
  std::string line;
  for (const char character : text) {
    if (character == kLineEnd) {
      sections[section]->push_back(std::move(line));
      line.clear();
    } else if (character == kSectionEnd) {
      if (++section == sections.size()) break;
    } else {
      line.push_back(character);
    }
  }
  return manifest;
}

std::string list_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text.append(", ");
    text.append(std::to_string(ranks[i]));
  }
  return text;
}

// Line by line; ranks that say the same stand together.
void compare(const std::string& what, const std::vector<const std::vector<std::string>*>& sections,
             std::vector<std::string>& differences) {
  std::size_t num_lines = 0;
  for (const auto* section : sections) num_lines = std::max(num_lines, section->size());
  for (std::size_t line = 0; line < num_lines; ++line) {
    std::vector<std::pair<std::string, std::vector<int>>> said;
    for (std::size_t rank = 0; rank < sections.size(); ++rank) {
      const std::string text =
          line < sections[rank]->size() ? (*sections[rank])[line] : std::string("none");
      const auto place =
          std::find_if(said.begin(), said.end(), [&](const auto& s) { return s.first == text; });
      if (place == said.end()) {
        said.push_back({text, {static_cast<int>(rank)}});
      } else {
        place->second.push_back(static_cast<int>(rank));
      }
    }
    if (said.size() == 1) continue;
    std::string text = what;
    if (what != "option") text.append(" ").append(std::to_string(line));
    text.append(": ");
    for (std::size_t i = 0; i < said.size(); ++i) {
      if (i > 0) text.append("; ");
      text.append(said[i].first).append(" on ").append(list_of(said[i].second));
    }
    differences.push_back(std::move(text));
  }
}

}  // namespace

Manifest manifest_of(const ModelParts& parts, const Options& options) {
  Manifest manifest;
  // What is ignored may differ, and may be on some ranks only: shards of tables do and are.
  for (const NamedParameter& parameter : parts.parameters) {
    if (is_listed(options.ignored, parameter.name)) continue;
    std::string line = describe(parameter.name, parameter.tensor);
    if (!parameter.tensor.requires_grad()) line.append(" without gradient");
    if (parameter.is_sparse) line.append(" sparse gradient");
    if (is_listed(options.delay_all_reduce_named_params, parameter.name)) line.append(" delayed");
    manifest.parameters.push_back(std::move(line));
  }
  if (parts.buffers) {
    for (const NamedTensor& buffer : parts.buffers()) {
      if (is_listed(options.ignored, buffer.name)) continue;
      manifest.buffers.push_back(describe(buffer.name, buffer.tensor));
    }
  }
  const auto say = [&](const char* name, const std::string& value) {
    manifest.options.push_back(std::string(name).append(" = ").append(value));
  };
  const auto yes = [](bool value) { return std::string(value ? "true" : "false"); };
  std::string caps;
  for (const std::size_t size : bucket_limits(options).sizes) {
    caps.append(caps.empty() ? "" : ", ").append(std::to_string(size));
  }
  say("tessera", version());
  say("bucket bytes", caps);
  say("broadcast_buffers", yes(options.broadcast_buffers.value_or(true)));
  say("forward_sync_buffers", yes(options.forward_sync_buffers.value_or(true)));
  say("find_unused_parameters", yes(options.find_unused_parameters));
  say("skip_all_reduce_unused_params", yes(options.skip_all_reduce_unused_params));
  say("static_graph", yes(options.static_graph));
  say("automatic_graph", yes(options.automatic_graph));
  say("divisor", options.divisor ? std::to_string(*options.divisor) : "ranks");
  say("param_to_hook_all_reduce", options.param_to_hook_all_reduce.value_or("none"));
  return manifest;
}

void check_manifests(const Manifest& manifest, const comm::Group& group, c10::Device device) {
  const std::string text = joined(manifest);
  const auto words = digest(text);
  std::vector<std::int64_t> mine(words.begin(), words.end());
  mine.push_back(static_cast<std::int64_t>(text.size()));
  const at::Tensor all =
      comm::all_gather(at::tensor(mine, at::kLong).to(device).unsqueeze(0), group).cpu();
  const std::int64_t* values = all.const_data_ptr<std::int64_t>();
  std::int64_t longest = 0;
  std::vector<int> others;
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::int64_t* row = values + rank * (kNumWords + 1);
    longest = std::max(longest, row[kNumWords]);
    if (!std::equal(row, row + kNumWords + 1, values)) others.push_back(rank);
  }
  if (others.empty()) return;

  at::Tensor bytes = at::zeros({1, longest}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  const at::Tensor texts = comm::all_gather(bytes.to(device), group).cpu();
  std::vector<Manifest> manifests;
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto* first = static_cast<const char*>(texts.const_data_ptr()) + rank * longest;
    manifests.push_back(
        parsed({first, static_cast<std::size_t>(values[rank * (kNumWords + 1) + kNumWords])}));
  }
  std::vector<std::string> differences;
  std::vector<const std::vector<std::string>*> sections(manifests.size());
  const auto collect = [&](std::vector<std::string> Manifest::* member) {
    for (std::size_t i = 0; i < manifests.size(); ++i) sections[i] = &(manifests[i].*member);
    return sections;
  };
  compare("parameter", collect(&Manifest::parameters), differences);
  compare("buffer", collect(&Manifest::buffers), differences);
  compare("option", collect(&Manifest::options), differences);

  std::string message =
      "DistributedDataParallel expects the same model and options on all ranks, but:";
  for (std::size_t i = 0; i < differences.size(); ++i) {
    if (i == kMaxDifferences) {
      message.append("\n  and ")
          .append(std::to_string(differences.size() - kMaxDifferences))
          .append(" more.");
      break;
    }
    message.append("\n  ").append(differences[i]);
  }
  message.append("\nNothing was sent yet. Build the same model on every rank.");
  throw comm::Error(comm::ErrorKind::kMismatch, others, message);
}

}  // namespace tessera::data_parallel
