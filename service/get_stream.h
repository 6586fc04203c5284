// CacheStore.Get: a ReadSession on the wire.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "kvferry/v1/cache.pb.h"
#include "service/live_streams.h"
#include "service/read_session.h"
#include "service/service_context.h"
#include "service/stepper.h"

namespace kvferry {

// Writes the next batch when the last one is off; between two of them the ReadSession runs ahead by its window.
// Threads: gRPC's and the store's; all work is done in Step, one at a time.
class GetStream : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                  public LiveStream,
                  public std::enable_shared_from_this<GetStream> {
 public:
  // The reactor of one call; it lives until gRPC is done with it.
  static grpc::ServerWriteReactor<grpc::ByteBuffer>* Start(ServiceContext* context, const grpc::ByteBuffer& request);

  explicit GetStream(ServiceContext* context) : context_(context) { ++context_->stats->get_streams; }
  ~GetStream() override { --context_->stats->get_streams; }

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override { context_->streams->Remove(this); }
  void Stop() override;
  bool is_bulk() const override { return true; }

 private:
  enum class Written : int { kNothing, kOk, kFailed };

  absl::Status Open(const grpc::ByteBuffer& request);
  void Kick();
  void Step();
  void Write(std::vector<GetPiece> batch);
  void End(const absl::Status& status);

  ServiceContext* const context_;
  std::shared_ptr<ReadSession> read_;  // constant after Open
  Stepper stepper_;

  // What happened since the last step.
  std::atomic<Written> written_{Written::kNothing};
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> stop_{false};

  // Touched in Step alone.
  grpc::ByteBuffer message_;
  uint64_t in_flight_ = 0;  // bytes of message_
  bool writing_ = false;
  bool failed_ = false;
  bool ended_ = false;
};

}  // namespace kvferry
