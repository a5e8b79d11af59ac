// Waits as third-party C++ does, written against stock torch.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

namespace {

auto find() {
  return c10::Dispatcher::singleton().findSchemaOrThrow("_c10d_functional::wait_tensor", "");
}

at::Tensor typed(const at::Tensor& t) {
  static auto op = find().typed<at::Tensor(const at::Tensor&)>();
  return op.call(t);
}

at::Tensor boxed(const at::Tensor& t) {
  torch::jit::Stack stack{t};
  find().callBoxed(stack);
  return stack.at(0).toTensor();
}

at::Tensor direct(const at::Tensor& t) {
  return c10d::wait_tensor(t);
}

} // namespace

TORCH_LIBRARY(wait_tensor_extension, m) {
  m.def("typed(Tensor t) -> Tensor", torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, typed));
  m.def("boxed(Tensor t) -> Tensor", torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, boxed));
  m.def("direct(Tensor t) -> Tensor", torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, direct));
}
