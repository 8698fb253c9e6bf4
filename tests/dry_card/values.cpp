// Right values for torch's CUDA operations. A library that is loaded into torch wraps each of them.
//
// The operation runs on the CPU, on the same memory. Then its real CUDA code runs: checks, allocations, launches that
// do nothing. Then the CPU's results are written over the CUDA results. Not shown: errors of CUDA kernels, rounding.
#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>
#include <set>

extern "C" void dry_card_use_stream(void*);
extern "C" void dry_card_note(const char*);
using at::Tensor;
using c10::IValue;

// These operations compute nothing, or they copy memory, which is real.
static const std::set<std::string> LEFT = {
    "aten::resize_", "aten::set_", "aten::empty", "aten::empty_strided", "aten::_efficientzerotensor",
    "aten::_local_scalar_dense", "aten::_fused_sdp_choice"};

// ---- Conversions
static Tensor on_cpu(const Tensor& t) {  // the same memory as a CPU tensor
  if (!t.defined() || !t.is_cuda()) return t;
  auto options = t.options().device(at::kCPU).requires_grad(false);
  bool empty = !t.numel() || !t.has_storage() || !t.storage().data();
  if (empty) return at::empty_strided(t.sizes(), t.strides(), options);
  char* start = (char*)t.storage().data() + t.storage_offset() * t.itemsize();
  return at::from_blob(start, t.sizes(), t.strides(), [](void*) {}, options, at::kCPU);
}
static IValue for_cpu(const IValue& v, bool written) {  // an argument; one that is written is copied
  auto one = [&](const Tensor& t) {
    Tensor c = on_cpu(t);
    return written && c.defined() && c.numel() ? at::empty_strided(c.sizes(), c.strides(), c.options()).copy_(c) : c;
  };
  if (v.isTensor()) return one(v.toTensor());
  if (v.isTensorList()) return c10::fmap(v.toTensorVector(), one);
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const auto& t : v.toOptionalTensorVector()) out.push_back(t ? std::optional<Tensor>(one(*t)) : t);
    return out;
  }
  if (v.isDevice() && v.toDevice().is_cuda()) return c10::Device(at::kCPU);
  return v.isGenerator() ? IValue() : v;  // a generator of a card has no CPU form
}
static void write(const Tensor& to, const Tensor& from, const std::string& name) {
  if (!to.defined() || !from.defined() || !to.is_cuda()) return;
  TORCH_CHECK(to.sizes() == from.sizes(), "[dry_card] ", name, ": CUDA made ", to.sizes(), ", the CPU ", from.sizes());
  if (to.numel()) on_cpu(to).copy_(from);
}
static void write(const IValue& to, const IValue& from, const std::string& name) {
  if (to.isTensor() && from.isTensor()) write(to.toTensor(), from.toTensor(), name);
  if (!to.isTensorList() || !from.isTensorList()) return;
  auto a = to.toTensorVector(), b = from.toTensorVector();
  for (size_t i = 0; i < a.size(); i++) write(a[i], b[i], name);
}
static Tensor to_cuda(const Tensor& t, c10::Device device) {
  Tensor out = at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
  return write(out, t, "a result"), out;
}

// ---- The wrapper of all operations
static auto& originals = *new std::unordered_map<std::string, c10::SafeKernelFunction>;
static std::string full_name(const c10::OperatorHandle& op) { return c10::toString(op.operator_name()); }
static void compute(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = full_name(op);
  const auto& original = originals.at(name);
  auto arguments = at::ArrayRef<IValue>(*stack).slice(stack->size() - schema.arguments().size()).vec();
  c10::Device device(at::kCUDA, c10::cuda::current_device());
  for (const IValue& v : arguments) {
    if (v.isTensor() && v.toTensor().defined() && v.toTensor().is_cuda()) device = v.toTensor().device();
  }
  dry_card_use_stream(c10::cuda::getCurrentCUDAStream(device.index()).stream());
  at::AutoDispatchBelowADInplaceOrView below;
  torch::jit::Stack results;  // of the CPU
  std::vector<std::pair<IValue, IValue>> written;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    results.push_back(for_cpu(arguments[i], alias && alias->isWrite()));
    if (alias && alias->isWrite()) written.emplace_back(arguments[i], results.back());
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);
  auto values = torch::jit::last(results, schema.returns().size());
  if (op.hasTag(at::Tag::dynamic_output_shape)) {  // the CUDA code would take the shape from values on the card
    torch::jit::drop(*stack, arguments.size());
    for (const IValue& v : values) stack->push_back(v.isTensor() ? IValue(to_cuda(v.toTensor(), device)) : v);
  } else {
    original.callBoxed(op, keys, stack);
    for (size_t i = 0; i < values.size(); i++) {
      IValue& result = (*stack)[stack->size() - values.size() + i];
      if (schema.returns()[i].alias_info()) continue;  // it is an argument
      if (result.isTensor() || result.isTensorList()) write(result, values[i], name);
      else result = values[i];
    }
  }
  for (auto& [to, from] : written) write(to, from, name);
}
static Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  bool memory_copy = to.scalar_type() == from.scalar_type() && to.is_non_overlapping_and_dense() &&
                     to.sizes() == from.sizes() && to.strides() == from.strides() && !to.is_neg() && !from.is_neg();
  at::native::copy_(to, from, non_blocking);  // between devices its last part is a memory copy
  if (!to.is_cuda() || !from.is_cuda() || memory_copy || !to.numel()) return to;
  dry_card_use_stream(c10::cuda::getCurrentCUDAStream(to.get_device()).stream());
  at::AutoDispatchBelowADInplaceOrView below;
  return on_cpu(to).copy_(on_cpu(from)), to;
}

// ---- Installation, when the library is loaded
struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}  // torch warns of an operation that is registered twice
};
static int installed = [] {
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findSchema(name);
    bool wanted = name.name.rfind("aten::", 0) == 0 && !LEFT.count(name.name) && op;
    if (!wanted || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    bool view = false;
    for (const auto& r : op->schema().returns()) view |= r.alias_info() && !r.alias_info()->isWrite();
    bool on_cpu = op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
    if (!view && !on_cpu) dry_card_note((full_name(*op) + " has no CPU kernel, so no values").c_str());
    if (view || !on_cpu) continue;
    originals.emplace(full_name(*op), op->getComputedKernelForDispatchKey(c10::DispatchKey::CUDA));
    library->impl(full_name(*op).c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>());
  }
  library->impl("copy_", TORCH_FN(copy_));
  return 1;
}();
