// Hints for whoever reads many blocks in order.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "storage/base/key.h"

namespace kvferry {

// Which chunks to hint to Store::Prefetch: those that come next, a few ahead of the reader, each once. Threads: one at
// a time.
class ReadAhead {
 public:
  static constexpr size_t kMostChunks = 8;

  explicit ReadAhead(size_t blocks) : blocks_(blocks) {}

  // What to hint now that the block at `index` is asked for; indices ascend. `chunk_of` is null for a block without.
  std::vector<ChunkKey> Reach(size_t index, absl::FunctionRef<const ChunkKey*(size_t index)> chunk_of);

 private:
  const size_t blocks_;
  size_t next_ = 0;           // the first block that has not been looked at
  std::deque<size_t> ahead_;  // the first blocks of chunks that were hinted and are not reached
  absl::flat_hash_set<ChunkKey> seen_;
};

}  // namespace kvferry
