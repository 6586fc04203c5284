// Memory that reads and writes can go past the page cache with.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "storage/base/bytes.h"
#include "storage/disk/file.h"

namespace kvferry {

// Whole blocks at a multiple of kDiskAlignment, zero at first.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(uint64_t bytes) : size_(RoundUp(bytes, kDiskAlignment)) {
    data_.reset(static_cast<uint8_t*>(std::aligned_alloc(kDiskAlignment, size_)));
    if (data_ == nullptr && size_ != 0) throw std::bad_alloc();
    std::memset(data_.get(), 0, size_);
  }

  MutableByteView view() { return {data_.get(), size_}; }
  ByteView view() const { return {data_.get(), size_}; }
  uint64_t size() const { return size_; }

 private:
  struct Free {
    void operator()(uint8_t* data) const { std::free(data); }
  };
  std::unique_ptr<uint8_t, Free> data_;
  uint64_t size_ = 0;
};

}  // namespace kvferry
