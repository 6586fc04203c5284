// What the service keeps for one session beside the store: the chunks it is writing.
#pragma once

#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "service/reserved_chunk.h"
#include "storage/base/chunk_image.h"
#include "storage/base/key.h"
#include "storage/base/mutex.h"

namespace kvferry {

// Reserved chunks belong to the session and not to a stream: they survive a broken Put. Thread-safe; writers are never
// destroyed under its lock.
class SessionChunks {
 public:
  // The session has opened a namespace: before that nothing can belong to it.
  void MarkUsed();
  bool used() const;

  // True the first time that a release with this number comes; numbers grow.
  bool TakeRelease(uint64_t seq);
  // The number of the last one.
  uint64_t released() const;

  // False once Close() was called; the writers are then aborted.
  bool Add(std::vector<std::unique_ptr<ChunkWriter>> writers, std::shared_ptr<const ChunkLayout> layout);
  std::shared_ptr<ReservedChunk> Find(const ChunkKey& key) const;
  // Forget them: what is not sealed is aborted as soon as no copy into it is running.
  void Drop(absl::Span<const ChunkKey> keys);
  void DropUntouched(absl::Span<const ChunkKey> keys);
  void DropAll();
  // The session has ended: as DropAll, for good.
  void Close();

 private:
  using ChunkMap = absl::flat_hash_map<ChunkKey, std::shared_ptr<ReservedChunk>>;

  mutable Mutex mu_;
  ChunkMap chunks_ ABSL_GUARDED_BY(mu_);
  uint64_t released_ ABSL_GUARDED_BY(mu_) = 0;
  bool used_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvferry
