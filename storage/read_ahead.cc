#include "storage/read_ahead.h"

namespace kvferry {

std::vector<ChunkKey> ReadAhead::Reach(size_t index, absl::FunctionRef<const ChunkKey*(size_t index)> chunk_of) {
  std::vector<ChunkKey> hints;
  while (!ahead_.empty() && ahead_.front() <= index) ahead_.pop_front();
  for (; next_ < blocks_ && ahead_.size() < kMostChunks; ++next_) {
    const ChunkKey* const chunk = chunk_of(next_);
    if (chunk == nullptr || !seen_.insert(*chunk).second || next_ <= index) continue;
    hints.push_back(*chunk);
    ahead_.push_back(next_);
  }
  return hints;
}

}  // namespace kvferry
