// wait_tensor mutates; _wait_tensor_functional is what functionalization emits.
//
// Waiting never changes what a correct program reads, only when it may be read.
// So the mutation is one of order: the dispatcher must see it, autograd must not.
// A Work is registered for a storage, hence both kernels speak of whole storages.

#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

namespace c10d {
namespace {

// Waits, then returns a fresh tensor of the same geometry. The geometry (not
// only the sizes) is kept because the reinplaced wait returns the input itself:
// strides, gaps and overlaps that a trace saw here must be those it gets there.
at::Tensor wait_tensor_functional(const at::Tensor& self) {
  wait_tensor(self);
  if (self.is_non_overlapping_and_dense() && self.storage_offset() == 0) {
    return self.clone(at::MemoryFormat::Preserve);
  }
  int64_t extent = self.numel() == 0 ? 0 : 1;
  for (int64_t dim = 0; extent != 0 && dim < self.dim(); ++dim) {
    extent += (self.size(dim) - 1) * self.stride(dim);
  }
  const auto offset = self.storage_offset();
  auto memory = at::empty_strided({offset + extent}, {1}, self.options());
  memory.narrow(0, offset, extent)
      .copy_(self.as_strided({extent}, {1}, offset));
  return memory.as_strided(self.sizes(), self.strides(), offset);
}

// Replaces the storage's base rather than the waited view, so that a wait on a
// slice is one wait and replayed views, not a wait and a slice_scatter.
at::Tensor wait_tensor_functionalize(const at::Tensor& self) {
  namespace impl = at::functionalization::impl;
  if (!impl::isFunctionalTensor(self)) {
    at::AutoDispatchSkipFunctionalize guard;
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                               .typed<at::Tensor(const at::Tensor&)>();
    return op.call(self);
  }

  impl::sync(self);
  auto* wrapper = impl::unsafeGetFunctionalWrapper(self);
  auto* storage = static_cast<at::functionalization::FunctionalStorageImpl*>(
      wrapper->storage().unsafeGetStorageImpl());
  storage->apply_updates();
  at::Tensor waited;
  {
    at::AutoDispatchSkipFunctionalize guard;
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("_c10d_functional::_wait_tensor_functional", "")
                               .typed<at::Tensor(const at::Tensor&)>();
    waited = op.call(storage->base());
  }
  // Later reads are redirected, but nothing is counted as a mutation: nobody needs
  // to be told of it, or given the waited value back, since the functional wait
  // has waited for the storage itself.
  storage->add_update(waited, {});
  impl::sync(self);
  return self;
}

struct WaitTensorBackward : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    return std::move(grads);
  }
};

// The input's own history is the result's, since they are one tensor. Where they are
// two, something below put another in its place: a functorch level wraps anew what
// an in-place op returns, and its caller goes on with the tensor that it passed; a
// mode or a subclass means what it returned, and gradients flow through that.
at::Tensor wait_tensor_autograd(c10::DispatchKeySet keys, const at::Tensor& self) {
  at::Tensor waited;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                               .typed<at::Tensor(const at::Tensor&)>();
    waited = op.redispatch(keys & c10::after_autograd_keyset, self);
  }
  if (waited.is_same(self) || self.key_set().has(c10::DispatchKey::FuncTorchGradWrapper)) {
    return self;
  }
  if (torch::autograd::compute_requires_grad(self) && !waited.requires_grad()) {
    auto node = c10::make_intrusive<WaitTensorBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(self));
    torch::autograd::set_history(waited, node);
  }
  return waited;
}

} // namespace
} // namespace c10d

TORCH_LIBRARY_FRAGMENT(_c10d_functional, m) {
  m.def(
      "_wait_tensor_functional(Tensor self) -> Tensor",
      torch::dispatch(
          c10::DispatchKey::CompositeExplicitAutograd,
          c10d::wait_tensor_functional),
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(_c10d_functional, Functionalize, m) {
  m.impl("wait_tensor", c10d::wait_tensor_functionalize);
}

TORCH_LIBRARY_IMPL(_c10d_functional, Autograd, m) {
  m.impl("wait_tensor", c10d::wait_tensor_autograd);
}

// The fallbacks of these keys hand an op a materialized copy. That would be read
// in flight, and no Work is registered for it.
TORCH_LIBRARY_IMPL(_c10d_functional, Conjugate, m) {
  m.impl("wait_tensor", torch::CppFunction::makeFallthrough());
  m.impl("_wait_tensor_functional", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_c10d_functional, Negative, m) {
  m.impl("wait_tensor", torch::CppFunction::makeFallthrough());
  m.impl("_wait_tensor_functional", torch::CppFunction::makeFallthrough());
}
