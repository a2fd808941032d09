// Computes every CUDA operator of ATen by the CPU's operator on the same bytes: the stand-in device's memory is memory of
// the process. PyTorch's own allocator, streams and dispatch stay those of CUDA: only the kernels are the CPU's, so that
// results have the CPU's bits. `rehearse_operators` installs them, once PyTorch is loaded.
//
// What an operator reads and writes is told to the runtime (fake_access), which finds accesses that nothing orders.

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/ops/from_blob.h>
#include <dlfcn.h>

#include <map>
#include <unordered_set>

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using Tensors = std::vector<Tensor>;

// ---- the runtime -----------------------------------------------------------------------------------------------------

// Of libcudart-rehearsal.so, which is preloaded.
template <typename Function>
static Function *runtime(const char *name) {
    void *const found = dlsym(RTLD_DEFAULT, name);
    TORCH_CHECK(found, "the stand-in's CUDA runtime is not preloaded: ", name, " is missing; use run.sh");
    return reinterpret_cast<Function *>(found);
}

// PyTorch's default stream and all others that PyTorch makes are one to the runtime.
static void wait_for_computing_stream() {
    static const auto synchronize = runtime<int(void *)>("cudaStreamSynchronize");
    synchronize(nullptr);
}

// A tensor that is not contiguous counts with all bytes from its first element to its last.
static void tell(const Tensor &tensor, bool write, const char *name) {
    static const auto set_name = runtime<void(const char *)>("fake_name");
    static const auto access = runtime<void(std::size_t, std::size_t, std::size_t)>("fake_access");
    if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.numel()) return;
    std::int64_t last = 0;
    for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
    const auto address = reinterpret_cast<std::size_t>(tensor.const_data_ptr());
    if (!address) return;  // no memory was ever there
    set_name(name);
    access(address, std::size_t(last + 1) * tensor.element_size(), write);
}

// ---- one tensor for another ------------------------------------------------------------------------------------------

static bool is_cuda(const Tensor &tensor) { return tensor.defined() && tensor.device().is_cuda(); }

// A CPU tensor over the bytes of a tensor of the device, which it keeps alive.
static Tensor on_cpu(const Tensor &tensor) {
    if (!is_cuda(tensor)) return tensor;
    auto *const kept = new c10::Storage(tensor.storage());
    c10::DataPtr data(kept->mutable_data(), kept, [](void *p) { delete static_cast<c10::Storage *>(p); },
                      c10::Device(c10::kCPU));
    c10::Storage storage(c10::Storage::use_byte_size_t(), kept->nbytes(), std::move(data),
                         c10::GetAllocator(c10::kCPU), true);
    auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(DispatchKey::CPU),
                                                          tensor.dtype());
    auto *const impl = alias.unsafeGetTensorImpl();
    impl->set_storage_offset(tensor.storage_offset());
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    if (tensor.is_neg()) alias._set_neg(true);
    if (tensor.is_conj()) alias._set_conj(true);
    return alias;
}

// A tensor of the device, in memory of PyTorch's allocator there, with the values of a CPU tensor.
static Tensor on_device(const Tensor &tensor, const char *name) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    auto copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::Device(c10::kCUDA, 0)));
    if (tensor.numel()) {
        tell(copy, true, name);
        on_cpu(copy).copy_(tensor);
    }
    return copy;
}

static IValue on_cpu(const IValue &value) {
    if (value.isTensor()) return on_cpu(value.toTensor());
    if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor &tensor : value.toTensorVector()) list.push_back(on_cpu(tensor));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (std::optional<Tensor> tensor : value.toOptionalTensorVector())
            list.push_back(tensor.has_value() ? std::optional<Tensor>(on_cpu(*tensor)) : tensor);
        return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::kCPU);
    // The CPU's default generator gives the random numbers of the device too.
    if (value.isGenerator() && value.toGenerator().device().is_cuda()) return IValue();
    return value;
}

