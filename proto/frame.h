// Bulk messages (PutRequest, GetReply) <-> grpc::ByteBuffer without a copy of the payload. On the wire they are
// ordinary protobuf messages whose last field is `data`: a header slice (all other fields, then tag and length of
// `data`) followed by slices of the sender's memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "grpcpp/support/byte_buffer.h"
#include "kvferry/v1/cache.pb.h"
#include "storage/base/bytes.h"

namespace kvferry {

// As many bytes of `data` as a sender puts into one message; a larger block goes in several.
inline constexpr uint64_t kMaxFrameData = kMiB;
// What both sides allow gRPC to receive. Larger messages are refused from their header.
inline constexpr int kMaxMessageBytes = static_cast<int>(4 * kMiB + 64 * kKiB);

// Bytes to send, and what keeps them in place until the wire is done with them.
struct PinnedBytes {
  ByteView bytes;
  std::shared_ptr<const void> pin;
};

// `header.data` must be empty: `data` follows instead. The sizes of the header's pieces must add up to it.
grpc::ByteBuffer EncodeFrame(const v1::PutRequest& header, absl::Span<const PinnedBytes> data);
grpc::ByteBuffer EncodeFrame(const v1::GetReply& header, absl::Span<const PinnedBytes> data);

// The received bytes of `data`, read from front to back. Move-only. Threads: one at a time.
class FramePayload {
 public:
  using Pieces = absl::InlinedVector<ByteView, 1>;

  FramePayload() = default;
  FramePayload(std::vector<ByteView> views, std::shared_ptr<const void> pin);
  FramePayload(FramePayload&&) = default;
  FramePayload& operator=(FramePayload&&) = default;

  uint64_t remaining() const { return remaining_; }
  // Views of the next `n` bytes, valid while pin() is held. REQUIRES: n <= remaining().
  Pieces Take(uint64_t n);
  const std::shared_ptr<const void>& pin() const { return pin_; }

 private:
  std::vector<ByteView> views_;
  std::shared_ptr<const void> pin_;
  size_t view_ = 0;
  uint64_t offset_ = 0;  // within views_[view_]
  uint64_t remaining_ = 0;
};

template <typename Message>
struct Frame {
  Message header;  // its `data` is empty
  FramePayload payload;
};

// INVALID_ARGUMENT naming what is wrong: no protobuf message, cut short, known fields after `data`, or pieces whose
// sizes do not add up to `data`. After success the sizes of the header's pieces sum to payload.remaining(). Unknown
// fields are skipped.
absl::StatusOr<Frame<v1::PutRequest>> DecodePut(const grpc::ByteBuffer& buffer);
absl::StatusOr<Frame<v1::GetReply>> DecodeGet(const grpc::ByteBuffer& buffer);

// The same two ways for messages without bulk bytes, where a raw method gives or takes them as a buffer.
grpc::ByteBuffer EncodeMessage(const google::protobuf::MessageLite& message);
absl::Status DecodeMessage(const grpc::ByteBuffer& buffer, google::protobuf::MessageLite* message);

}  // namespace kvferry
