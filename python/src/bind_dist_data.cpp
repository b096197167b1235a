#include "arguments.h"
#include "bindings.h"
#include "tessera/sharding/dist_data.h"

namespace tessera::python {
namespace {

using at::Tensor;
using comm::Codecs;
using comm::Group;
using jagged::KeyedJaggedTensor;
using sharding::ReceivedFeatures;
using sharding::Sizes;

template <class T>
void bind_pending(py::module_& module, const char* name) {
  py::class_<comm::Awaitable<T>>(module, name)
      .def("wait", [](const comm::Awaitable<T>& self) { return self.wait(); }, Release());
}

void bind_feature_exchanges(py::module_& module) {
  py::class_<ReceivedFeatures>(module, "ReceivedFeatures")
      .def_readonly("features", &ReceivedFeatures::features)
      .def_readonly("input_splits", &ReceivedFeatures::input_splits)
      .def_readonly("output_splits", &ReceivedFeatures::output_splits)
      .def_readonly("stride_per_rank", &ReceivedFeatures::stride_per_rank)
      .def_readonly("recat", &ReceivedFeatures::recat);
  module.def("get_recat", &sharding::get_recat);
  module.def("exchange_splits", &sharding::exchange_splits, Release());
  module.def(
      "kjt_alltoall",
      [](const KeyedJaggedTensor& features, const Sizes& splits, int stagger, const Group& group) {
        return sharding::KJTAllToAll(group, splits, stagger).forward(features);
      },
      Release());
  module.def(
      "fused_kjt_alltoall",
      [](const std::vector<std::tuple<KeyedJaggedTensor, Sizes, int>>& inputs, const Group& group) {
        std::vector<sharding::KJTSplitsAllToAllMeta> metas;
        for (const auto& [features, splits, stagger] : inputs) {
          metas.emplace_back(group, features, splits, stagger);
        }
        return sharding::fused_kjt_alltoall(std::move(metas));
      },
      Release());
  module.def("kjt_one_to_all", &sharding::kjt_one_to_all, Release());
  module.def("pooled_embeddings_alltoall", &sharding::pooled_embeddings_alltoall, py::arg("rows"),
             py::arg("dim_sum_per_rank"), py::arg("group"), py::arg("batch_size_per_rank"),
             py::arg("codecs"), Release());
  module.def(
      "sequence_embeddings_alltoall",
      [](const Tensor& rows, const Tensor& lengths, const Sizes& input_splits,
         const Sizes& output_splits, const Sizes& features_per_rank, const Group& group,
         const Sizes& batch_size_per_rank, const MaybeTensor& sparse_features_recat,
         const Codecs& codecs) {
        return sharding::sequence_embeddings_alltoall(
            rows, lengths, input_splits, output_splits, features_per_rank, group,
            {{}, batch_size_per_rank, tensor_of(sparse_features_recat)}, codecs);
      },
      py::arg("rows"), py::arg("lengths"), py::arg("input_splits"), py::arg("output_splits"),
      py::arg("features_per_rank"), py::arg("group"), py::arg("batch_size_per_rank"),
      py::arg("sparse_features_recat"), py::arg("codecs"), Release());
  module.def("embeddings_all_to_one", &sharding::embeddings_all_to_one, Release());
  module.def("embeddings_all_to_one_reduce", &sharding::embeddings_all_to_one_reduce, Release());
}

}  // namespace

void bind_dist_data(py::module_& module) {
  py::module_ sub = module.def_submodule("dist_data", "Features to their tables, and rows back.");
  bind_pending<std::vector<Sizes>>(sub, "PendingSplits");
  bind_pending<ReceivedFeatures>(sub, "PendingFeatures");
  bind_pending<comm::Awaitable<ReceivedFeatures>>(sub, "PendingFeatureSplits");
  bind_pending<std::vector<comm::Awaitable<ReceivedFeatures>>>(sub, "PendingFusedSplits");
  bind_feature_exchanges(sub);
}

}  // namespace tessera::python
