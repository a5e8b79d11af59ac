// Only for a stock wheel, whose libtorch_cpu already holds the old schema.
// In a source checkout the schema is changed where it is defined.

#include <ATen/Version.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/version.h>

namespace {

constexpr auto kSchema =
    "_c10d_functional::wait_tensor(Tensor(a!) self) -> Tensor(a!)";

// The dispatcher has no public way to replace a schema. An explicit template
// instantiation may name a private member, so this reaches the entry itself.
template <auto operatorDef>
struct Reach {
  friend c10::impl::OperatorEntry& entry_of(const c10::OperatorHandle& op) {
    return (op.*operatorDef)->op;
  }
};
c10::impl::OperatorEntry& entry_of(const c10::OperatorHandle& op);
template struct Reach<&c10::OperatorHandle::operatorDef_>;

// What follows reaches into the dispatcher's memory, so the libtorch that is
// loaded must be the very build whose headers this was compiled against.
void check_torch() {
  const auto commit = std::string("COMMIT_SHA=") + WAIT_TENSOR_TORCH_COMMIT;
  TORCH_CHECK(
      at::show_config().find(commit) != std::string::npos,
      "libtorch_wait_tensor was compiled for torch ", TORCH_VERSION, " (commit ",
      WAIT_TENSOR_TORCH_COMMIT, "), but is loaded into another build: ",
      at::show_config(),
      "Build the patched torch again for this one, or reinstall stock torch.");
}

// The definition count stays as libtorch left it: its own RAII handle
// deregisters this schema at exit as it would have the old one.
void replace_schema() {
  check_torch();
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      "_c10d_functional::wait_tensor", "");
  auto& entry = entry_of(op);
  auto tags = entry.getTags();
  auto schema = torch::jit::parseSchema(kSchema);
  schema.setAliasAnalysis(c10::AliasAnalysisKind::FROM_SCHEMA);
  entry.deregisterSchema();
  entry.registerSchema(std::move(schema), "wait_tensor wheel shim", tags);
}

const bool replaced = (replace_schema(), true);

} // namespace
