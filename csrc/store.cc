// SPDX-FileCopyrightText: 2026 The jax_fastattn authors
// SPDX-License-Identifier: Apache-2.0

#include "store.h"

#include <elf.h>

#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace jax_fastattn {
namespace {

namespace ffi = xla::ffi;

// The name under which ffi/compiler.py exports the launcher of an object.
constexpr char kFunctionPrefix[] = "jax_fastattn";

// CUdevice_attribute and CUstreamCaptureMode, as cuda.h numbers them.
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;
constexpr int kCaptureModeRelaxed = 2;

// Far above any kernel: a damaged program must not eat the memory.
constexpr int32_t kMaxObjectSize = 1 << 28;

using Bytes = std::vector<unsigned char>;
using Kernels = std::map<std::string, CuteFunction*, std::less<>>;

ffi::Unexpected<ffi::Error> Failure(ffi::ErrorCode code, const std::string& text) {
  return ffi::Unexpected(ffi::Error(code, "jax_fastattn: " + text));
}

// CUDA's rule for binaries: they run within a major version, from their minor version up; those with a suffix run on
// that version only.
bool RunsOn(std::string_view arch, int major, int minor) {
  int version = 0;
  for (char character : arch) {
    if (character >= '0' && character <= '9') version = version * 10 + (character - '0');
  }
  const bool is_exact = !arch.empty() && arch.back() == 'a';
  return version / 10 == major && (is_exact ? version % 10 == minor : version % 10 <= minor);
}

std::optional<Bytes> DecodeBase64(std::string_view text) {
  constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::array<int, 256> values;
  values.fill(-1);
  for (size_t i = 0; i < kAlphabet.size(); ++i) values[static_cast<uint8_t>(kAlphabet[i])] = static_cast<int>(i);

  Bytes bytes;
  unsigned window = 0;
  int available = 0;
  for (char character : text.substr(0, text.find('='))) {
    const int value = values[static_cast<uint8_t>(character)];
    if (value < 0) return std::nullopt;
    window = window << 6 | static_cast<unsigned>(value);
    available += 6;
    if (available >= 8) bytes.push_back(static_cast<unsigned char>(window >> (available -= 8)));
  }
  return bytes;
}

// The ELF object, or nothing when it is damaged: zlib verifies its checksum.
std::optional<Bytes> DecodeObject(const Libraries& libraries, const KernelImage& image) {
  const std::optional<Bytes> packed = DecodeBase64(image.object);
  if (!packed || image.object_size <= 0 || image.object_size > kMaxObjectSize) return std::nullopt;
  Bytes object(static_cast<size_t>(image.object_size));
  unsigned long size = object.size();
  if (libraries.uncompress(object.data(), &size, packed->data(), packed->size()) != 0) return std::nullopt;
  if (size != object.size()) return std::nullopt;
  return object;
}

// Whether the launcher in the object is code for this machine's CPU.
bool IsHostObject(const Bytes& object) {
#if defined(__x86_64__)
  constexpr Elf64_Half kHostMachine = EM_X86_64;
#elif defined(__aarch64__)
  constexpr Elf64_Half kHostMachine = EM_AARCH64;
#endif
  Elf64_Ehdr header;
  if (object.size() < sizeof header) return false;
  std::memcpy(&header, object.data(), sizeof header);
  return std::memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 && header.e_machine == kHostMachine;
}

// Loading a module while a stream is being captured is allowed in relaxed mode only. It touches no stream, so that the
// capture stays right.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Libraries& libraries) : libraries_(libraries) {
    libraries_.exchange_capture_mode(&mode_);
  }
  ~RelaxedCapture() { libraries_.exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Libraries& libraries_;
  int mode_ = kCaptureModeRelaxed;
};

ffi::Error CheckArch(const Libraries& libraries, std::string_view arch, int device) {
  int major = 0;
  int minor = 0;
  int error = libraries.get_attribute(&major, kComputeCapabilityMajor, device);
  if (error == 0) error = libraries.get_attribute(&minor, kComputeCapabilityMinor, device);
  const std::string name = "CUDA device " + std::to_string(device);
  if (error != 0) {
    return ffi::Error::Internal("jax_fastattn: the compute capability of " + name +
                                " cannot be read: " + CudaErrorText(libraries, error) + ".");
  }
  if (RunsOn(arch, major, minor)) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    "jax_fastattn: the kernel was compiled for " + std::string(arch) + ", but " + name +
                        " has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
                        ". Lower the computation for the GPU that runs it; jax_fastattn.set_target_arch names that GPU "
                        "where it is not at hand.");
}

ffi::ErrorOr<CuteFunction*> Load(const Libraries& libraries, const KernelImage& image, int device) {
  ffi::Error error = CheckArch(libraries, image.arch, device);
  if (error.failure()) return ffi::Unexpected(error);
  const std::string name = KernelName(image.key);
  const std::optional<Bytes> object = DecodeObject(libraries, image);
  if (!object) {
    return Failure(ffi::ErrorCode::kDataLoss, "the object of " + name +
                                                  " is damaged. Lower the computation again, and discard the jax.export "
                                                  "file or the entry of JAX's compilation cache that it came from.");
  }
  if (!IsHostObject(*object)) {
    return Failure(ffi::ErrorCode::kFailedPrecondition,
                   name + " has no launcher for this CPU. Lower the computation on this kind of machine.");
  }
  RelaxedCapture relaxed(libraries);
  CuteModule* module = nullptr;
  CuteFunction* function = nullptr;
  int status = 0;
  try {
    // One module per device: this call loads the kernel on the current one.
    status = libraries.module_create(&module, object->data(), object->size(), nullptr, 0);
    if (status == 0) status = libraries.module_get_function(&function, module, kFunctionPrefix);
  } catch (...) {  // thrown through the runtime's C interface when the object lacks our function
    return Failure(ffi::ErrorCode::kInternal,
                   name + " has no function " + kFunctionPrefix + ": this package did not compile it.");
  }
  if (status != 0) {
    return Failure(ffi::ErrorCode::kInternal,
                   "the CuTe DSL runtime could not load " + name + " on CUDA device " + std::to_string(device) + ": " +
                       libraries.error_name(status) +
                       ". Check that the NVIDIA driver and nvidia-cutlass-dsl fit the CUDA version of jaxlib.");
  }
  return function;
}

}  // namespace

std::string KernelName(std::string_view key) { return "kernel " + std::string(key.substr(0, 12)); }

ffi::ErrorOr<LoadedKernel> GetKernel(const KernelImage& image) {
  static std::mutex mutex;
  static auto& kernels_by_device = *new std::map<int, Kernels>;  // leaked: other threads may launch while we exit
  std::lock_guard<std::mutex> lock(mutex);
  ffi::ErrorOr<const Libraries*> libraries = OpenLibraries();
  if (libraries.has_error()) return ffi::Unexpected(libraries.error());
  int device = 0;
  if (int error = (*libraries)->get_device(&device); error != 0) {
    return Failure(ffi::ErrorCode::kInternal, "no CUDA device is current: " + CudaErrorText(**libraries, error) + ".");
  }
  Kernels& kernels = kernels_by_device[device];
  if (auto found = kernels.find(image.key); found != kernels.end()) return LoadedKernel{*libraries, found->second};
  ffi::ErrorOr<CuteFunction*> function = Load(**libraries, image, device);
  if (function.has_error()) return ffi::Unexpected(function.error());
  kernels.emplace(image.key, *function);
  return LoadedKernel{*libraries, *function};
}

}  // namespace jax_fastattn
