#include "client/grpc_put_call.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "client/store_error.h"
#include "proto/codec.h"

namespace kvferry {
namespace {

constexpr char kMethod[] = "/kvferry.v1.CacheStore/Put";
constexpr size_t kMaxPieces = 1024;  // of one message; the service takes 4096

}  // namespace

PutCall::PutCall(std::shared_ptr<Connection> connection, std::string url, std::shared_ptr<TransportCounters> counters)
    : connection_(std::move(connection)), url_(std::move(url)), counters_(std::move(counters)) {}

std::shared_ptr<PutCall> PutCall::Open(std::shared_ptr<Connection> connection, std::string url,
                                       std::shared_ptr<TransportCounters> counters) {
  std::shared_ptr<PutCall> stream(new PutCall(std::move(connection), std::move(url), std::move(counters)));
  stream->context_ = stream->connection_->Begin(absl::InfiniteFuture(), [weak = std::weak_ptr<PutCall>(stream)] {
    if (const std::shared_ptr<PutCall> call = weak.lock(); call != nullptr) call->FailAll(ConnectionLost());
  });
  if (stream->context_ == nullptr) return nullptr;
  stream->self_ = stream;
  stream->connection_->raw().PrepareBidiStreamingCall(stream->context_.get(), kMethod, {}, stream.get());
  stream->AddHold();  // for writes, which start outside of gRPC's callbacks; until the last read
  stream->StartRead(&stream->reply_);
  stream->StartCall();
  return stream;
}

bool PutCall::Add(OutgoingBlock& block) {
  const uint64_t bytes = block.data.bytes.size();
  {
    MutexLock lock(&mu_);
    if (ended_ || failed_) return false;
    counters_->bytes_in_flight += bytes;
    unacknowledged_[block.key] = Unacknowledged{bytes, std::move(block.done)};
    queue_.push_back(std::move(block));
    if (writing_) return true;
    writing_ = true;
  }
  WriteNext();
  return true;
}

void PutCall::WriteNext() {
  v1::PutRequest header;
  std::vector<PinnedBytes> data;
  bool let_go = false;
  {
    MutexLock lock(&mu_);
    uint64_t room = kMaxFrameData;
    while (!ended_ && room > 0 && data.size() < kMaxPieces && !queue_.empty()) {
      OutgoingBlock& front = queue_.front();
      const uint64_t size = front.data.bytes.size();
      const uint64_t left = size - sent_of_front_;
      if (left > room && !data.empty()) break;  // cut only what is too large for any message
      const uint64_t now = std::min(left, room);
      v1::PutPiece* piece = header.add_pieces();
      ToProto(front.key, piece->mutable_block());
      piece->set_offset(sent_of_front_);
      piece->set_size(now);
      piece->set_checksum(front.checksum);
      data.push_back({front.data.bytes.subspan(sent_of_front_, now), front.data.pin});
      room -= now;
      sent_of_front_ += now;
      if (sent_of_front_ == size) {
        queue_.pop_front();
        sent_of_front_ = 0;
      }
    }
    if (data.empty()) {
      writing_ = false;
      let_go = ended_;
    }
  }
  if (!data.empty()) {
    header.set_session(connection_->session());
    message_ = EncodeFrame(header, data);
    data.clear();
    StartWrite(&message_);
  } else if (let_go) {
    RemoveHold();
  }
}

void PutCall::OnWriteDone(bool ok) {
  message_.Clear();
  if (ok) return WriteNext();
  context_->TryCancel();  // the last read then ends too, and with it all that is unacknowledged
  bool let_go = false;
  {
    MutexLock lock(&mu_);
    writing_ = false;
    let_go = ended_;
  }
  if (let_go) RemoveHold();
}

void PutCall::OnReadDone(bool ok) {
  if (ok) {
    v1::PutReply reply;
    grpc::ByteBuffer buffer;
    buffer.Swap(&reply_);
    const bool parsed = grpc::SerializationTraits<v1::PutReply>::Deserialize(&buffer, &reply).ok();
    if (!parsed) context_->TryCancel();
    StartRead(&reply_);
    if (parsed) Acknowledge(reply);
    return;
  }
  bool let_go = false;
  {
    MutexLock lock(&mu_);
    ended_ = true;
    let_go = !writing_;
  }
  if (let_go) RemoveHold();
}

void PutCall::Acknowledge(const v1::PutReply& reply) {
  for (const v1::PutReply::Ack& ack : reply.acks()) {
    absl::StatusOr<BlockKey> key = FromProto(ack.block());
    if (!key.ok()) continue;
    Unacknowledged block;
    {
      MutexLock lock(&mu_);
      const auto it = unacknowledged_.find(*key);
      if (it == unacknowledged_.end()) continue;
      block = std::move(it->second);
      unacknowledged_.erase(it);
    }
    Finish(std::move(block), CallStatus(*connection_, FromWireCode(ack.code(), ack.message())));
  }
}

void PutCall::Finish(Unacknowledged block, absl::Status status) {
  counters_->bytes_in_flight -= block.bytes;
  counters_->CountPut(status.ok(), block.bytes);
  block.done(StoreError(url_, "put", status));
}

void PutCall::OnDone(const grpc::Status& status) {
  std::shared_ptr<PutCall> self = std::move(self_);
  connection_->Finish(context_);
  absl::Status why = CallStatus(*connection_, status);
  if (why.ok() || absl::IsCancelled(why)) why = absl::UnavailableError("the store ended the stream of puts");
  FailAll(why);
}

void PutCall::FailAll(const absl::Status& why) {
  std::deque<OutgoingBlock> unsent;
  absl::flat_hash_map<BlockKey, Unacknowledged> blocks;
  {
    MutexLock lock(&mu_);
    failed_ = true;
    queue_.swap(unsent);
    blocks.swap(unacknowledged_);
  }
  for (auto& [key, block] : blocks) Finish(std::move(block), why);
}

}  // namespace kvferry
