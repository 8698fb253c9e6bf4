// Gives ATen's CUDA operations right values under the fake runtime. Each one is computed on the CPU first, on the same
// memory; then its real CUDA code runs (checks, allocations, launches that do nothing); then the values are written.
#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/op_registration/op_registration.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <unordered_map>
extern "C" void dry_card_use_stream(void*);
using at::Tensor;
using c10::IValue;
static std::unordered_map<std::string, c10::SafeKernelFunction>& originals() { static auto* m = new std::unordered_map<std::string, c10::SafeKernelFunction>; return *m; }
static std::string full(const c10::OperatorHandle& op) { const auto& s = op.schema(); return s.overload_name().empty() ? s.name() : s.name() + "." + s.overload_name(); }
static bool verbose() { static bool v = getenv("DRY_CARD_VERBOSE") && atoi(getenv("DRY_CARD_VERBOSE")); return v; }

static Tensor on_cpu(const Tensor& t) {  // the same memory as a CPU tensor
  if (!t.defined() || !t.is_cuda()) return t;
  auto options = t.options().device(at::kCPU).requires_grad(false);
  if (t.numel() == 0 || !t.has_storage() || t.storage().data() == nullptr) return at::empty_strided(t.sizes(), t.strides(), options);
  char* base = (char*)t.storage().data() + t.storage_offset() * t.itemsize();
  return at::from_blob(base, t.sizes(), t.strides(), [](void*) {}, options, at::kCPU);
}
static Tensor copy_of(const Tensor& t) { return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options()).copy_(t) : t; }
static IValue converted(const IValue& v, bool copies) {
  auto one = [&](const Tensor& t) { Tensor c = on_cpu(t); return copies && c.defined() && !(c.numel() == 0) ? copy_of(c) : c; };
  if (v.isTensor()) return one(v.toTensor());
  if (v.isTensorList()) { c10::List<Tensor> out; for (const Tensor& t : v.toTensorVector()) out.push_back(one(t)); return out; }
  if (v.isOptionalTensorList()) { c10::List<std::optional<Tensor>> out; for (const auto& t : v.toOptionalTensorVector()) out.push_back(t ? std::optional<Tensor>(one(*t)) : t); return out; }
  if (v.isDevice() && v.toDevice().is_cuda()) return IValue(c10::Device(at::kCPU));
  if (v.isGenerator()) return IValue();
  return v;
}
static Tensor to_cuda(const Tensor& t, c10::Device device) {
  Tensor out = at::empty_strided(t.sizes(), t.strides(), t.options().device(device)); if (t.numel()) on_cpu(out).copy_(t); return out;
}
static void write_back(const Tensor& to, const Tensor& from, const std::string& name) {
  if (!to.defined() || !from.defined() || !to.is_cuda()) return;
  TORCH_CHECK(to.sizes() == from.sizes(), "[dry_card] ", name, ": CUDA made ", to.sizes(), ", the CPU ", from.sizes());
  if (to.numel()) on_cpu(to).copy_(from);
}
static const std::set<std::string> DATA_DEPENDENT = {"aten::nonzero", "aten::nonzero_static", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::repeat_interleave", "aten::histc", "aten::randperm"};

static bool special(const c10::OperatorHandle& op, torch::jit::Stack* stack, Tensor& result) {  // no CPU kernel; values of the last result
  const auto& name = op.schema().name(); const auto& overload = op.schema().overload_name();
  if (name == "aten::mm" && overload.rfind("dtype", 0) == 0) { auto a = on_cpu((*stack)[stack->size() - op.schema().arguments().size()].toTensor()), b = on_cpu((*stack)[stack->size() - op.schema().arguments().size() + 1].toTensor()); result = at::mm(a.to(at::kFloat), b.to(at::kFloat)); return true; }
  if (name == "aten::addmm" && overload.rfind("dtype", 0) == 0) {
    size_t at = stack->size() - op.schema().arguments().size(); auto& s = *stack;
    double beta = 1, alpha = 1; for (size_t i = 0; i < op.schema().arguments().size(); i++) { if (op.schema().arguments()[i].name() == "beta") beta = s[at + i].toScalar().toDouble(); if (op.schema().arguments()[i].name() == "alpha") alpha = s[at + i].toScalar().toDouble(); }
    result = on_cpu(s[at].toTensor()).to(at::kFloat) * beta + at::mm(on_cpu(s[at + 1].toTensor()).to(at::kFloat), on_cpu(s[at + 2].toTensor()).to(at::kFloat)) * alpha; return true;
  }
  return false;
}
static void compute(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema(); const std::string name = full(op); const auto& original = originals().at(name);
  size_t n = schema.arguments().size(), at0 = stack->size() - n;
  c10::Device device(at::kCUDA, c10::cuda::current_device());
  for (size_t i = 0; i < n; i++) { const IValue& v = (*stack)[at0 + i]; if (v.isTensor() && v.toTensor().defined() && v.toTensor().is_cuda()) { device = v.toTensor().device(); break; } }
  dry_card_use_stream(c10::cuda::getCurrentCUDAStream(device.index()).stream());
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor given;
  if (special(op, stack, given)) {
    original.callBoxed(op, keys, stack); write_back(stack->back().toTensor(), given.to(stack->back().toTensor().scalar_type()), name); return;
  }
  torch::jit::Stack cpu; std::vector<std::pair<IValue, IValue>> written;
  for (size_t i = 0; i < n; i++) {
    const IValue& v = (*stack)[at0 + i]; const auto* alias = schema.arguments()[i].alias_info(); bool writes = alias && alias->isWrite();
    IValue c = converted(v, writes); if (writes) written.push_back({v, c});
    cpu.push_back(c);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &cpu);
  if (schema.name() == "aten::_fused_sdp_choice") { stack->resize(at0); stack->push_back(IValue((int64_t)0)); return; }  // the plain attention
  bool only_cpu = DATA_DEPENDENT.count(schema.name());
  if (!only_cpu) original.callBoxed(op, keys, stack); else stack->resize(at0);
  auto& results = schema.returns();
  for (size_t i = 0; i < results.size(); i++) {
    const IValue& c = cpu[cpu.size() - results.size() + i];
    if (only_cpu) { stack->push_back(c.isTensor() ? IValue(to_cuda(c.toTensor(), device)) : c); continue; }
    IValue& r = (*stack)[stack->size() - results.size() + i];
    if (results[i].alias_info()) continue;  // an argument; written below
    if (c.isTensor() && r.isTensor()) write_back(r.toTensor(), c.toTensor(), name);
    else if (c.isTensorList() && r.isTensorList()) { auto a = r.toTensorVector(), b = c.toTensorVector(); for (size_t k = 0; k < a.size(); k++) write_back(a[k], b[k], name); }
    else r = c;
  }
  for (auto& [to, from] : written) {
    if (to.isTensor()) write_back(to.toTensor(), from.toTensor(), name);
    else if (to.isTensorList()) { auto a = to.toTensorVector(), b = from.toTensorVector(); for (size_t k = 0; k < a.size(); k++) write_back(a[k], b[k], name); }
  }
}
static Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  bool whole = self.is_cuda() && src.is_cuda() && !(self.scalar_type() == src.scalar_type() && self.is_non_overlapping_and_dense() && self.sizes() == src.sizes() && self.strides() == src.strides() && !self.is_neg() && !src.is_neg());
  at::native::copy_(self, src, non_blocking);  // the real one; its memory copies are real
  if (whole && self.numel()) {
    dry_card_use_stream(c10::cuda::getCurrentCUDAStream(self.get_device()).stream());
    at::AutoDispatchBelowADInplaceOrView below; on_cpu(self).copy_(on_cpu(src));
  }
  return self;
}
static torch::Library* library = nullptr;
static int install() {
  static const std::set<std::string> LEFT = {"aten::resize_", "aten::set_", "aten::record_stream", "aten::_pin_memory", "aten::is_pinned", "aten::as_strided", "aten::view", "aten::unfold", "aten::_local_scalar_dense", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::copy_", "aten::empty", "aten::empty_strided", "aten::_efficientzerotensor", "aten::_fused_sdp_choice_", "aten::_cudnn_init_dropout_state"};
  library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton(); int made = 0, without = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || LEFT.count(name.name)) continue;
    auto op = dispatcher.findSchema(name); if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    const auto& schema = op->schema(); bool view = false;
    for (const auto& r : schema.returns()) view |= r.alias_info() && !r.alias_info()->isWrite();
    if (view) continue;
    bool known = (schema.name() == "aten::mm" || schema.name() == "aten::addmm") && schema.overload_name().rfind("dtype", 0) == 0;
    if (!known && !op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) { without++; if (verbose()) fprintf(stderr, "[dry_card] no CPU kernel: %s\n", full(*op).c_str()); continue; }
    originals().emplace(full(*op), op->getComputedKernelForDispatchKey(c10::DispatchKey::CUDA));
    library->impl(full(*op).c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>()); made++;
  }
  library->impl("copy_", TORCH_FN(copy_));
  if (verbose()) fprintf(stderr, "[dry_card] %d operations have values, %d have not\n", made, without);
  return made;
}
static int installed = install();