static Tensors tensors_of(const IValue &value) {
    if (value.isTensor()) return {value.toTensor()};
    if (value.isTensorList()) return value.toTensorVector();
    Tensors found;
    if (value.isOptionalTensorList())
        for (const std::optional<Tensor> &tensor : value.toOptionalTensorVector())
            if (tensor.has_value()) found.push_back(*tensor);
    return found;
}

// ---- every operator --------------------------------------------------------------------------------------------------

// After the CPU's operator wrote to `alias` of `tensor`: it may have resized the alias, or given it other memory.
static void take_over(const Tensor &tensor, const Tensor &alias) {
    if (!is_cuda(tensor)) return;
    const bool same_shape = tensor.sizes() == alias.sizes() && tensor.strides() == alias.strides();
    if (!same_shape) tensor.resize_(alias.sizes());
    if (!same_shape || tensor.storage().data() != alias.storage().data()) on_cpu(tensor).copy_(alias);
}

// The argument that a returned value is, or is a view of; null if it is neither.
static const IValue *aliased(const c10::FunctionSchema &schema, const c10::Argument &returned,
                             const std::vector<IValue> &arguments) {
    if (!returned.alias_info()) return nullptr;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        const auto *const info = schema.arguments()[i].alias_info();
        if (info && *info == *returned.alias_info()) return &arguments[i];
    }
    return nullptr;
}

static IValue returned_of(const IValue &value, const IValue *argument, bool write, const char *name) {
    if (argument && write) return *argument;
    if (argument && value.isTensor() && is_cuda(argument->toTensor())) {
        const Tensor &view = value.toTensor();
        return argument->toTensor().as_strided(view.sizes(), view.strides(), view.storage_offset());
    }
    if (value.isTensor()) return on_device(value.toTensor(), name);
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor &tensor : value.toTensorVector()) list.push_back(on_device(tensor, name));
    return list;
}

static void compute(const c10::OperatorHandle &op, c10::DispatchKeySet, torch::jit::Stack *stack) {
    const auto &schema = op.schema();
    const char *const name = schema.name().c_str();
    const std::size_t begin = stack->size() - schema.arguments().size();
    const std::vector<IValue> arguments(stack->begin() + begin, stack->end());
    auto writes = [&](std::size_t i) {
        const auto *const info = schema.arguments()[i].alias_info();
        return info && info->isWrite();
    };
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        for (const Tensor &tensor : tensors_of(arguments[i]))
            if (is_cuda(tensor)) tell(tensor, writes(i), name);
        (*stack)[begin + i] = on_cpu(arguments[i]);
    }
    const std::vector<IValue> aliases(stack->begin() + begin, stack->end());
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        if (!writes(i)) continue;
        const Tensors given = tensors_of(arguments[i]), written = tensors_of(aliases[i]);
        for (std::size_t j = 0; j < given.size(); ++j) take_over(given[j], written[j]);
    }
    const auto &returns = schema.returns();
    for (std::size_t i = 0; i < returns.size(); ++i) {
        IValue &value = (*stack)[stack->size() - returns.size() + i];
        const auto *const info = returns[i].alias_info();
        value = returned_of(value, aliased(schema, returns[i], arguments), info && info->isWrite(), name);
    }
}

// ---- operators of which more is to be told ---------------------------------------------------------------------------

// The host waits for a copy unless the copy is asynchronous, which needs page-locked memory.
static Tensor &copy(Tensor &self, const Tensor &source, bool non_blocking) {
    for (const Tensor *tensor : {&source, static_cast<const Tensor *>(&self)})
        if (is_cuda(*tensor)) tell(*tensor, tensor == &self, "aten::copy_");
    auto target = on_cpu(self);
    target.copy_(on_cpu(source));
    const bool between = is_cuda(self) != is_cuda(source);
    if (between && !(non_blocking && (is_cuda(self) ? source : self).is_pinned())) wait_for_computing_stream();
    return self;
}

static at::Scalar item(const Tensor &self) {
    tell(self, false, "aten::item");
    wait_for_computing_stream();
    return on_cpu(self).item();
}

