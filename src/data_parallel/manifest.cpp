#include "tessera/data_parallel/manifest.h"

#include <algorithm>
#include <array>
#include <sstream>

#include "comm/agreement.h"
#include "comm/rank_list.h"
#include "data_parallel/gradient_buckets.h"
#include "data_parallel/names.h"
#include "tessera/comm/error.h"
#include "tessera/core/version.h"

namespace tessera::data_parallel {
namespace {

constexpr int kMaxDifferences = 12;

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
      text.append(said[i].first).append(" on ").append(comm::list_ranks(said[i].second, ", "));
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

void check_manifests(const Manifest& manifest, const comm::Group& group) {
  const auto texts = comm::detail::find_difference(joined(manifest), group);
  if (!texts) return;
  std::vector<Manifest> manifests;
  for (const std::string& text : *texts) manifests.push_back(parsed(text));
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
  throw comm::Error(comm::ErrorKind::kMismatch, comm::detail::unlike_the_first(*texts), message);
}

}  // namespace tessera::data_parallel
