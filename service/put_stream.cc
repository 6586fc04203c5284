#include "service/put_stream.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

constexpr int kMaxAcksInMessage = 1024;
constexpr size_t kMaxBacklog = 4096;  // acknowledgements the client has not taken, beyond which nothing is read
constexpr size_t kMaxAckMessage = 512;
constexpr int kMaxPiecesInMessage = 4096;  // each may need an acknowledgement

void SetStatus(const absl::Status& status, v1::PutReply::Ack* ack) {
  if (status.ok()) return;
  ack->set_code(ToWireCode(status));
  ack->set_message(std::string(status.message().substr(0, kMaxAckMessage)));
}

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* PutStream::Start(ServiceContext* context) {
  auto stream = std::make_shared<PutStream>(context);
  stream->write_ = std::make_shared<WriteSession>(context->store, context->sessions, context->stats,
                                                  [weak = std::weak_ptr<PutStream>(stream)] {
                                                    if (const auto self = weak.lock(); self != nullptr) self->Kick();
                                                  });
  context->streams->Add(stream);
  stream->Kick();
  return stream.get();
}

void PutStream::OnReadDone(bool ok) {
  read_done_ = ok ? Event::kOk : Event::kFailed;
  Kick();
}

void PutStream::OnWriteDone(bool ok) {
  write_done_ = ok ? Event::kOk : Event::kFailed;
  Kick();
}

void PutStream::OnCancel() {
  cancelled_ = true;
  Kick();
}

void PutStream::Stop() {
  stop_ = true;
  Kick();
}

void PutStream::Kick() {
  const auto self = shared_from_this();  // the step may end the call and with it the owner's reference
  stepper_.Kick([this] { Step(); });
}

void PutStream::Step() {
  Advance();
  const bool busy = !ended_ && (writing_ || !bad_keys_.empty() || !write_->idle());
  if (busy_.exchange(busy) && !busy && context_->draining) context_->streams->NoteIdle();
}

void PutStream::Advance() {
  if (ended_) return;
  if (const Event event = write_done_.exchange(Event::kNothing); event != Event::kNothing) {
    writing_ = false;
    failed_ = event == Event::kFailed;
  }
  if (const Event event = read_done_.exchange(Event::kNothing); event != Event::kNothing) {
    reading_ = false;
    if (event == Event::kFailed) {
      half_closed_ = true;
      write_->EndOfInput();
    } else if (!cancelled_ && !stop_) {
      busy_ = true;  // before anybody can see what the message did: a drain that begins then waits for the rest
      refusal_ = Receive();
    }
  }
  if (writing_) {
    // Its OnWriteDone comes; ending before it is not allowed.
  } else if (cancelled_ || failed_) {
    End(absl::CancelledError("the client went away"));
  } else if (stop_) {
    End(absl::UnavailableError("the service is draining"));
  } else if (!bad_keys_.empty() || write_->backlog() > 0) {
    WriteAcks();
  } else if (half_closed_ || !refusal_.ok()) {
    End(refusal_);
  }
  const bool may_read = !ended_ && !reading_ && !half_closed_ && refusal_.ok() && !stop_ && !cancelled_;
  if (may_read && bad_keys_.size() + write_->backlog() < kMaxBacklog) {
    reading_ = true;
    StartRead(&incoming_);
  }
}

absl::Status PutStream::Receive() {
  absl::StatusOr<Frame<v1::PutRequest>> frame = DecodePut(incoming_);
  incoming_.Clear();
  if (!frame.ok()) {
    ++context_->stats->malformed_messages;
    return frame.status();
  }
  if (frame->header.pieces_size() > kMaxPiecesInMessage) {
    ++context_->stats->malformed_messages;
    return absl::InvalidArgumentError(
        absl::StrCat("a message of ", frame->header.pieces_size(), " pieces, expected at most ", kMaxPiecesInMessage));
  }
  std::vector<PutPiece> pieces;
  pieces.reserve(frame->header.pieces_size());
  for (const v1::PutPiece& piece : frame->header.pieces()) {
    absl::InlinedVector<ByteView, 1> bytes = frame->payload.Take(piece.size());
    absl::StatusOr<BlockKey> key = FromProto(piece.block());
    if (key.ok()) {
      pieces.push_back({*key, piece.offset(), piece.checksum(), std::move(bytes)});
    } else {
      RefuseBadKey(piece, key.status());
    }
  }
  return write_->Receive(frame->header.session(), pieces);
}

// One acknowledgement a block, as for those whose keys are good.
void PutStream::RefuseBadKey(const v1::PutPiece& piece, const absl::Status& why) {
  std::string key = piece.block().SerializeAsString();
  const bool continues = piece.offset() > 0 && piece.offset() == bad_received_ && key == bad_block_;
  bad_block_ = std::move(key);
  bad_received_ = piece.offset() + piece.size();
  if (continues) return;
  ++context_->stats->put_blocks_failed;
  v1::PutReply::Ack& ack = bad_keys_.emplace_back();
  *ack.mutable_block() = piece.block();
  SetStatus(why, &ack);
}

void PutStream::WriteAcks() {
  v1::PutReply reply;
  for (; !bad_keys_.empty() && reply.acks_size() < kMaxAcksInMessage; bad_keys_.pop_front()) {
    *reply.add_acks() = std::move(bad_keys_.front());
  }
  for (PutAck& ack : write_->TakeAcks(kMaxAcksInMessage - reply.acks_size())) {
    v1::PutReply::Ack* out = reply.add_acks();
    ToProto(ack.block, out->mutable_block());
    SetStatus(ack.status, out);
  }
  if (reply.acks_size() == 0) return;  // commits are under way
  outgoing_ = EncodeMessage(reply);
  writing_ = true;
  StartWrite(&outgoing_);
}

void PutStream::End(const absl::Status& status) {
  if (std::exchange(ended_, true)) return;
  write_->Close();
  Finish(ToGrpc(status));
}

}  // namespace kvferry
