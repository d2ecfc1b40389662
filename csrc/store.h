// SPDX-FileCopyrightText: 2026 The jax_fastattn authors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels that this process knows, by the SHA-256 of their objects. A kernel is loaded when a device first asks for
// it and stays loaded: XLA may replay a captured launch at any time.

#ifndef JAX_FASTATTN_CSRC_STORE_H_
#define JAX_FASTATTN_CSRC_STORE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "libraries.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fastattn {

// What a custom call carries of its kernel. XLA keeps it at one place as long as the executable lives.
struct KernelImage {
  std::string_view key;     // names the kernel in messages
  std::string_view arch;    // such as "sm_90a"
  std::string_view digest;  // SHA-256 of the ELF object
  std::string_view object;  // ELF object with the cubin and its launcher: zlib, then base64
  int32_t object_size;      // bytes of the ELF object
};

struct LoadedKernel {
  const Libraries* libraries;
  CuteFunction* function;
  bool is_new;  // this call loaded it
};

// As cuda.h numbers it.
constexpr int kCaptureModeRelaxed = 2;

// The kernel, loaded on the device of the current CUDA context. Fails if another object with the same digest is known.
// Whole objects are compared when a call first asks, not later. It is thread-safe, and waits for a load of another
// thread only if it must load: a load may wait for the work of a GPU, and that work for launches of other threads.
xla::ffi::ErrorOr<LoadedKernel> GetKernel(const KernelImage& image);

// A kernel's name in messages.
std::string KernelName(std::string_view key);

}  // namespace jax_fastattn

#endif  // JAX_FASTATTN_CSRC_STORE_H_
