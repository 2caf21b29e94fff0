// SPDX-License-Identifier: Apache-2.0
// Memory of kernels: aligned to cache lines, not initialised, kept when it shrinks.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <type_traits>

namespace bitdecoding::cpu {

template <class T>
class AlignedBuffer {
  static_assert(std::is_trivial_v<T>);

 public:
  static constexpr std::align_val_t kAlignment{64};

  // At least `n` elements; what was there is lost when it grows.
  T* reserve(std::size_t n) {
    if (n > capacity_) {
      data_.reset();
      capacity_ = 0;
      data_.reset(static_cast<T*>(::operator new(n * sizeof(T), kAlignment)));
      capacity_ = n;
    }
    return data_.get();
  }
  T* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<T, Free> data_;
  std::size_t capacity_ = 0;
};

}  // namespace bitdecoding::cpu
