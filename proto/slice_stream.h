// The slices of a received message as the input stream that protobuf parses from.
#pragma once

#include <cstdint>
#include <vector>

#include "google/protobuf/io/zero_copy_stream.h"
#include "grpcpp/support/slice.h"

namespace kvferry {

// Reads the first `limit` bytes of `slices`, which must outlive it. Not thread-safe.
class SliceStream : public google::protobuf::io::ZeroCopyInputStream {
 public:
  SliceStream(const std::vector<grpc::Slice>* slices, uint64_t limit) : slices_(*slices), limit_(limit) {}

  bool Next(const void** data, int* size) override;
  void BackUp(int count) override;
  bool Skip(int count) override;
  int64_t ByteCount() const override { return static_cast<int64_t>(read_); }

 private:
  const std::vector<grpc::Slice>& slices_;
  const uint64_t limit_;
  size_t slice_ = 0;     // the slice that the next byte lies in
  uint64_t offset_ = 0;  // of the next byte within it
  uint64_t read_ = 0;
};

}  // namespace kvferry
