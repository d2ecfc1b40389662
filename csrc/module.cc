// SPDX-FileCopyrightText: 2026 The jax_fastattn authors
// SPDX-License-Identifier: Apache-2.0
//
// The XLA FFI handlers, and the Python module `jax_fastattn.ffi._ffi` that hands them out. A call launches one kernel
// with its operands, its results, its scalars and the stream; it allocates nothing on the device and never waits. Before
// the first launch of a program the kernel is loaded.

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "libraries.h"
#include "store.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fastattn {
namespace {

// Reads attributes one after the other, in the order in which XLA has them: by name. `ffi::Dictionary` searches for
// each, which takes longer than the rest of the handler.
class Attributes {
 public:
  explicit Attributes(const XLA_FFI_Attrs* attributes) : attributes_(attributes) {}

  // Returns false if the next attribute has another name or type, or there is none.
  template <typename T>
  bool Next(std::string_view name, T& value) {
    if (IsEnd()) return false;
    const XLA_FFI_ByteSpan& found = *attributes_->names[next_];
    if (std::string_view(found.ptr, found.len) != name) return false;
    xla::ffi::DiagnosticEngine diagnostic;
    const auto decoded =
        xla::ffi::AttrDecoding<T>::Decode(attributes_->types[next_], attributes_->attrs[next_], diagnostic);
    ++next_;
    if (decoded) value = *decoded;
    return decoded.has_value();
  }

  bool IsEnd() const { return next_ == attributes_->size; }

 private:
  const XLA_FFI_Attrs* attributes_;
  int64_t next_ = 0;
};

}  // namespace
}  // namespace jax_fastattn

// So that a handler takes `Attributes`.
template <>
struct xla::ffi::AttrDecoding<jax_fastattn::Attributes> {
  using Type = jax_fastattn::Attributes;
  static std::optional<Type> Decode(XLA_FFI_AttrType, void* attributes, DiagnosticEngine&) {
    return Type(static_cast<const XLA_FFI_Attrs*>(attributes));
  }
};

