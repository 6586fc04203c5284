// What the service keeps for one session beside the store: the namespaces it opened and the chunks it is writing.
#pragma once

#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "service/reserved_chunk.h"
#include "storage/base/chunk_image.h"
#include "storage/base/key.h"
#include "storage/base/mutex.h"
#include "storage/base/namespace_spec.h"

namespace kvferry {

// Reserved chunks belong to the session and not to a stream: they survive a broken Put. Thread-safe; writers are never
// destroyed under its lock.
class SessionChunks {
 public:
  static constexpr size_t kMaxNamespaces = 4096;

  // REQUIRES: Validate(spec) is OK. RESOURCE_EXHAUSTED beyond kMaxNamespaces.
  absl::Status AddNamespace(const NamespaceId& ns, const NamespaceSpec& spec);
  // NOT_FOUND if this session has not opened the namespace; INVALID_ARGUMENT if the spec has no such group.
  absl::StatusOr<std::shared_ptr<const ChunkLayout>> Layout(const NamespaceId& ns, int group) const;

  // Nothing can belong to a session that has opened no namespace.
  bool empty() const;

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
  absl::flat_hash_map<NamespaceId, std::vector<std::shared_ptr<const ChunkLayout>>> layouts_ ABSL_GUARDED_BY(mu_);
  ChunkMap chunks_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvferry
