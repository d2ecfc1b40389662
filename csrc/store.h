// SPDX-FileCopyrightText: 2026 The jax_fastattn authors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels that this process knows, by the SHA-256 of their objects. XLA instantiates each custom call before its
// first launch. The object that the call carries is compared then, so that a launch needs its digest alone. A kernel is
// loaded when a device first launches it and stays loaded: XLA may replay a captured launch at any time.

#ifndef JAX_FASTATTN_CSRC_STORE_H_
#define JAX_FASTATTN_CSRC_STORE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "libraries.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fastattn {

struct LoadedKernel {
  const Libraries* libraries;
  CuteFunction* function;
};

// Adds the object that a custom call carries (zlib, then base64; `object_size` bytes of ELF with the cubin and its
// launcher), or fails if another one has the same digest. Loads nothing and needs no GPU. Thread-safe.
xla::ffi::Error AddKernel(std::string_view key, std::string_view digest, std::string_view object, int32_t object_size);

// The kernel with this digest, loaded on the device of the current CUDA context. Thread-safe.
xla::ffi::ErrorOr<LoadedKernel> GetKernel(std::string_view key, std::string_view arch, std::string_view digest);

// A kernel's name in messages.
std::string KernelName(std::string_view key);

}  // namespace jax_fastattn

#endif  // JAX_FASTATTN_CSRC_STORE_H_
