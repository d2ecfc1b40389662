// SPDX-FileCopyrightText: 2026 The jax_fastattn authors
// SPDX-License-Identifier: Apache-2.0
//
// The shared libraries that a launch needs, opened when the first kernel is loaded: the CuTe DSL runtime, which loads
// and launches compiled objects; the CUDA driver, which knows the current device; zlib, which unpacks objects. None is
// needed to build: what is used of them is declared here.

#ifndef JAX_FASTATTN_CSRC_LIBRARIES_H_
#define JAX_FASTATTN_CSRC_LIBRARIES_H_

#include <cstddef>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_fastattn {

struct CuteModule;
struct CuteFunction;

// Every function returns zero for success, except error_name.
struct Libraries {
  int (*module_create)(CuteModule**, const unsigned char* bytes, size_t size, const char** libraries, size_t count);
  int (*module_destroy)(CuteModule*);
  int (*module_get_function)(CuteFunction**, CuteModule*, const char* prefix);
  int (*function_run)(void* function, void** arguments, size_t count);
  const char* (*error_name)(int error);

  int (*get_device)(int* device);
  int (*get_attribute)(int* value, int attribute, int device);
  int (*exchange_capture_mode)(int* mode);
  int (*error_string)(int error, const char** text);
  int (*stream_create)(void** stream, unsigned flags);
  int (*stream_destroy)(void* stream);
  int (*begin_capture)(void* stream, int mode);
  int (*end_capture)(void* stream, void** graph);
  int (*graph_destroy)(void* graph);

  int (*uncompress)(unsigned char* to, unsigned long* size, const unsigned char* from, unsigned long from_size);
};

// Says where the libraries are; zlib is one that the loader finds by name, except in tests. Has no effect on libraries
// that are open already.
void SetLibraryPaths(std::string runtime, std::string driver, std::string zlib);

// Opens the libraries, or returns the open ones. It is thread-safe, and waits for no other thread once they are open.
xla::ffi::ErrorOr<const Libraries*> OpenLibraries();

// A CUDA error as a phrase for a message.
std::string CudaErrorText(const Libraries& libraries, int error);

}  // namespace jax_fastattn

#endif  // JAX_FASTATTN_CSRC_LIBRARIES_H_
