// CacheStore.Reserve: the one unary call that waits.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "service/live_streams.h"
#include "service/service_context.h"
#include "storage/base/mutex.h"

namespace kvferry {

// Answers when the store does, or at once when the client goes away or the service stops; what the store then gives is
// handed back. Also what was reserved for a client that could not be told. Threads: any.
class ReserveCall : public grpc::ServerUnaryReactor,
                    public LiveStream,
                    public std::enable_shared_from_this<ReserveCall> {
 public:
  // The reactor of one call; it lives until gRPC is done with it, and until then the reply does.
  static grpc::ServerUnaryReactor* Start(ServiceContext* context, grpc::CallbackServerContext* call,
                                         const grpc::ByteBuffer& request, grpc::ByteBuffer* reply);

  ReserveCall(ServiceContext* context, grpc::ByteBuffer* reply) : context_(context), reply_(reply) {}

  void OnCancel() override;
  void OnDone() override { context_->streams->Remove(this); }
  void Stop() override { Answer(absl::UnavailableError("the service is draining")); }
  bool is_bulk() const override { return false; }

 private:
  absl::Status Open(grpc::CallbackServerContext* call, const grpc::ByteBuffer& bytes);
  void Reserved(absl::StatusOr<std::vector<std::unique_ptr<ChunkWriter>>> writers);
  void Answer(const absl::Status& status);

  ServiceContext* const context_;
  grpc::ByteBuffer* const reply_;              // written before the answer alone
  std::shared_ptr<SessionChunks> chunks_;      // constant after Open
  std::shared_ptr<const ChunkLayout> layout_;  // constant after Open
  std::atomic<bool> answered_{false};
  const std::shared_ptr<std::atomic<bool>> given_up_ = std::make_shared<std::atomic<bool>>(false);  // for the store

  Mutex mu_;
  std::vector<ChunkKey> reserved_ ABSL_GUARDED_BY(mu_);  // what the client was told of
};

}  // namespace kvferry
