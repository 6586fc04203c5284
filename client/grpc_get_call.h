// One Get call.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/grpc_connection.h"
#include "client/received_block.h"
#include "client/transport_counters.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/client_callback.h"
#include "storage/base/block_view.h"
#include "storage/base/key.h"
#include "storage/base/mutex.h"

namespace kvferry {

// Reads ahead of its consumer on gRPC's threads, up to kReadAhead bytes; then the wire's flow control holds the store
// back. It keeps itself alive until gRPC is done with it. Thread-safe; one consumer.
class GetCall : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  static constexpr uint64_t kReadAhead = 32 * kMiB;

  // Null if the connection has been cancelled.
  static std::shared_ptr<GetCall> Start(std::shared_ptr<Connection> connection, absl::Span<const BlockKey> keys,
                                        absl::Time deadline, std::shared_ptr<TransportCounters> counters);

  // The next block or its own error, in the order of the keys; empty at the end of the call, whose status is then in
  // `end` (OK: after the last block), and if nothing came by `deadline`.
  std::optional<absl::StatusOr<BlockView>> Next(absl::Time deadline, absl::Status* end);

  // The consumer has gone.
  void Abandon();

  const Connection& connection() const { return *connection_; }

 private:
  GetCall(std::shared_ptr<Connection> connection, size_t keys, std::shared_ptr<TransportCounters> counters)
      : connection_(std::move(connection)), assembler_(keys, std::move(counters)) {}
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;
  void SetEnd(absl::Status end);  // the first one counts

  const std::shared_ptr<Connection> connection_;
  std::shared_ptr<grpc::ClientContext> context_;
  std::shared_ptr<GetCall> self_;  // until OnDone
  grpc::ByteBuffer request_;
  grpc::ByteBuffer reply_;    // of the read in progress
  BlockAssembler assembler_;  // the reader's alone

  Mutex mu_;
  CondVar cv_;
  std::deque<absl::StatusOr<BlockView>> ready_ ABSL_GUARDED_BY(mu_);
  uint64_t ready_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  bool waiting_ ABSL_GUARDED_BY(mu_) = false;  // the consumer
  bool reading_ ABSL_GUARDED_BY(mu_) = true;   // false: paused, the consumer goes on; or the last read has ended
  bool ended_ ABSL_GUARDED_BY(mu_) = false;    // no read will follow
  bool abandoned_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status malformed_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvferry
