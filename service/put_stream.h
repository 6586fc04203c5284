// CacheStore.Put: a WriteSession on the wire.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>

#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "kvferry/v1/cache.pb.h"
#include "service/live_streams.h"
#include "service/service_context.h"
#include "service/stepper.h"
#include "service/write_session.h"

namespace kvferry {

// Reads the next message only when the last one is in the store's memory and the client takes its acknowledgements, so
// a slow store or a client that does not listen slows the sender down and nothing piles up here. Threads: gRPC's and
// the store's; all work is done in Step, one at a time.
class PutStream : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                  public LiveStream,
                  public std::enable_shared_from_this<PutStream> {
 public:
  // The reactor of one call; it lives until gRPC is done with it.
  static grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Start(ServiceContext* context);

  explicit PutStream(ServiceContext* context) : context_(context) { ++context_->stats->put_streams; }
  ~PutStream() override { --context_->stats->put_streams; }

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override { context_->streams->Remove(this); }
  void Stop() override;
  bool is_bulk() const override { return busy_; }

 private:
  enum class Event : int { kNothing, kOk, kFailed };

  void Kick();
  void Step();
  void Advance();
  absl::Status Receive();
  void RefuseBadKey(const v1::PutPiece& piece, const absl::Status& why);
  void WriteAcks();
  void End(const absl::Status& status);

  ServiceContext* const context_;
  std::shared_ptr<WriteSession> write_;  // constant after Start
  Stepper stepper_;

  // What happened since the last step.
  std::atomic<Event> read_done_{Event::kNothing};
  std::atomic<Event> write_done_{Event::kNothing};
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> stop_{false};
  std::atomic<bool> busy_{false};  // a block is half way, or an acknowledgement is owed or being sent

  // Touched in Step alone.
  grpc::ByteBuffer incoming_;
  grpc::ByteBuffer outgoing_;
  std::deque<v1::PutReply::Ack> bad_keys_;  // acknowledgements of blocks whose keys have no value of ours
  std::string bad_block_;                   // the last one of these, as it came
  uint64_t bad_received_ = 0;               // of it
  absl::Status refusal_;                    // why nothing more is read
  bool reading_ = false;
  bool writing_ = false;
  bool half_closed_ = false;
  bool failed_ = false;
  bool ended_ = false;
};

}  // namespace kvferry
