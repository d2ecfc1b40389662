// SPDX-FileCopyrightText: 2026 The jax_fastattn authors
// SPDX-License-Identifier: Apache-2.0
//
// FFI handlers that pass a call on to the extension's handler, changed or more than once. The repeated calls keep their
// object at the same address, as calls of an executable do, or as those of a later executable may.

#include <cstring>
#include <string_view>
#include <thread>
#include <vector>

#include "xla/ffi/api/c_api.h"

extern thread_local int thread_device;  // in stand_in.cc

namespace {

constexpr int kNumThreads = 4;
constexpr int kCallsOfThread = 2000;

// The call with another string as one of its attributes.
class ChangedCall {
 public:
  ChangedCall(const XLA_FFI_CallFrame& frame, const char* name, const char* text)
      : frame_(frame), text_{text, std::strlen(text)} {
    values_.assign(frame.attrs.attrs, frame.attrs.attrs + frame.attrs.size);
    for (size_t i = 0; i < values_.size(); ++i) {
      const XLA_FFI_ByteSpan& found = *frame.attrs.names[i];
      if (std::string_view(found.ptr, found.len) == name) values_[i] = &text_;
    }
    frame_.attrs.attrs = values_.data();
  }
  XLA_FFI_CallFrame* frame() { return &frame_; }

 private:
  XLA_FFI_CallFrame frame_;
  XLA_FFI_ByteSpan text_;
  std::vector<void*> values_;
};

}  // namespace

extern "C" {

XLA_FFI_Handler* set_handler = nullptr;
const char* set_name = nullptr;
const char* set_text = nullptr;
int set_first_device = 0;
int set_moved_bytes = 0;
int set_is_null = 0;
int set_is_empty = 0;

// As it is, then with a changed attribute, then as it is.
XLA_FFI_Error* launch_changed(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* error = set_handler(frame); error != nullptr || frame->extension_start != nullptr) return error;
  ChangedCall changed(*frame, set_name, set_text);
  if (XLA_FFI_Error* error = set_handler(changed.frame()); error != nullptr) return error;
  return set_handler(frame);
}

// With the first operand elsewhere, which may then have no elements.
XLA_FFI_Error* launch_moved(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start != nullptr) return set_handler(frame);
  XLA_FFI_Buffer& operand = *static_cast<XLA_FFI_Buffer*>(frame->args.args[0]);
  const XLA_FFI_Buffer whole = operand;
  int64_t no_elements = 0;
  operand.data = set_is_null ? nullptr : static_cast<char*>(operand.data) + set_moved_bytes;
  if (set_is_empty) operand.dims = &no_elements;
  XLA_FFI_Error* const error = set_handler(frame);
  operand = whole;
  return error;
}

// By threads which change their device after each call. Returns an error of one of them, if there is any.
XLA_FFI_Error* launch_by_threads(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start != nullptr) return set_handler(frame);
  XLA_FFI_Error* errors[kNumThreads] = {};
  std::vector<std::thread> threads;
  for (int i = 0; i < kNumThreads; ++i) {
    threads.emplace_back([&errors, frame, i] {
      for (int call = 0; call < kCallsOfThread && errors[i] == nullptr; ++call) {
        thread_device = set_first_device + (call + i) % 2;
        errors[i] = set_handler(frame);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (XLA_FFI_Error* error : errors) {
    if (error != nullptr) return error;
  }
  return nullptr;
}

}  // extern "C"
