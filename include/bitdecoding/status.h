// SPDX-License-Identifier: Apache-2.0
// Errors as values. The library never prints, aborts or throws across its public surface; a
// function that can fail returns a Status (or a Result<T>) whose message is a sentence: what is
// wrong, what was expected, what to do.
#pragma once

#include <string>
#include <utility>
#include <variant>

#pragma GCC visibility push(default)
namespace bitdecoding {

// The numbers are part of the C ABI (bd_status) and of the command line's exit codes: never
// reuse.
enum class StatusCode : int {
  kOk = 0,
  kInvalidArgument = 1,    // the caller's value is wrong whatever the state
  kOutOfRange = 2,         // an index, slot, page or length lies outside its object
  kUnsupported = 3,        // valid, but not offered (head_dim, format, ISA, feature)
  kNotFound = 4,           // a file, key or name does not exist
  kCorrupt = 5,            // bytes that contradict their own header or format
  kIo = 6,                 // the operating system refused
  kResourceExhausted = 7,  // memory, slots or workspace are used up
  kInternal = 8,           // a defect of the library
};

const char* status_code_name(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// Either a value or a Status that is not ok.
template <class T>
class [[nodiscard]] Result {
 public:
  // Both conversions are implicit on purpose: `return value;` and `return status;`.
  // NOLINTNEXTLINE(google-explicit-constructor)
  Result(T value) : v_(std::in_place_index<0>, std::move(value)) {}
  // NOLINTNEXTLINE(google-explicit-constructor)
  Result(Status status) : v_(std::in_place_index<1>, std::move(status)) {}

  bool ok() const { return v_.index() == 0; }
  Status status() const { return ok() ? Status() : std::get<1>(v_); }
  T& value() { return std::get<0>(v_); }
  const T& value() const { return std::get<0>(v_); }
  T take() { return std::move(std::get<0>(v_)); }

 private:
  std::variant<T, Status> v_;
};

}  // namespace bitdecoding
#pragma GCC visibility pop
