// SPDX-FileCopyrightText: 2026 The jax_fastattn authors
// SPDX-License-Identifier: Apache-2.0

#include "libraries.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <utility>

namespace jax_fastattn {
namespace {

namespace ffi = xla::ffi;

// Leaked: other threads may launch while the process exits.
auto& mutex = *new std::mutex;  // guards what follows, until the libraries are open
auto& runtime_path = *new std::string;
auto& driver_path = *new std::string;
auto& zlib_path = *new std::string;
Libraries libraries;
std::atomic<bool> is_open{false};

// Looks symbols up and remembers the first problem.
class SharedLibrary {
 public:
  explicit SharedLibrary(const std::string& path) : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) problem_ = dlerror();
  }

  template <typename Function>
  void Bind(Function& function, const char* name) {
    if (!problem_.empty()) return;
    function = reinterpret_cast<Function>(dlsym(handle_, name));
    if (function == nullptr) problem_ = std::string("it has no symbol ") + name;
  }

  const std::string& problem() const { return problem_; }

 private:
  void* handle_;
  std::string problem_;
};

ffi::Unexpected<ffi::Error> Failure(const std::string& text) {
  return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kFailedPrecondition, "jax_fastattn: " + text));
}

}  // namespace

void SetLibraryPaths(std::string runtime, std::string driver, std::string zlib) {
  std::lock_guard<std::mutex> lock(mutex);
  runtime_path = std::move(runtime);
  driver_path = std::move(driver);
  zlib_path = std::move(zlib);
}

ffi::ErrorOr<const Libraries*> OpenLibraries() {
  if (is_open.load(std::memory_order_acquire)) return &libraries;
  std::lock_guard<std::mutex> lock(mutex);
  if (is_open) return &libraries;
  if (runtime_path.empty()) {
    return Failure(
        "libcute_dsl_runtime.so, through which CUDA kernels are launched, was not found. Install it with `pip install "
        "'nvidia-cutlass-dsl[cu13]>=4.8,<4.9'`, or `pip install 'nvidia-cutlass-dsl>=4.8,<4.9'` for CUDA 12.");
  }
  SharedLibrary runtime(runtime_path);
  runtime.Bind(libraries.module_create, "CuteDSLRT_Module_Create_From_Bytes");
  runtime.Bind(libraries.module_destroy, "CuteDSLRT_Module_Destroy");
  runtime.Bind(libraries.module_get_function, "CuteDSLRT_Module_Get_Function");
  runtime.Bind(libraries.function_run, "CuteDSLRT_Function_Run");
  runtime.Bind(libraries.error_name, "CuteDSLRT_GetErrorName");
  if (!runtime.problem().empty()) {
    return Failure("the CuTe DSL runtime " + runtime_path + " cannot be used: " + runtime.problem() +
                   ". Reinstall nvidia-cutlass-dsl.");
  }
  SharedLibrary driver(driver_path);
  driver.Bind(libraries.get_device, "cuCtxGetDevice");
  driver.Bind(libraries.get_attribute, "cuDeviceGetAttribute");
  driver.Bind(libraries.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  driver.Bind(libraries.error_string, "cuGetErrorString");
  driver.Bind(libraries.stream_create, "cuStreamCreate");
  driver.Bind(libraries.stream_destroy, "cuStreamDestroy_v2");
  driver.Bind(libraries.begin_capture, "cuStreamBeginCapture_v2");
  driver.Bind(libraries.end_capture, "cuStreamEndCapture");
  driver.Bind(libraries.graph_destroy, "cuGraphDestroy");
  if (!driver.problem().empty()) {
    return Failure("the CUDA driver " + driver_path + " cannot be used: " + driver.problem() +
                   ". Install an NVIDIA driver on this machine.");
  }
  SharedLibrary zlib(zlib_path);
  zlib.Bind(libraries.uncompress, "uncompress");
  if (!zlib.problem().empty()) {
    return Failure("zlib cannot be used: " + zlib.problem() + ". Install it with the system's package manager.");
  }
  is_open.store(true, std::memory_order_release);
  return &libraries;
}

std::string CudaErrorText(const Libraries& libraries, int error) {
  const char* text = nullptr;
  if (libraries.error_string(error, &text) != 0 || text == nullptr) text = "unknown error";
  return "CUDA error " + std::to_string(error) + ", " + text;
}

}  // namespace jax_fastattn
