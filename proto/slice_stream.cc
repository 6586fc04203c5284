#include "proto/slice_stream.h"

#include <algorithm>
#include <limits>

namespace kvferry {

bool SliceStream::Next(const void** data, int* size) {
  while (slice_ < slices_.size() && offset_ == slices_[slice_].size()) {
    ++slice_;
    offset_ = 0;
  }
  if (slice_ == slices_.size() || read_ == limit_) return false;
  const uint64_t n = std::min(
      {slices_[slice_].size() - offset_, limit_ - read_, static_cast<uint64_t>(std::numeric_limits<int>::max())});
  *data = slices_[slice_].begin() + offset_;
  *size = static_cast<int>(n);
  offset_ += n;
  read_ += n;
  return true;
}

// `count` is at most what the last Next returned, so it stays within one slice.
void SliceStream::BackUp(int count) {
  offset_ -= count;
  read_ -= count;
}

bool SliceStream::Skip(int count) {
  const void* data;
  int size;
  while (count > 0) {
    if (!Next(&data, &size)) return false;
    if (size > count) BackUp(size - count);
    count -= std::min(count, size);
  }
  return true;
}

}  // namespace kvferry
