// SPDX-FileCopyrightText: 2026 The jax_fastattn authors
// SPDX-License-Identifier: Apache-2.0
//
// Stands in for the CuTe DSL runtime, the CUDA driver and zlib, so that the extension is tested without a GPU. Tests set
// the `set_*` variables and read the `seen_*` ones through ctypes.

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

thread_local int thread_device = -1;  // of this thread, if not negative, instead of set_device

extern "C" {

int set_device = 0;
int set_major = 9;
int set_minor = 0;
int set_device_error = 0;
int set_attribute_error = 0;
int set_create_status = 0;
int set_get_status = 0;
int set_get_throws = 0;
int set_run_status = 0;
int set_run_throws = 0;
int set_run_cuda_error = 0;
int set_num_buffers = 0;
int set_uncompress_error = 0;
int set_load_milliseconds = 0;  // how long a load takes

std::atomic<int> seen_loads{0};
std::atomic<int> seen_unloads{0};
std::atomic<int> seen_open_loads{0};  // that have begun and not ended
std::atomic<int> seen_overlapping_loads{0};
std::atomic<int> seen_runs{0};
std::atomic<int> seen_captured_runs{0};  // not among seen_runs
std::atomic<int> seen_runs_elsewhere{0};  // of a kernel that is loaded on another device
std::atomic<int> seen_open_captures{0};  // streams and graphs that are not destroyed
int seen_object_size = 0;
int seen_object_at_run = 0;  // size of the object whose kernel ran
int seen_attribute_reads = 0;
int seen_mode_at_load = -1;
int seen_mode = 0;  // 0: global, 1: thread local, 2: relaxed
int seen_capture_mode = -1;
unsigned seen_stream_flags = 0;
int seen_device_at_run = -1;
size_t seen_num_arguments = 0;
void* seen_buffers[32];
int seen_ints[64];  // every argument after the buffers, as an int; floats by their bits

int set_stream_error = 0;
static int captured_stream, captured_graph;

struct Module {
  int device;
  int object_size;
};

static int current_device() { return thread_device < 0 ? set_device : thread_device; }

int CuteDSLRT_Module_Create_From_Bytes(Module** module, const unsigned char*, size_t size, const char**, size_t) {
  if (seen_open_loads.fetch_add(1) != 0) ++seen_overlapping_loads;
  std::this_thread::sleep_for(std::chrono::milliseconds(set_load_milliseconds));
  ++seen_loads;
  seen_mode_at_load = seen_mode;
  seen_object_size = static_cast<int>(size);
  *module = new Module{current_device(), static_cast<int>(size)};
  --seen_open_loads;
  return set_create_status;
}

int CuteDSLRT_Module_Destroy(Module* module) {
  ++seen_unloads;
  delete module;
  return 0;
}

int CuteDSLRT_Module_Get_Function(void** function, Module* module, const char* prefix) {
  if (set_get_throws == 2) throw std::bad_alloc();
  if (set_get_throws || std::string(prefix) != "jax_fastattn") throw std::runtime_error("symbol not found");
  *function = module;
  return set_get_status;
}

int CuteDSLRT_Function_Run(void* function, void** arguments, size_t count) {
  if (static_cast<Module*>(function)->device != current_device()) ++seen_runs_elsewhere;
  if (set_run_throws) throw set_run_throws;
  if (*static_cast<void**>(arguments[count - 2]) == &captured_stream) {
    ++seen_captured_runs;
    return set_run_status;
  }
  ++seen_runs;
  seen_device_at_run = static_cast<Module*>(function)->device;
  seen_object_at_run = static_cast<Module*>(function)->object_size;
  seen_num_arguments = count;
  const size_t buffers = static_cast<size_t>(set_num_buffers);
  for (size_t i = 0; i < buffers; ++i) seen_buffers[i] = *static_cast<void**>(arguments[i]);
  for (size_t i = buffers; i < count; ++i) std::memcpy(&seen_ints[i - buffers], arguments[i], sizeof(int));
  *static_cast<int*>(arguments[count - 1]) = set_run_cuda_error;
  if (buffers > 0 && set_run_status == 0 && set_run_cuda_error == 0) {
    // The first integer, into the first element of the last result (float32): a program sees that it was launched.
    *static_cast<float*>(seen_buffers[buffers - 1]) = static_cast<float>(seen_ints[0]);
  }
  return set_run_status;
}

// As zlib's, or as if the memory of the object were damaged.
int uncompress(unsigned char* to, unsigned long* size, const unsigned char* from, unsigned long from_size) {
  static const auto function = reinterpret_cast<decltype(&uncompress)>(
      dlsym(dlopen("libz.so.1", RTLD_NOW | RTLD_LOCAL), "uncompress"));
  return set_uncompress_error != 0 ? set_uncompress_error : function(to, size, from, from_size);
}

const char* CuteDSLRT_GetErrorName(int error) { return error == 7 ? "InvalidArguments" : "CudaError"; }

int cuCtxGetDevice(int* device) {
  *device = current_device();
  return set_device_error;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
  ++seen_attribute_reads;
  if (set_attribute_error != 0) return set_attribute_error;
  if (attribute != 75 && attribute != 76) return 1;  // CUDA_ERROR_INVALID_VALUE
  *value = attribute == 75 ? set_major : set_minor;
  return 0;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, seen_mode);
  return 0;
}

int cuStreamCreate(void** stream, unsigned flags) {
  if (set_stream_error != 0) return set_stream_error;
  seen_stream_flags = flags;
  *stream = &captured_stream;
  ++seen_open_captures;
  return 0;
}

int cuStreamBeginCapture_v2(void*, int mode) { return seen_capture_mode = mode, 0; }

int cuStreamEndCapture(void*, void** graph) {
  *graph = &captured_graph;
  ++seen_open_captures;
  return 0;
}

int cuGraphDestroy(void*) { return --seen_open_captures, 0; }

int cuStreamDestroy_v2(void*) { return --seen_open_captures, 0; }

int cuGetErrorString(int error, const char** text) {
  *text = error == 700 ? "an illegal memory access was encountered" : nullptr;
  return *text == nullptr;
}

}  // extern "C"
