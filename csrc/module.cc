// SPDX-FileCopyrightText: 2026 The jax_fastattn authors
// SPDX-License-Identifier: Apache-2.0
//
// The XLA FFI handlers, and the Python module `jax_fastattn.ffi._ffi` that hands them out. A call launches one kernel
// with its operands, its results, its scalars and the stream; it allocates nothing on the device and never waits.

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "libraries.h"
#include "store.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fastattn {
namespace {

namespace ffi = xla::ffi;

constexpr size_t kMaxBuffers = 32;
constexpr size_t kMaxArguments = 64;

ffi::Error Launch(void* stream, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  const auto key = attributes.get<std::string_view>("key"), arch = attributes.get<std::string_view>("arch"),
             digest = attributes.get<std::string_view>("digest"), object = attributes.get<std::string_view>("object");
  const auto object_size = attributes.get<int32_t>("object_size"), num_buffers = attributes.get<int32_t>("num_buffers");
  const auto ints = attributes.get<ffi::Span<const int32_t>>("ints");
  const auto floats = attributes.get<ffi::Span<const float>>("floats");
  if (key.has_error() || arch.has_error() || digest.has_error() || object.has_error() || object_size.has_error() ||
      num_buffers.has_error() || ints.has_error() || floats.has_error()) {
    return ffi::Error::InvalidArgument(
        "jax_fastattn: the program lacks an attribute that this version needs: another version of jax_fastattn lowered "
        "it. Lower the computation again; if the program comes from a jax.export file, export it again.");
  }
  const size_t count = operands.size() + results.size();
  const size_t num_arguments = count + ints->size() + floats->size() + 2;  // the stream and the error code
  if (count != static_cast<size_t>(*num_buffers) || count > kMaxBuffers || num_arguments > kMaxArguments) {
    return ffi::Error::InvalidArgument("jax_fastattn: " + KernelName(*key) + " takes " + std::to_string(*num_buffers) +
                                       " buffers, but its custom call has " + std::to_string(operands.size()) +
                                       " operands and " + std::to_string(results.size()) +
                                       " results. The program was changed after lowering: lower it again.");
  }
  std::array<void*, kMaxBuffers> buffers;
  for (size_t i = 0; i < operands.size(); ++i) {
    buffers[i] = operands.get<ffi::AnyBuffer>(i)->untyped_data();
  }
  for (size_t i = 0; i < results.size(); ++i) {
    buffers[operands.size() + i] = (*results.get<ffi::AnyBuffer>(i))->untyped_data();
  }
  ffi::ErrorOr<LoadedKernel> kernel = GetKernel({*key, *arch, *digest, *object, *object_size});
  if (kernel.has_error()) return kernel.error();

  // The runtime takes a pointer to each argument. It writes to the last one only.
  int32_t cuda_error = 0;
  std::array<void*, kMaxArguments> arguments;
  size_t next = 0;
  for (size_t i = 0; i < count; ++i) arguments[next++] = &buffers[i];
  for (const int32_t& value : *ints) arguments[next++] = const_cast<int32_t*>(&value);
  for (const float& value : *floats) arguments[next++] = const_cast<float*>(&value);
  arguments[next++] = &stream;
  arguments[next++] = &cuda_error;

  const int status = kernel->libraries->function_run(kernel->function, arguments.data(), next);
  if (cuda_error != 0) {
    return ffi::Error::Internal("jax_fastattn: the launch of " + KernelName(*key) +
                                " failed: " + CudaErrorText(*kernel->libraries, cuda_error) + ".");
  }
  if (status != 0) {
    return ffi::Error::Internal("jax_fastattn: the CuTe DSL runtime could not launch " + KernelName(*key) + " with " +
                                std::to_string(next) + " arguments: " + kernel->libraries->error_name(status) + ".");
  }
  return ffi::Error::Success();
}

template <typename Binding>
auto BindCall(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

XLA_FFI_DEFINE_HANDLER(kLaunch, Launch, BindCall(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>()),
                       {ffi::Traits::kCmdBufferCompatible});

// The CPU has no stream. Tests run whole programs through this one, with a stand-in for the CuTe DSL runtime.
XLA_FFI_DEFINE_HANDLER(
    kLaunchOnHost, [](auto... arguments) { return Launch(nullptr, arguments...); }, BindCall(ffi::Ffi::Bind()));

pybind11::capsule Capsule(XLA_FFI_Handler* handler) {
  return pybind11::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

}  // namespace

PYBIND11_MODULE(_ffi, module) {
  module.doc() = "XLA FFI handlers that launch compiled attention kernels.";
  module.def("set_library_paths", &SetLibraryPaths, pybind11::arg("runtime"), pybind11::arg("driver"),
             "Says where libcute_dsl_runtime.so and the CUDA driver are. They are opened at the first launch.");
  module.attr("launch") = Capsule(kLaunch);
  module.attr("launch_on_host") = Capsule(kLaunchOnHost);
}

}  // namespace jax_fastattn