// The CPU's has no integers. As CUDA's: each bin is half open but for the last; values outside are not counted.
static Tensor histogram_of_integers(const Tensor &values, std::int64_t bins, std::int64_t least, std::int64_t most) {
    const auto counts = at::zeros({bins}, values.options());
    if (least == most && values.numel()) {
        least = values.min().item<std::int64_t>();
        most = values.max().item<std::int64_t>();
    }
    if (least == most) --least, ++most;
    const auto *const value = values.const_data_ptr<std::int64_t>();
    auto *const counter = counts.mutable_data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < values.numel(); ++i)
        if (least <= value[i] && value[i] <= most)
            ++counter[std::min((value[i] - least) * bins / (most - least), bins - 1)];
    return counts;
}

static Tensor histogram(const Tensor &self, std::int64_t bins, const at::Scalar &min, const at::Scalar &max) {
    tell(self, false, "aten::histc");
    const auto values = on_cpu(self).contiguous();
    if (at::isFloatingType(self.scalar_type())) return on_device(at::histc(values, bins, min, max), "aten::histc");
    const auto counts =
        histogram_of_integers(values.to(at::kLong), bins, min.to<std::int64_t>(), max.to<std::int64_t>());
    return on_device(counts.to(self.scalar_type()), "aten::histc");
}

// The CPU's adds the squares of float32 one after another; CUDA's, in a tree, loses a thousandth of what that loses.
static Tensors norms(at::TensorList self, const at::Scalar &ord, std::optional<at::ScalarType> dtype) {
    Tensors results;
    for (const Tensor &tensor : self) {
        tell(tensor, false, "aten::_foreach_norm");
        const auto norm = at::linalg_vector_norm(on_cpu(tensor).to(at::kDouble), ord);
        results.push_back(on_device(norm.to(dtype.value_or(tensor.scalar_type())), "aten::_foreach_norm"));
    }
    return results;
}

// ---- their installation ----------------------------------------------------------------------------------------------

// Those that touch no values stay CUDA's: they allocate and describe memory.
static const std::unordered_set<std::string> WITHOUT_VALUES = {
    "aten::empty",   "aten::empty_strided", "aten::as_strided",   "aten::view",          "aten::_reshape_alias",
    "aten::unfold",  "aten::set_",          "aten::resize_",      "aten::record_stream", "aten::_pin_memory",
    "aten::is_pinned", "aten::is_set_to",   "aten::view_as_real", "aten::view_as_complex"};

template <typename Function>
static c10::KernelFunction unboxed(Function *function) {
    return c10::KernelFunction::makeFromUnboxedRuntimeFunction(function);
}

static const std::map<std::pair<std::string, std::string>, c10::KernelFunction (*)()> OWN = {
    {{"aten::copy_", ""}, [] { return unboxed(&copy); }},
    {{"aten::_local_scalar_dense", ""}, [] { return unboxed(&item); }},
    {{"aten::histc", ""}, [] { return unboxed(&histogram); }},
    {{"aten::_foreach_norm", "Scalar"}, [] { return unboxed(&norms); }},
};

// Returns how many operators the CPU computes from now on.
extern "C" long rehearse_operators() {
    static std::vector<c10::RegistrationHandleRAII> installed;
    auto &dispatcher = c10::Dispatcher::singleton();
    auto put = [&](const c10::OperatorName &name, c10::KernelFunction kernel) {
        installed.push_back(
            dispatcher.registerImpl(name, DispatchKey::CUDA, std::move(kernel), std::nullopt, nullptr, "rehearsal"));
    };
    for (const auto &name : dispatcher.getRegistrationsForDispatchKey(DispatchKey::CUDA)) {
        const bool of_aten = name.name.rfind("aten::", 0) == 0;
        if (of_aten && !WITHOUT_VALUES.count(name.name) && !OWN.count({name.name, name.overload_name}))
            put(name, c10::KernelFunction::makeFromBoxedFunction<&compute>());
    }
    // Not all of these are registered for CUDA alone.
    for (const auto &[name, kernel] : OWN) put({name.first, name.second}, kernel());
    return long(installed.size());
}
