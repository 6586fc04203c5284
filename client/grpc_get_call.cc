#include "client/grpc_get_call.h"

#include <utility>

#include "client/interrupt.h"
#include "proto/codec.h"
#include "proto/frame.h"

namespace kvferry {
namespace {

constexpr char kMethod[] = "/kvferry.v1.CacheStore/Get";

grpc::ByteBuffer Encode(SessionId session, absl::Span<const BlockKey> keys) {
  v1::GetRequest request;
  request.set_session(session);
  for (const BlockKey& key : keys) ToProto(key, request.add_keys());
  grpc::Slice slice(request.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

std::shared_ptr<GetCall> GetCall::Start(std::shared_ptr<Connection> connection, absl::Span<const BlockKey> keys,
                                        absl::Time deadline, std::shared_ptr<TransportCounters> counters) {
  std::shared_ptr<GetCall> call(new GetCall(std::move(connection), keys.size(), std::move(counters)));
  call->context_ = call->connection_->Begin(deadline, [weak = std::weak_ptr<GetCall>(call)] {
    if (const std::shared_ptr<GetCall> cancelled = weak.lock(); cancelled != nullptr)
      cancelled->SetEnd(ConnectionLost());
  });
  if (call->context_ == nullptr) return nullptr;
  call->self_ = call;
  call->request_ = Encode(call->connection_->session(), keys);
  // gRPC 1.51 has no generic server-streaming call; on the wire a bidirectional one with one message in is the same.
  call->connection_->raw().PrepareBidiStreamingCall(call->context_.get(), kMethod, {}, call.get());
  call->AddHold();  // for reads that the consumer starts; until the last read
  call->StartWriteLast(&call->request_, grpc::WriteOptions());
  call->StartRead(&call->reply_);
  call->StartCall();
  return call;
}

std::optional<absl::StatusOr<BlockView>> GetCall::Next(absl::Time deadline, absl::Status* end) {
  std::optional<absl::StatusOr<BlockView>> block;
  bool go_on = false;
  {
    MutexLock lock(&mu_);
    waiting_ = true;
    while (ready_.empty() && !end_.has_value()) {
      if (WaitUntil(cv_, &mu_, deadline) && ready_.empty() && !end_.has_value()) {
        waiting_ = false;
        *end = absl::DeadlineExceededError("no block by the deadline");
        return std::nullopt;
      }
    }
    waiting_ = false;
    if (ready_.empty()) {
      *end = malformed_.ok() ? *end_ : malformed_;
      return std::nullopt;
    }
    block.emplace(std::move(ready_.front()));
    ready_.pop_front();
    if (block->ok()) ready_bytes_ -= (*block)->size();
    go_on = !reading_ && !ended_ && ready_bytes_ < kReadAhead;
    reading_ = reading_ || go_on;
  }
  if (go_on) StartRead(&reply_);
  return block;
}

void GetCall::Abandon() {
  bool let_go = false;
  {
    MutexLock lock(&mu_);
    abandoned_ = true;
    let_go = !reading_ && !ended_;
    ended_ = ended_ || let_go;
  }
  context_->TryCancel();
  if (let_go) RemoveHold();
}

void GetCall::OnReadDone(bool ok) {
  std::vector<absl::StatusOr<BlockView>> blocks;
  absl::Status status;
  if (ok) {
    absl::StatusOr<Frame<v1::GetReply>> frame = DecodeGet(reply_);
    reply_.Clear();
    status = frame.ok() ? assembler_.Add(*std::move(frame), &blocks) : absl::InternalError(frame.status().message());
    if (!status.ok()) context_->TryCancel();
  }
  bool go_on = false, ended = false;
  {
    MutexLock lock(&mu_);
    for (absl::StatusOr<BlockView>& block : blocks) {
      if (block.ok()) ready_bytes_ += block->size();
      ready_.push_back(std::move(block));
    }
    if (!status.ok()) malformed_ = status;
    ended_ = !ok || !status.ok() || abandoned_;
    go_on = !ended_ && ready_bytes_ < kReadAhead;
    reading_ = go_on;
    ended = ended_;
    if (waiting_ && !ready_.empty()) cv_.NotifyOne();
  }
  if (go_on) StartRead(&reply_);
  if (ended) RemoveHold();
}

void GetCall::OnDone(const grpc::Status& status) {
  std::shared_ptr<GetCall> self = std::move(self_);
  connection_->Finish(context_);
  SetEnd(CallStatus(*connection_, status));
}

void GetCall::SetEnd(absl::Status end) {
  MutexLock lock(&mu_);
  if (!end_.has_value()) end_ = std::move(end);
  cv_.NotifyOne();
}

}  // namespace kvferry
