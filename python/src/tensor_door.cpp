// Note [The door of the bindings]
//
// torch's conversion of a Python tensor hands over whatever stands for one: also a DTensor or a
// FakeTensor, whose own storage has no memory, and a kernel that reads it ends the process. All
// bindings of this module convert through one function of libtorch_python; the linker (--wrap, see
// CMakeLists.txt) leads those calls here first.

#include <pybind11/pybind11.h>

#include <torch/csrc/utils/pybind.h>

namespace tessera::python {

using Caster = pybind11::detail::type_caster<at::Tensor>;

bool torch_load(Caster* caster, pybind11::handle source, bool convert) __asm__(
    "__real__ZN8pybind116detail11type_casterIN2at6TensorEvE4loadENS_6handleEb");
bool checked_load(Caster* caster, pybind11::handle source, bool convert) __asm__(
    "__wrap__ZN8pybind116detail11type_casterIN2at6TensorEvE4loadENS_6handleEb");

namespace {

/// Whether there is nothing to read although there are elements.
bool lacks_memory(const at::Tensor& tensor) {
  if (!tensor.defined()) return false;
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->has_symbolic_sizes_strides()) return true;
  if (!impl->has_storage() || impl->numel() == 0) return false;
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  return storage->_mutable_data_ptr_no_checks().get() == nullptr;
}

}  // namespace

bool checked_load(Caster* caster, pybind11::handle source, bool convert) {
  if (!torch_load(caster, source, convert)) return false;
  if (!lacks_memory(static_cast<at::Tensor&>(*caster))) return true;
  // Waits for a result that is on its way; a TypeError that says what to pass, if nothing helps.
  const pybind11::object readable =
      pybind11::module_::import("tessera._tensors").attr("with_memory")(source);
  return torch_load(caster, readable, convert);
}

}  // namespace tessera::python
