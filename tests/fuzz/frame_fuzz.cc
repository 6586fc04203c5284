// Any bytes as a bulk message, in one slice and in many: decoded or refused, and what was decoded is within the buffer
// and adds up.
#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "proto/frame.h"

namespace kvferry {
namespace {

// The bytes as a buffer whose slices end at arbitrary places, which the first byte picks.
grpc::ByteBuffer Sliced(ByteView bytes) {
  const size_t step = bytes.empty() || bytes[0] == 0 ? bytes.size() + 1 : bytes[0];
  std::vector<grpc::Slice> slices;
  for (size_t at = bytes.empty() ? 0 : 1; at < bytes.size(); at += step) {
    const ByteView piece = bytes.subspan(at, step);
    slices.emplace_back(piece.data(), piece.size());
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

template <typename Message>
void CheckDecoded(absl::StatusOr<Frame<Message>> frame) {
  if (!frame.ok()) return;
  uint64_t announced = 0;
  for (const auto& piece : frame->header.pieces()) announced += piece.size();
  if (announced != frame->payload.remaining()) std::abort();
  // Reads every byte: what points outside of the buffer is found by the address sanitizer.
  uint64_t sum = 0;
  while (frame->payload.remaining() > 0) {
    for (ByteView view : frame->payload.Take(std::min<uint64_t>(frame->payload.remaining(), 7))) {
      sum = std::accumulate(view.begin(), view.end(), sum);
    }
  }
  volatile uint64_t sink = sum;
  static_cast<void>(sink);
}

}  // namespace
}  // namespace kvferry

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const grpc::ByteBuffer buffer = kvferry::Sliced({data, size});
  kvferry::CheckDecoded(kvferry::DecodePut(buffer));
  kvferry::CheckDecoded(kvferry::DecodeGet(buffer));
  return 0;
}
