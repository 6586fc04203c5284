// One stream of puts, without any gRPC.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "service/client_sessions.h"
#include "service/service_stats.h"
#include "storage/base/bytes.h"
#include "storage/base/key.h"
#include "storage/base/mutex.h"
#include "storage/store.h"

namespace kvferry {

// A run of bytes of one block, as received.
struct PutPiece {
  BlockKey block;
  uint64_t offset = 0;
  uint64_t checksum = 0;  // of the whole block
  absl::InlinedVector<ByteView, 1> bytes;
};

struct PutAck {
  BlockKey block;
  absl::Status status;
};

// Copies each byte once, from the received slices into the chunk, checks the sum when the block is whole and commits
// it. Every block that begins gets exactly one acknowledgement. The pieces of a block come one after another; a block
// begins with the piece at offset 0, so one that was cut short is sent anew from there. What is wrong with a block
// fails that block alone.
//
// A block that is stored already is acknowledged again if it has the same checksum, else it is ALREADY_EXISTS: the
// first one stays.
//
// Between two calls of Receive only a weak reference to the chunk is kept: a client that stalls in the middle of a
// block does not keep the memory from its next owner.
//
// Threads: Receive, EndOfInput, idle and Close by one thread at a time; the others by any.
class WriteSession : public std::enable_shared_from_this<WriteSession> {
 public:
  // `on_acks` is called, never under a lock, when there are acknowledgements to take and none were before.
  WriteSession(Store* store, const ClientSessions* sessions, ServiceStats* stats, std::function<void()> on_acks);
  ~WriteSession() { Close(); }

  // NOT_FOUND if the session is not there any more; then none of the pieces was looked at.
  absl::Status Receive(SessionId session, absl::Span<const PutPiece> pieces);
  // The client sends no more: a block that is not whole has failed.
  void EndOfInput();
  // Gives up a block that is not whole. No more Receive after it.
  void Close();

  std::vector<PutAck> TakeAcks(size_t most);
  size_t backlog() const;  // acknowledgements not taken or not yet made
  // No block is half way and no acknowledgement is owed. Called as Receive is.
  bool idle() const { return (!block_.open || block_.failed) && backlog() == 0; }

 private:
  // The block whose pieces are arriving. Once `failed`, its pieces are passed over: it has its acknowledgement.
  struct Block {
    BlockKey key;
    std::weak_ptr<ReservedChunk> chunk;
    uint64_t size = 0;
    uint64_t received = 0;
    bool open = false, failed = false, claimed = false;
  };

  using ChunksPtr = std::shared_ptr<SessionChunks>;

  void Begin(SessionId session, const ChunksPtr& chunks, const PutPiece& piece, uint64_t size);
  void Copy(const ChunksPtr& chunks, const PutPiece& piece, uint64_t size);
  void Commit(const ChunksPtr& chunks, std::shared_ptr<ReservedChunk> chunk, uint64_t checksum);
  void AckFromStore(SessionId session, const PutPiece& piece);  // for a block that is not reserved
  void Fail(absl::Status status);
  void FailIfOpen(absl::string_view when);
  void Unclaim();
  void PushAck(const BlockKey& key, absl::Status status, bool was_pending);

  Store* const store_;
  const ClientSessions* const sessions_;
  ServiceStats* const stats_;
  const std::function<void()> on_acks_;

  Block block_;

  mutable Mutex mu_;
  std::deque<PutAck> acks_ ABSL_GUARDED_BY(mu_);
  size_t pending_ ABSL_GUARDED_BY(mu_) = 0;      // acknowledgements the store will make
  bool receiving_ ABSL_GUARDED_BY(mu_) = false;  // on_acks is called once, at the end of Receive
};

}  // namespace kvferry
