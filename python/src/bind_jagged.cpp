#include <variant>

#include "arguments.h"
#include "bindings.h"
#include "tessera/jagged/keyed_jagged_tensor.h"
#include "tessera/jagged/keyed_tensor.h"
#include "tessera/jagged/operators.h"
#include "tessera/jagged/validate.h"

namespace tessera::python {
namespace {

using at::Tensor;
using jagged::InverseIndices;
using jagged::JaggedTensor;
using jagged::KeyedJaggedFields;
using jagged::KeyedJaggedTensor;
using jagged::KeyedTensor;
using Integers = std::vector<std::int64_t>;
using Strides = std::optional<std::variant<Tensor, std::vector<Integers>>>;

// torch takes devices by name too.
using DeviceName = std::variant<std::string, at::Device>;

at::Device device_of(const DeviceName& device) {
  const auto* name = std::get_if<std::string>(&device);
  return name != nullptr ? at::Device(*name) : std::get<at::Device>(device);
}

at::TensorOptions options_of(const std::optional<DeviceName>& device,
                             std::optional<at::ScalarType> type) {
  return at::TensorOptions()
      .device(device ? device_of(*device) : at::Device(at::kCPU))
      .dtype(type.value_or(at::kFloat));
}

// Strides as the reference takes them: a matrix, or a list of rows.
Tensor matrix_of(const Strides& strides) {
  if (!strides) return {};
  if (const auto* matrix = std::get_if<Tensor>(&*strides)) return *matrix;
  const auto& rows = std::get<std::vector<Integers>>(*strides);
  std::vector<Tensor> parts;
  parts.reserve(rows.size());
  for (const auto& row : rows) parts.push_back(at::tensor(row, at::TensorOptions(at::kLong)));
  return parts.empty() ? at::zeros({0, 1}, at::kLong) : at::stack(parts);
}

std::vector<Integers> rows_of(const Tensor& matrix) {
  std::vector<Integers> rows;
  for (std::int64_t i = 0; matrix.defined() && i < matrix.size(0); ++i) {
    const auto* begin = matrix.const_data_ptr<std::int64_t>() + i * matrix.size(1);
    rows.emplace_back(begin, begin + matrix.size(1));
  }
  return rows;
}

KeyedJaggedFields fields_of(const MaybeTensor& weights, std::optional<std::int64_t> stride,
                            const Strides& strides,
                            const std::optional<InverseIndices>& inverse_indices) {
  KeyedJaggedFields fields;
  fields.weights = tensor_of(weights);
  fields.stride = stride;
  fields.stride_per_key_per_rank = matrix_of(strides);
  fields.inverse_indices = inverse_indices;
  return fields;
}

template <class Keyed>
void check_key(const Keyed& keyed, const std::string& key) {
  if (!keyed.has_key(key)) throw py::key_error(key);
}

void bind_jagged_tensor(py::module_& module) {
  py::class_<JaggedTensor>(
      module, "JaggedTensor",
      "Hold one feature of a batch: values, bag after bag, and the length of each bag.\n\n"
      "Lengths, offsets or both are given (int32 or int64); `weights`, if any, has one entry per\n"
      "value.\n\n"
      ">>> import torch\n"
      ">>> jt = JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1]))\n"
      ">>> jt.offsets().tolist()\n"
      "[0, 2, 2, 3]\n"
      ">>> jt.to_padded_dense(desired_length=2).tolist()\n"
      "[[1, 2], [0, 0], [3, 0]]\n")
      .def(py::init([](const Tensor& values, const MaybeTensor& weights, const MaybeTensor& lengths,
                       const MaybeTensor& offsets) {
             return JaggedTensor(values, tensor_of(weights), tensor_of(lengths),
                                 tensor_of(offsets));
           }),
           py::arg("values"), py::arg("weights") = py::none(), py::arg("lengths") = py::none(),
           py::arg("offsets") = py::none())
      .def_static(
          "empty",
          [](bool is_weighted, const std::optional<DeviceName>& device,
             std::optional<at::ScalarType> values_dtype,
             std::optional<at::ScalarType> weights_dtype, at::ScalarType lengths_dtype) {
            return JaggedTensor::empty(is_weighted, options_of(device, values_dtype),
                                       weights_dtype.value_or(at::kFloat), lengths_dtype);
          },
          py::arg("is_weighted") = false, py::arg("device") = py::none(),
          py::arg("values_dtype") = py::none(), py::arg("weights_dtype") = py::none(),
          py::arg("lengths_dtype") = at::kInt)
      .def_static(
          "empty_like",
          [](const JaggedTensor& jt) {
            const Tensor& weights = jt.weights_or_none();
            const Tensor& sizes =
                jt.lengths_or_none().defined() ? jt.lengths_or_none() : jt.offsets_or_none();
            return JaggedTensor::empty(weights.defined(), jt.values().options(),
                                       weights.defined() ? weights.scalar_type() : at::kFloat,
                                       sizes.scalar_type());
          },
          py::arg("jt"))
      .def_static(
          "from_dense",
          [](const std::vector<Tensor>& values, const std::optional<std::vector<Tensor>>& weights) {
            return JaggedTensor::from_dense(values, weights.value_or(std::vector<Tensor>()));
          },
          py::arg("values"), py::arg("weights") = py::none())
      .def_static(
          "from_dense_lengths",
          [](const Tensor& values, const Tensor& lengths, const MaybeTensor& weights) {
            return JaggedTensor::from_dense_lengths(values, lengths, tensor_of(weights));
          },
          py::arg("values"), py::arg("lengths"), py::arg("weights") = py::none())
      .def("values", &JaggedTensor::values)
      .def("weights", &JaggedTensor::weights)
      .def("weights_or_none", &JaggedTensor::weights_or_none)
      .def("lengths", &JaggedTensor::lengths)
      .def("lengths_or_none", &JaggedTensor::lengths_or_none)
      .def("offsets", &JaggedTensor::offsets)
      .def("offsets_or_none", &JaggedTensor::offsets_or_none)
      .def("device", &JaggedTensor::device)
      .def("size_in_bytes", &JaggedTensor::size_in_bytes)
      .def("to_dense", &JaggedTensor::to_dense)
      .def("to_dense_weights",
           [](const JaggedTensor& self) {
             using Parts = std::optional<std::vector<Tensor>>;
             return self.weights_or_none().defined() ? Parts(self.to_dense_weights()) : Parts();
           })
      .def("to_padded_dense", &JaggedTensor::to_padded_dense,
           py::arg("desired_length") = py::none(), py::arg("padding_value") = 0.0)
      .def(
          "to_padded_dense_weights",
          [](const JaggedTensor& self, std::optional<std::int64_t> desired_length,
             double padding_value) {
            return self.weights_or_none().defined()
                       ? self.to_padded_dense_weights(desired_length, padding_value)
                       : Tensor();
          },
          py::arg("desired_length") = py::none(), py::arg("padding_value") = 0.0)
      .def(
          "to",
          [](const JaggedTensor& self, const DeviceName& device, bool non_blocking) {
            return self.to(device_of(device), non_blocking);
          },
          py::arg("device"), py::arg("non_blocking") = false)
      .def("pin_memory", &JaggedTensor::pin_memory)
      .def("record_stream", &JaggedTensor::record_stream, py::arg("stream"))
      .def("__str__", &JaggedTensor::str)
      .def("__repr__", &JaggedTensor::str)
      .def(py::pickle(
          [](const JaggedTensor& self) {
            return py::make_tuple(self.values(), self.weights_or_none(), self.lengths_or_none(),
                                  self.offsets_or_none());
          },
          [](const py::tuple& state) {
            return JaggedTensor(state[0].cast<Tensor>(), tensor_of(state[1].cast<MaybeTensor>()),
                                tensor_of(state[2].cast<MaybeTensor>()),
                                tensor_of(state[3].cast<MaybeTensor>()));
          }));
  module.def("jt_is_equal", &jagged::jt_is_equal);
}

void bind_keyed_jagged_construction(py::class_<KeyedJaggedTensor>& type) {
  type.def(py::init([](std::vector<std::string> keys, const Tensor& values,
                       const MaybeTensor& weights, const MaybeTensor& lengths,
                       const MaybeTensor& offsets, std::optional<std::int64_t> stride,
                       const Strides& strides, const py::object&,
                       const std::optional<Integers>& length_per_key, const py::object&,
                       const py::object&, const py::object&, const py::object&,
                       const std::optional<InverseIndices>& inverse_indices) {
             KeyedJaggedFields fields = fields_of(weights, stride, strides, inverse_indices);
             fields.lengths = tensor_of(lengths);
             fields.offsets = tensor_of(offsets);
             fields.length_per_key = length_per_key;
             return KeyedJaggedTensor(std::move(keys), values, std::move(fields));
           }),
           py::arg("keys"), py::arg("values"), py::arg("weights") = py::none(),
           py::arg("lengths") = py::none(), py::arg("offsets") = py::none(),
           py::arg("stride") = py::none(), py::arg("stride_per_key_per_rank") = py::none(),
           py::arg("stride_per_key") = py::none(), py::arg("length_per_key") = py::none(),
           py::arg("lengths_offset_per_key") = py::none(), py::arg("offset_per_key") = py::none(),
           py::arg("index_per_key") = py::none(), py::arg("jt_dict") = py::none(),
           py::arg("inverse_indices") = py::none())
      .def_static(
          "from_lengths_sync",
          [](std::vector<std::string> keys, const Tensor& values, const Tensor& lengths,
             const MaybeTensor& weights, std::optional<std::int64_t> stride, const Strides& strides,
             const std::optional<InverseIndices>& inverse_indices) {
            return KeyedJaggedTensor::from_lengths_sync(
                std::move(keys), values, lengths,
                fields_of(weights, stride, strides, inverse_indices));
          },
          py::arg("keys"), py::arg("values"), py::arg("lengths"), py::arg("weights") = py::none(),
          py::arg("stride") = py::none(), py::arg("stride_per_key_per_rank") = py::none(),
          py::arg("inverse_indices") = py::none())
      .def_static(
          "from_offsets_sync",
          [](std::vector<std::string> keys, const Tensor& values, const Tensor& offsets,
             const MaybeTensor& weights, std::optional<std::int64_t> stride, const Strides& strides,
             const std::optional<InverseIndices>& inverse_indices) {
            return KeyedJaggedTensor::from_offsets_sync(
                std::move(keys), values, offsets,
                fields_of(weights, stride, strides, inverse_indices));
          },
          py::arg("keys"), py::arg("values"), py::arg("offsets"), py::arg("weights") = py::none(),
          py::arg("stride") = py::none(), py::arg("stride_per_key_per_rank") = py::none(),
          py::arg("inverse_indices") = py::none())
      .def_static(
          "from_jt_dict",
          [](const py::dict& jt_dict) {
            std::vector<std::pair<std::string, JaggedTensor>> features;
            for (const auto& [key, feature] : jt_dict) {
              features.emplace_back(key.cast<std::string>(), feature.cast<JaggedTensor>());
            }
            return KeyedJaggedTensor::from_jt_dict(features);
          },
          py::arg("jt_dict"))
      .def_static("concat", &KeyedJaggedTensor::concat, py::arg("kjt_list"))
      .def_static(
          "empty",
          [](bool is_weighted, const std::optional<DeviceName>& device,
             std::optional<at::ScalarType> values_dtype,
             std::optional<at::ScalarType> weights_dtype, at::ScalarType lengths_dtype) {
            return KeyedJaggedTensor::empty(is_weighted, options_of(device, values_dtype),
                                            weights_dtype.value_or(at::kFloat), lengths_dtype);
          },
          py::arg("is_weighted") = false, py::arg("device") = py::none(),
          py::arg("values_dtype") = py::none(), py::arg("weights_dtype") = py::none(),
          py::arg("lengths_dtype") = at::kInt)
      .def_static("empty_like", &KeyedJaggedTensor::empty_like, py::arg("kjt"))
      .def_static(
          "dist_init",
          [](std::vector<std::string> keys, const std::vector<Tensor>& tensors,
             bool variable_stride_per_key, int num_workers, const MaybeTensor& recat,
             const std::optional<Integers>& stride_per_rank, int stagger) {
            return KeyedJaggedTensor::dist_init(
                std::move(keys), tensors,
                {.variable_stride_per_key = variable_stride_per_key,
                 .num_workers = num_workers,
                 .recat = tensor_of(recat),
                 .stride_per_rank = stride_per_rank.value_or(Integers()),
                 .stagger = stagger});
          },
          py::arg("keys"), py::arg("tensors"), py::arg("variable_stride_per_key"),
          py::arg("num_workers"), py::arg("recat"), py::arg("stride_per_rank"),
          py::arg("stagger") = 1);
}

void bind_keyed_jagged_parts(py::class_<KeyedJaggedTensor>& type) {
  type.def("keys", &KeyedJaggedTensor::keys)
      .def("values", &KeyedJaggedTensor::values)
      .def("weights", &KeyedJaggedTensor::weights)
      .def("weights_or_none", &KeyedJaggedTensor::weights_or_none)
      .def("lengths", &KeyedJaggedTensor::lengths)
      .def("lengths_or_none", &KeyedJaggedTensor::lengths_or_none)
      .def("offsets", &KeyedJaggedTensor::offsets)
      .def("offsets_or_none", &KeyedJaggedTensor::offsets_or_none)
      .def("device", &KeyedJaggedTensor::device)
      .def("size_in_bytes", &KeyedJaggedTensor::size_in_bytes)
      .def("stride", &KeyedJaggedTensor::stride)
      .def("stride_per_key", &KeyedJaggedTensor::stride_per_key)
      .def("stride_per_key_per_rank",
           [](const KeyedJaggedTensor& self) { return rows_of(self.stride_per_key_per_rank()); })
      .def("variable_stride_per_key", &KeyedJaggedTensor::variable_stride_per_key)
      .def("inverse_indices", &KeyedJaggedTensor::inverse_indices)
      .def("inverse_indices_or_none", &KeyedJaggedTensor::inverse_indices_or_none)
      .def("length_per_key", &KeyedJaggedTensor::length_per_key)
      .def("length_per_key_or_none",
           [](const KeyedJaggedTensor& self) {
             return self.is_synced() ? std::optional<Integers>(self.length_per_key())
                                     : std::nullopt;
           })
      .def("offset_per_key", &KeyedJaggedTensor::offset_per_key)
      .def("offset_per_key_or_none",
           [](const KeyedJaggedTensor& self) {
             return self.is_synced() ? std::optional<Integers>(self.offset_per_key())
                                     : std::nullopt;
           })
      .def("lengths_offset_per_key", &KeyedJaggedTensor::lengths_offset_per_key)
      .def("index_per_key",
           [](const KeyedJaggedTensor& self) {
             std::map<std::string, std::size_t> places;
             for (const auto& key : self.keys()) places[key] = self.index_of(key);
             return places;
           })
      .def("sync",
           [](const py::object& self) {
             self.cast<const KeyedJaggedTensor&>().sync();
             return self;
           })
      .def("unsync",
           [](const py::object& self) {
             self.cast<const KeyedJaggedTensor&>().unsync();
             return self;
           })
      .def("__getitem__",
           [](const KeyedJaggedTensor& self, const std::string& key) {
             check_key(self, key);
             return self[key];
           })
      .def(
          "to_dict",
          [](const KeyedJaggedTensor& self, bool) {
            py::dict features;
            for (auto& [key, feature] : self.to_dict()) {
              features[py::str(key)] = py::cast(std::move(feature));
            }
            return features;
          },
          py::arg("compute_offsets") = true)
      .def(
          "split",
          [](const py::object& self, const Integers& segments) {
            const auto& whole = self.cast<const KeyedJaggedTensor&>();
            py::list parts;
            for (auto& part : whole.split(segments)) {
              parts.append(part.is_same(whole) ? self : py::cast(std::move(part)));
            }
            return parts;
          },
          py::arg("segments"))
      .def(
          "permute",
          [](const KeyedJaggedTensor& self, const Integers& indices, const MaybeTensor&) {
            return self.permute(indices);
          },
          py::arg("indices"), py::arg("indices_tensor") = py::none())
      .def("flatten_lengths", &KeyedJaggedTensor::flatten_lengths)
      .def("with_weights",
           [](const KeyedJaggedTensor& self, const MaybeTensor& weights) {
             return self.with_weights(tensor_of(weights));
           })
      .def(
          "to",
          [](const KeyedJaggedTensor& self, const DeviceName& device, bool non_blocking,
             std::optional<at::ScalarType> dtype) {
            return self.to(device_of(device), non_blocking, dtype);
          },
          py::arg("device"), py::arg("non_blocking") = false, py::arg("dtype") = py::none())
      .def("pin_memory", &KeyedJaggedTensor::pin_memory)
      .def("record_stream", &KeyedJaggedTensor::record_stream, py::arg("stream"))
      .def("dist_labels", &KeyedJaggedTensor::dist_labels)
      .def("dist_splits", &KeyedJaggedTensor::dist_splits, py::arg("key_splits"))
      .def("dist_tensors", &KeyedJaggedTensor::dist_tensors)
      .def("__str__", &KeyedJaggedTensor::str)
      .def("__repr__", &KeyedJaggedTensor::str)
      .def(py::pickle(
          [](const KeyedJaggedTensor& self) {
            return py::make_tuple(self.keys(), self.values(), self.weights_or_none(),
                                  self.lengths_or_none(), self.offsets_or_none(), self.stride(),
                                  self.stride_per_key_per_rank(), self.inverse_indices_or_none());
          },
          [](const py::tuple& state) {
            KeyedJaggedFields fields;
            fields.weights = tensor_of(state[2].cast<MaybeTensor>());
            fields.lengths = tensor_of(state[3].cast<MaybeTensor>());
            fields.offsets = tensor_of(state[4].cast<MaybeTensor>());
            fields.stride = state[5].cast<std::int64_t>();
            fields.stride_per_key_per_rank = tensor_of(state[6].cast<MaybeTensor>());
            fields.inverse_indices = state[7].cast<std::optional<InverseIndices>>();
            return KeyedJaggedTensor(state[0].cast<std::vector<std::string>>(),
                                     state[1].cast<Tensor>(), std::move(fields));
          }));
}

void bind_keyed_tensor(py::module_& module) {
  py::class_<KeyedTensor>(
      module, "KeyedTensor",
      "Hold dense columns side by side and find them by name.\n\n"
      ">>> import torch\n"
      ">>> kt = KeyedTensor(['a', 'b'], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))\n"
      ">>> kt['b'].tolist()\n"
      "[[2.0, 3.0]]\n")
      .def(py::init([](std::vector<std::string> keys, Integers length_per_key, const Tensor& values,
                       std::int64_t key_dim, const py::object&, const py::object&) {
             return KeyedTensor(std::move(keys), std::move(length_per_key), values, key_dim);
           }),
           py::arg("keys"), py::arg("length_per_key"), py::arg("values"), py::arg("key_dim") = 1,
           py::arg("offset_per_key") = py::none(), py::arg("index_per_key") = py::none())
      .def_static("from_tensor_list", &KeyedTensor::from_tensor_list, py::arg("keys"),
                  py::arg("tensors"), py::arg("key_dim") = 1, py::arg("cat_dim") = 1)
      .def_static("regroup", &KeyedTensor::regroup, py::arg("keyed_tensors"), py::arg("groups"))
      .def("keys", &KeyedTensor::keys)
      .def("values", &KeyedTensor::values)
      .def("key_dim", &KeyedTensor::key_dim)
      .def("device", &KeyedTensor::device)
      .def("length_per_key", &KeyedTensor::length_per_key)
      .def("offset_per_key", &KeyedTensor::offset_per_key)
      .def("size_in_bytes", &KeyedTensor::size_in_bytes)
      .def("__getitem__",
           [](const KeyedTensor& self, const std::string& key) {
             check_key(self, key);
             return self[key];
           })
      .def("to_dict",
           [](const KeyedTensor& self) {
             py::dict columns;
             for (const auto& key : self.keys()) columns[py::str(key)] = py::cast(self[key]);
             return columns;
           })
      .def(
          "to",
          [](const KeyedTensor& self, const DeviceName& device, bool non_blocking) {
            return self.to(device_of(device), non_blocking);
          },
          py::arg("device"), py::arg("non_blocking") = false)
      .def("record_stream", &KeyedTensor::record_stream, py::arg("stream"))
      .def("__str__", &KeyedTensor::str)
      .def("__repr__", &KeyedTensor::str)
      .def(py::pickle(
          [](const KeyedTensor& self) {
            return py::make_tuple(self.keys(), self.length_per_key(), self.values(),
                                  self.key_dim());
          },
          [](const py::tuple& state) {
            return KeyedTensor(state[0].cast<std::vector<std::string>>(), state[1].cast<Integers>(),
                               state[2].cast<Tensor>(), state[3].cast<std::int64_t>());
          }));
}

void bind_operators(py::module_& module) {
  const auto parts = [](const jagged::JaggedParts& moved) {
    return py::make_tuple(moved.lengths, moved.values, moved.weights);
  };
  module.def("lengths_to_offsets", &jagged::lengths_to_offsets);
  module.def("offsets_to_lengths", &jagged::offsets_to_lengths);
  module.def("offsets_range", &jagged::offsets_range);
  module.def("permute_1d", [parts](const Tensor& order, const Tensor& lengths, const Tensor& values,
                                   const MaybeTensor& weights) {
    return parts(jagged::permute_1d(order, lengths, values, tensor_of(weights)));
  });
  module.def("permute_2d", [parts](const Tensor& order, const Tensor& lengths, const Tensor& values,
                                   const MaybeTensor& weights) {
    return parts(jagged::permute_2d(order, lengths, values, tensor_of(weights)));
  });
  module.def(
      "bucketize",
      [](const Tensor& lengths, const Tensor& values, const MaybeTensor& weights,
         std::int64_t num_buckets, const Integers& bags_per_feature, const Integers& block_sizes,
         const std::vector<Integers>& block_starts, bool positions, bool unbucketize) {
        const auto spread = jagged::bucketize(lengths, values, tensor_of(weights),
                                              {.num_buckets = num_buckets,
                                               .bags_per_feature = bags_per_feature,
                                               .block_sizes = block_sizes,
                                               .block_starts = block_starts,
                                               .positions = positions,
                                               .unbucketize = unbucketize});
        return py::make_tuple(spread.lengths, spread.values, spread.weights, spread.positions,
                              spread.unbucketize_permute);
      },
      py::arg("lengths"), py::arg("values"), py::arg("weights"), py::arg("num_buckets"),
      py::arg("bags_per_feature"), py::arg("block_sizes"), py::arg("block_starts"),
      py::arg("positions"), py::arg("unbucketize"));
  module.def("unique_ids",
             [](const Tensor& lengths, const Tensor& values, const Integers& bags_per_space) {
               const auto unique = jagged::unique_ids(lengths, values, bags_per_space);
               return py::make_tuple(unique.ids, unique.lengths, unique.reverse_index);
             });
  module.def("jagged_to_padded_dense", &jagged::jagged_to_padded_dense);
  module.def("padded_dense_to_jagged", &jagged::padded_dense_to_jagged);
  module.def("validate", &jagged::validate, Release());
}

}  // namespace

void bind_jagged(py::module_& module) {
  py::module_ sub = module.def_submodule("jagged", "Bags of different lengths.");
  bind_jagged_tensor(sub);
  py::class_<KeyedJaggedTensor> keyed(
      sub, "KeyedJaggedTensor",
      "Hold the sparse half of a batch: many features, each with a bag of ids per sample.\n\n"
      "Values lie key by key, in a key sample by sample. Strides, lengths per key and the like "
      "are\n"
      "computed when they are asked for; arguments that carry them are accepted and not read,\n"
      "except `length_per_key`.\n\n"
      ">>> import torch\n"
      ">>> kjt = KeyedJaggedTensor.from_lengths_sync(\n"
      "...     ['a', 'b'], torch.tensor([1, 2, 3]), torch.tensor([2, 0, 0, 1]))\n"
      ">>> kjt.stride(), kjt.length_per_key()\n"
      "(2, [2, 1])\n"
      ">>> kjt['b'].values().tolist()\n"
      "[3]\n"
      ">>> kjt.permute([1, 0]).keys()\n"
      "['b', 'a']\n");
  bind_keyed_jagged_construction(keyed);
  bind_keyed_jagged_parts(keyed);
  sub.def("kjt_is_equal", &jagged::kjt_is_equal);
  bind_keyed_tensor(sub);
  bind_operators(sub);
}

}  // namespace tessera::python
