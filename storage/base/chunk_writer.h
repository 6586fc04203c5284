// How the bytes of a chunk get in: reserve, pack each layer in place, commit each layer.
#pragma once

#include <cstdint>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "storage/base/bytes.h"
#include "storage/base/checksum.h"
#include "storage/base/key.h"

namespace kvferry {

// Called once, never under a lock of ours, possibly on another thread and possibly before Commit returns.
// OK: the owning session reads the block from now on. Anything else: the block is not stored.
using CommitDone = absl::AnyInvocable<void(absl::Status)>;

// One reserved, not yet visible chunk. Destroying it before its last layer is committed aborts it: nobody else has seen
// it, and its space is reused once no write into it can still run.
// Threads: different layers may be packed and committed by different threads; one layer by one thread at a time.
class ChunkWriter {
 public:
  virtual ~ChunkWriter() = default;

  // The chunk's live key: {session, counter}.
  virtual const ChunkKey& key() const = 0;

  // Memory of exactly this layer's slot, to be packed by the caller: the only copy of the client's data. The bytes are
  // unspecified at first. REQUIRES: layer < number of slots of the chunk's layout. The memory stays readable by the
  // caller until the writer is destroyed or Discard(layer); it must not be written after Commit.
  virtual MutableByteView Layer(int layer) = 0;

  // Hands layer `layer` over. `sum` has the BlockChecksum() of its bytes, and whether all its elements are finite: one
  // that is not can be read, but keeps the chunk from being published. Committing a layer twice is
  // FAILED_PRECONDITION. The commit of the last missing layer seals the chunk.
  virtual void Commit(int layer, BlockSum sum, CommitDone done) = 0;

  // The caller will not read Layer(layer) again: a transport that lent its own memory may free it, once the commit has
  // been acknowledged.
  virtual void Discard(int layer) = 0;
};

}  // namespace kvferry
