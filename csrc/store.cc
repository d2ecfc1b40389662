// SPDX-FileCopyrightText: 2026 The jax_fastattn authors
// SPDX-License-Identifier: Apache-2.0

#include "store.h"

#include <elf.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace jax_fastattn {
namespace {

namespace ffi = xla::ffi;

// The name under which compilation/compiler.py exports the launcher of an object.
constexpr char kFunctionPrefix[] = "jax_fastattn";

// CUdevice_attribute, as cuda.h numbers it.
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;

// Far above any kernel: a damaged program must not eat the memory.
constexpr int32_t kMaxObjectSize = 1 << 28;

// Of how many calls of a kernel the objects are remembered as compared.
constexpr size_t kMaxEqualObjects = 4096;

using Bytes = std::vector<unsigned char>;

struct Capability { int major = 0, minor = 0; };  // of a device

struct Kernel {
  std::string object;  // as programs carry it
  int32_t object_size;
  std::string arch;  // in the call that was first
  std::map<int, CuteFunction*> functions;  // by device, once they are loaded
  // Where programs keep objects that were found equal to this one. A later program may reuse the place of one that is
  // gone; unless it lies about its digest, its object is the same.
  std::set<const char*> equal_objects;
};

// Leaked: other threads may launch while the process exits.
auto& load_mutex = *new std::mutex;  // one thread at a time loads kernels, or deletes one; locked before `mutex`
auto& mutex = *new std::mutex;  // guards the maps; a thread that holds it waits for no GPU
using Kernels = std::map<std::string, Kernel, std::less<>>;  // by digest
auto& kernels = *new Kernels;
auto& capabilities = *new std::map<int, Capability>;

// A call whose kernel this thread has found before, so that it neither waits for other threads nor searches again.
struct KnownCall {
  const char* object;  // where its program keeps it
  int device;
  const Kernels::value_type* kernel;  // a loaded kernel stays where it is
  CuteFunction* function;