namespace jax_fastattn {
namespace {

namespace ffi = xla::ffi;

constexpr size_t kMaxBuffers = 32;
constexpr size_t kMaxArguments = 64;

// What kernels are compiled for, in bytes, see compilation/compiler.py.
constexpr uintptr_t kAlignment = 16;

// What a custom call passes on. XLA keeps the attributes where they are.
struct Call {
  KernelImage image;
  std::array<void*, kMaxBuffers> buffers;
  size_t num_buffers;
  std::optional<size_t> bad_buffer;  // index of one that no kernel takes
  ffi::Span<const int32_t> ints;
  ffi::Span<const float> floats;
};

void AddBuffer(Call& call, const ffi::AnyBuffer& buffer) {
  void* const data = buffer.untyped_data();
  const bool is_aligned = reinterpret_cast<uintptr_t>(data) % kAlignment == 0;
  const bool has_memory = data != nullptr || buffer.element_count() == 0;
  if (!(is_aligned && has_memory) && !call.bad_buffer) call.bad_buffer = call.num_buffers;
  call.buffers[call.num_buffers++] = data;
}

// An attribute that `Read` does not know may change what the call means.
ffi::Error Read(ffi::RemainingArgs operands, ffi::RemainingRets results, Attributes attributes, Call& call) {
  KernelImage& image = call.image;
  int32_t num_buffers = 0;
  if (!(attributes.Next("arch", image.arch) && attributes.Next("digest", image.digest) &&
        attributes.Next("floats", call.floats) && attributes.Next("ints", call.ints) &&
        attributes.Next("key", image.key) && attributes.Next("num_buffers", num_buffers) &&
        attributes.Next("object", image.object) && attributes.Next("object_size", image.object_size) &&
        attributes.IsEnd())) {
    return ffi::Error::InvalidArgument(
        "jax_fastattn: the program lacks an attribute that this version needs, or has one that it does not know: "
        "another version of jax_fastattn lowered it. Lower the computation again; if the program comes from a "
        "jax.export file, export it again.");
  }
  const size_t count = operands.size() + results.size();
  if (count != static_cast<size_t>(num_buffers) || count > kMaxBuffers) {
    return ffi::Error::InvalidArgument(
        "jax_fastattn: " + KernelName(image.key) + " takes " + std::to_string(num_buffers) +
        " buffers, but its custom call has " + std::to_string(operands.size()) + " operands and " +
        std::to_string(results.size()) + " results. The program was changed after lowering: lower it again.");
  }
  if (const size_t scalars = call.ints.size() + call.floats.size(); count + scalars + 2 > kMaxArguments) {
    return ffi::Error::InvalidArgument(
        "jax_fastattn: the custom call of " + KernelName(image.key) + " has " + std::to_string(scalars) +
        " scalars, more than any kernel takes. The program was changed after lowering: lower it again.");
  }
  call.num_buffers = 0;
  for (size_t i = 0; i < operands.size(); ++i) AddBuffer(call, *operands.get<ffi::AnyBuffer>(i));
  for (size_t i = 0; i < results.size(); ++i) AddBuffer(call, **results.get<ffi::AnyBuffer>(i));
  return ffi::Error::Success();
}

// A kernel would fail with a CUDA error, after which the process can use its GPU no more.
ffi::Error BadBuffer(const Call& call) {
  const size_t index = *call.bad_buffer;
  return ffi::Error::InvalidArgument(
      "jax_fastattn: buffer " + std::to_string(index) + " of " + KernelName(call.image.key) + " is at address " +
      std::to_string(reinterpret_cast<uintptr_t>(call.buffers[index])) + ", but kernels take multiples of " +
      std::to_string(kAlignment) + " other than 0. XLA aligns what it allocates: copy arrays of other libraries.");
}

ffi::Error Run(const LoadedKernel& kernel, Call& call, void* stream) {
  // The runtime takes a pointer to each argument. It writes to the last one only.
  int32_t cuda_error = 0;
  std::array<void*, kMaxArguments> arguments;
  size_t next = 0;
  for (size_t i = 0; i < call.num_buffers; ++i) arguments[next++] = &call.buffers[i];
  for (const int32_t& value : call.ints) arguments[next++] = const_cast<int32_t*>(&value);
  for (const float& value : call.floats) arguments[next++] = const_cast<float*>(&value);
  arguments[next++] = &stream;
  arguments[next++] = &cuda_error;
  const std::string_view key = call.image.key;
  int status = 0;
  try {
    status = kernel.libraries->function_run(kernel.function, arguments.data(), next);
  } catch (...) {  // through the runtime's C interface
    return ffi::Error::Internal("jax_fastattn: the CuTe DSL runtime threw an exception in the launch of " +
                                KernelName(key) + ".");
  }
  if (cuda_error != 0) {
    return ffi::Error::Internal("jax_fastattn: the launch of " + KernelName(key) +
                                " failed: " + CudaErrorText(*kernel.libraries, cuda_error) + ".");
  }
  if (status != 0) {
    return ffi::Error::Internal("jax_fastattn: the CuTe DSL runtime could not launch " + KernelName(key) + " with " +
                                std::to_string(next) + " arguments: " + kernel.libraries->error_name(status) + ".");
  }
  return ffi::Error::Success();
}

ffi::Error Launch(void* stream, ffi::RemainingArgs operands, ffi::RemainingRets results, Attributes attributes) {
  Call call;
  if (ffi::Error error = Read(operands, results, attributes, call); error.failure()) return error;
  if (call.bad_buffer) return BadBuffer(call);
  const ffi::ErrorOr<LoadedKernel> kernel = GetKernel(call.image);
  if (kernel.has_error()) return kernel.error();
  return Run(*kernel, call, stream);
}

// Loads the kernel while nothing of the program runs: CUDA may wait for all work of a GPU when it loads one, and a
// collective that waits for this GPU's part would then never end. CUDA loads code at its first launch, so that one is
// captured and thrown away. Whatever fails here is left to the launch, which loads a kernel too, and reports it.
ffi::Error Initialize(ffi::RemainingArgs operands, ffi::RemainingRets results, Attributes attributes) {
  constexpr unsigned kNonBlockingStream = 1;
  Call call;
  if (Read(operands, results, attributes, call).failure()) return ffi::Error::Success();
  const ffi::ErrorOr<LoadedKernel> kernel = GetKernel(call.image);
  if (kernel.has_error() || !kernel->is_new) return ffi::Error::Success();
  const Libraries& cuda = *kernel->libraries;
  void* stream = nullptr;
  if (cuda.stream_create(&stream, kNonBlockingStream) != 0) return ffi::Error::Success();
  if (cuda.begin_capture(stream, kCaptureModeRelaxed) == 0) {
    static_cast<void>(Run(*kernel, call, stream));
    void* graph = nullptr;
    cuda.end_capture(stream, &graph);
    if (graph != nullptr) cuda.graph_destroy(graph);
  }
  cuda.stream_destroy(stream);
  return ffi::Error::Success();
}

template <typename Binding>
auto BindCall(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attrs<Attributes>();
}

XLA_FFI_DEFINE_HANDLER(kLaunch, Launch, BindCall(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>()),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize, BindCall(ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()));

// XLA for CPUs has no stream, and no stage before execution in all versions. Tests run whole programs through this one,
// with a stand-in for the CuTe DSL runtime.
XLA_FFI_DEFINE_HANDLER(
    kLaunchOnHost,
    [](auto... arguments) {
      static_cast<void>(Initialize(arguments...));  // never fails
      return Launch(nullptr, arguments...);
    },
    BindCall(ffi::Ffi::Bind()));

pybind11::capsule Capsule(XLA_FFI_Handler* handler) {
  return pybind11::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

}  // namespace

PYBIND11_MODULE(_ffi, module) {
  module.doc() = "XLA FFI handlers that launch compiled attention kernels.";
  module.def("set_library_paths", &SetLibraryPaths, pybind11::arg("runtime"), pybind11::arg("driver"),
             pybind11::arg("zlib") = "libz.so.1",
             "Says where libcute_dsl_runtime.so, the CUDA driver and zlib are. They are opened when the first kernel is "
             "loaded.");
  module.attr("initialize") = Capsule(kInitialize);
  module.attr("launch") = Capsule(kLaunch);
  module.attr("launch_on_host") = Capsule(kLaunchOnHost);
}

}  // namespace jax_fastattn
