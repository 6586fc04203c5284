// Received messages -> blocks. No gRPC calls in here.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/transport_counters.h"
#include "proto/frame.h"
#include "storage/base/block_view.h"

namespace kvferry {

// Puts the pieces of a Get's replies together again, blocks in the order of the keys asked for. Not thread-safe.
class BlockAssembler {
 public:
  BlockAssembler(size_t keys, std::shared_ptr<TransportCounters> counters)
      : keys_(keys), counters_(std::move(counters)) {}

  // Appends the blocks that `frame` completes to `blocks`: views of the frame's memory, counted as in flight while they
  // live, or the error of that block alone. INTERNAL if the pieces do not follow one another.
  absl::Status Add(Frame<v1::GetReply> frame, std::vector<absl::StatusOr<BlockView>>* blocks);

 private:
  struct Pin;

  absl::Status Check(const v1::GetPiece& piece) const;

  const size_t keys_;
  const std::shared_ptr<TransportCounters> counters_;
  size_t index_ = 0;  // of the block in progress
  uint64_t have_ = 0;
  uint64_t size_ = 0;
  BlockView::Pieces pieces_;
  std::shared_ptr<Pin> pin_;
};

}  // namespace kvferry