  bool Is(const KernelImage& image, int current_device) const {
    return kernel != nullptr && object == image.object.data() && device == current_device &&
           kernel->first == image.digest && kernel->second.arch == image.arch;
  }
};

// A call has one place. Where two calls have the same place, each launch of one after the other searches again.
constexpr int kLogKnownCalls = 10;
thread_local std::array<KnownCall, 1 << kLogKnownCalls> known_calls;

KnownCall& PlaceOf(const KernelImage& image, int device) {
  const uint64_t call = reinterpret_cast<uintptr_t>(image.object.data()) + static_cast<unsigned>(device);
  return known_calls[call * 0x9E3779B97F4A7C15u >> (64 - kLogKnownCalls)];  // Fibonacci hashing
}

ffi::Unexpected<ffi::Error> Failure(ffi::ErrorCode code, const std::string& text) {
  return ffi::Unexpected(ffi::Error(code, "jax_fastattn: " + text));
}

// CUDA's rule for binaries: they run within a major version, from their minor version up; those with the suffix "a" run
// on that version only. A name of any other form runs nowhere.
bool RunsOn(std::string_view arch, unsigned major, unsigned minor) {
  if (arch.size() < 4 || arch.substr(0, 3) != "sm_" || arch[3] == '0') return false;
  unsigned version = 0;
  const auto [rest, error] = std::from_chars(arch.data() + 3, arch.data() + arch.size(), version);
  const std::string_view suffix = arch.substr(static_cast<size_t>(rest - arch.data()));
  if (error != std::errc() || (!suffix.empty() && suffix != "a" && suffix != "f")) return false;
  return version / 10 == major && (suffix == "a" ? version % 10 == minor : version % 10 <= minor);
}

std::optional<Bytes> DecodeBase64(std::string_view text) {
  constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  Bytes bytes;
  unsigned window = 0;
  int available = 0;
  for (char character : text.substr(0, text.find('='))) {
    const size_t value = kAlphabet.find(character);
    if (value == kAlphabet.npos) return std::nullopt;
    window = window << 6 | static_cast<unsigned>(value);
    available += 6;
    if (available >= 8) bytes.push_back(static_cast<unsigned char>(window >> (available -= 8)));
  }
  return bytes;
}

// The ELF object, or nothing when it is damaged: zlib verifies its checksum.
std::optional<Bytes> DecodeObject(const Libraries& libraries, const Kernel& kernel) {
  const std::optional<Bytes> packed = DecodeBase64(kernel.object);
  if (!packed || kernel.object_size <= 0 || kernel.object_size > kMaxObjectSize) return std::nullopt;
  Bytes object(static_cast<size_t>(kernel.object_size));
  unsigned long size = object.size();
  const int error = libraries.uncompress(object.data(), &size, packed->data(), packed->size());
  return error != 0 || size != object.size() ? std::nullopt : std::make_optional(std::move(object));
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
  explicit RelaxedCapture(const Libraries& open) : libraries_(open) { libraries_.exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { libraries_.exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Libraries& libraries_;
  int mode_ = kCaptureModeRelaxed;
};

ffi::Error CheckArch(const Libraries& libraries, std::string_view arch, int device) {
  Capability& found = capabilities[device];
  int error = 0;
  if (found.major == 0) error = libraries.get_attribute(&found.minor, kComputeCapabilityMinor, device);
  if (found.major == 0 && error == 0) error = libraries.get_attribute(&found.major, kComputeCapabilityMajor, device);
  if (error == 0 && RunsOn(arch, found.major, found.minor)) return ffi::Error::Success();
  const std::string name = "CUDA device " + std::to_string(device);
  if (error != 0) {
    return ffi::Error::Internal("jax_fastattn: cannot read the compute capability of " + name + ": " +
                                CudaErrorText(libraries, error) + ".");
  }
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    "jax_fastattn: the kernel was compiled for " + std::string(arch) + ", but " + name +
                        " has compute capability " + std::to_string(found.major) + "." + std::to_string(found.minor) +
                        ". Lower the computation where that GPU is, or inside `with jax_fastattn.target_arch(...)`.");
}

ffi::ErrorOr<CuteFunction*> Load(const Libraries& libraries, std::string_view key, const Kernel& kernel, int device) {
  const std::string name = KernelName(key);
  const std::optional<Bytes> object = DecodeObject(libraries, kernel);
  if (!object) {
    return Failure(ffi::ErrorCode::kDataLoss, name + " is damaged. Lower the computation again, and discard the "
                   "jax.export file or the entry of JAX's compilation cache that it came from.");
  }
  if (!IsHostObject(*object)) {
    return Failure(ffi::ErrorCode::kFailedPrecondition,
                   name + " has no launcher for this CPU. Lower the computation on this kind of machine.");
  }
  RelaxedCapture relaxed(libraries);
  std::unique_ptr<CuteModule, int (*)(CuteModule*)> module(nullptr, libraries.module_destroy);
  CuteFunction* function = nullptr;
  int status = 0;
  try {
    // One module per device: this call loads the kernel on the current one.
    CuteModule* created = nullptr;
    status = libraries.module_create(&created, object->data(), object->size(), nullptr, 0);
    if (status == 0) {
      module.reset(created);
      status = libraries.module_get_function(&function, created, kFunctionPrefix);
    }
  } catch (const std::bad_alloc&) {
    throw;
  } catch (...) {  // thrown through the runtime's C interface when the object lacks our function
    return Failure(ffi::ErrorCode::kInternal, name + " has no function jax_fastattn: this package did not compile it.");
  }
  if (status != 0) {
    return Failure(ffi::ErrorCode::kInternal,
                   "the CuTe DSL runtime could not load " + name + " on CUDA device " + std::to_string(device) + ": " +
                       libraries.error_name(status) +
                       ". Check that the NVIDIA driver and nvidia-cutlass-dsl fit the CUDA version of jaxlib.");
  }
  static_cast<void>(module.release());  // stays loaded
  return function;
}

// The kernel with the object of a call. Needs `mutex`.
ffi::ErrorOr<Kernels::iterator> Find(const KernelImage& image) {
  auto found = kernels.find(image.digest);
  if (found == kernels.end()) {
    Kernel added{std::string(image.object), image.object_size, std::string(image.arch), {}, {}};
    found = kernels.emplace(std::string(image.digest), std::move(added)).first;
  }
  Kernel& kernel = found->second;
  if (kernel.equal_objects.count(image.object.data()) == 0) {
    if (kernel.object != image.object || kernel.object_size != image.object_size) {
      return Failure(ffi::ErrorCode::kFailedPrecondition,
                     KernelName(image.key) + " has the digest of another object in this process: one of the programs "
                     "that carry them was changed after lowering. Lower both computations again.");
    }
    if (kernel.equal_objects.size() == kMaxEqualObjects) kernel.equal_objects.clear();
    kernel.equal_objects.insert(image.object.data());
  }
  return found;
}

struct FoundKernel {
  Kernels::iterator kernel;
  CuteFunction* function;  // null if it is not loaded on the device
  bool is_new = false;     // this call loaded it
};

// The kernel with the object of a call, and its function if it is loaded.
ffi::ErrorOr<FoundKernel> Lookup(const Libraries& libraries, const KernelImage& image, int device) {
  std::lock_guard<std::mutex> lock(mutex);
  if (ffi::Error error = CheckArch(libraries, image.arch, device); error.failure()) return ffi::Unexpected(error);
  const ffi::ErrorOr<Kernels::iterator> kernel = Find(image);
  if (kernel.has_error()) return ffi::Unexpected(kernel.error());
  const auto& functions = (*kernel)->second.functions;
  const auto function = functions.find(device);
  return FoundKernel{*kernel, function == functions.end() ? nullptr : function->second};
}

// Loads the kernel that `Lookup` found. Needs `load_mutex`, without which another thread may delete the kernel.
ffi::ErrorOr<CuteFunction*> Add(const Libraries& libraries, std::string_view key, Kernels::iterator kernel,
                                int device) {
  const ffi::ErrorOr<CuteFunction*> loaded = Load(libraries, key, kernel->second, device);
  std::lock_guard<std::mutex> lock(mutex);
  auto& functions = kernel->second.functions;
  if (loaded.has_value()) {
    functions.emplace(device, *loaded);
  } else if (loaded.error().errc() == ffi::ErrorCode::kDataLoss && functions.empty()) {
    kernels.erase(kernel);  // makes room for a whole object
  }
  return loaded;
}

// The kernel of a call, loaded on the device.
ffi::ErrorOr<FoundKernel> LookupOrLoad(const Libraries& libraries, const KernelImage& image, int device) {
  ffi::ErrorOr<FoundKernel> found = Lookup(libraries, image, device);
  if (found.has_error() || found->function != nullptr) return found;
  std::lock_guard<std::mutex> lock(load_mutex);
  found = Lookup(libraries, image, device);  // another thread may have loaded it meanwhile
  if (found.has_error() || found->function != nullptr) return found;
  const ffi::ErrorOr<CuteFunction*> loaded = Add(libraries, image.key, found->kernel, device);
  if (loaded.has_error()) return ffi::Unexpected(loaded.error());
  return FoundKernel{found->kernel, *loaded, true};
}

}  // namespace

std::string KernelName(std::string_view key) { return "kernel " + std::string(key.substr(0, 12)); }

ffi::ErrorOr<LoadedKernel> GetKernel(const KernelImage& image) {
  const ffi::ErrorOr<const Libraries*> libraries = OpenLibraries();
  if (libraries.has_error()) return ffi::Unexpected(libraries.error());
  int device = 0;
  if (int error = (*libraries)->get_device(&device); error != 0) {
    return Failure(ffi::ErrorCode::kInternal, "no CUDA device is current: " + CudaErrorText(**libraries, error) + ".");
  }
  KnownCall& known = PlaceOf(image, device);
  if (known.Is(image, device)) return LoadedKernel{*libraries, known.function, false};
  try {
    const ffi::ErrorOr<FoundKernel> found = LookupOrLoad(**libraries, image, device);
    if (found.has_error()) return ffi::Unexpected(found.error());
    known = KnownCall{image.object.data(), device, &*found->kernel, found->function};
    return LoadedKernel{*libraries, found->function, found->is_new};
  } catch (const std::bad_alloc&) {
    return Failure(ffi::ErrorCode::kResourceExhausted,
                   "there is too little host memory to load " + KernelName(image.key) + ".");
  }
}

}  // namespace jax_fastattn
