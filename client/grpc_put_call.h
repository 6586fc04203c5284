// The long-lived Put stream of one connection.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "client/grpc_connection.h"
#include "client/transport_counters.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/client_callback.h"
#include "proto/frame.h"
#include "storage/base/chunk_writer.h"
#include "storage/base/key.h"
#include "storage/base/mutex.h"

namespace kvferry {

// A block on its way to the store.
struct OutgoingBlock {
  BlockKey key;
  uint64_t checksum = 0;
  PinnedBytes data;
  CommitDone done;  // called once
};

// Sends blocks in the order they are added, as many in one message as fit and a large one in several, without a copy of
// a byte, and calls their `done` on gRPC's threads as the store acknowledges them or when the stream ends. It keeps
// itself alive until gRPC is done with it. Thread-safe.
class PutCall : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // Null if the connection has been cancelled.
  static std::shared_ptr<PutCall> Open(std::shared_ptr<Connection> connection, std::string url,
                                       std::shared_ptr<TransportCounters> counters);

  // False, with `block` untouched, if the stream has ended.
  bool Add(OutgoingBlock& block);

  // Cancels: what is not acknowledged fails.
  void End() { context_->TryCancel(); }

 private:
  struct Unacknowledged {
    uint64_t bytes = 0;
    CommitDone done;
  };

  PutCall(std::shared_ptr<Connection> connection, std::string url, std::shared_ptr<TransportCounters> counters);
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  // Sends the next message. Run by whoever set writing_, until the queue is empty or the stream has ended.
  void WriteNext();
  void Acknowledge(const v1::PutReply& reply);
  void Finish(Unacknowledged block, absl::Status status);
  void FailAll(const absl::Status& why);

  const std::shared_ptr<Connection> connection_;
  const std::string url_;
  const std::shared_ptr<TransportCounters> counters_;
  std::shared_ptr<grpc::ClientContext> context_;
  std::shared_ptr<PutCall> self_;  // until OnDone
  grpc::ByteBuffer message_;       // of the write in progress
  grpc::ByteBuffer reply_;         // of the read in progress
  uint64_t sent_of_front_ = 0;     // bytes of a large block at the queue's front; the writer's alone

  Mutex mu_;
  std::deque<OutgoingBlock> queue_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<BlockKey, Unacknowledged> unacknowledged_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;   // no read will follow
  bool failed_ ABSL_GUARDED_BY(mu_) = false;  // no block is taken any more
};

}  // namespace kvferry
