#include "service/get_stream.h"

#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "service/request.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

constexpr size_t kMaxPieceMessage = 256;

// Appends the bytes [offset, offset + size) of `view`, by reference.
void AppendBytes(const BlockView& view, uint64_t offset, uint64_t size, std::vector<PinnedBytes>* data) {
  for (ByteView bytes : view.pieces()) {
    if (size == 0) return;
    if (offset >= bytes.size()) {
      offset -= bytes.size();
      continue;
    }
    const ByteView part = bytes.subspan(offset, size);
    data->push_back({part, view.pin()});
    offset = 0;
    size -= part.size();
  }
}

}  // namespace

grpc::ServerWriteReactor<grpc::ByteBuffer>* GetStream::Start(ServiceContext* context, const grpc::ByteBuffer& request) {
  auto stream = std::make_shared<GetStream>(context);
  const absl::Status status = stream->Open(request);
  context->streams->Add(stream);
  if (!status.ok()) {
    stream->stepper_.Kick([&] { stream->End(status); });
  } else {
    stream->read_->Start();
    stream->Kick();
  }
  return stream.get();
}

absl::Status GetStream::Open(const grpc::ByteBuffer& request) {
  v1::GetRequest get;
  KVFERRY_RETURN_IF_ERROR(ReadRequest(request, context_->stats, &get));
  if (get.keys_size() > kMaxChunksInCall) {
    return absl::InvalidArgumentError(absl::StrCat("a get of ", get.keys_size(), " keys, expected at most ",
                                                   kMaxChunksInCall, ": ask in several calls"));
  }
  if (get.window_bytes() > ReadSession::kMaxWindow) {
    return absl::InvalidArgumentError(
        absl::StrCat("window_bytes is ", get.window_bytes(), ", expected at most ", ReadSession::kMaxWindow));
  }
  KVFERRY_RETURN_IF_ERROR(context_->sessions->Find(get.session()).status());
  std::vector<absl::StatusOr<BlockKey>> keys;
  keys.reserve(get.keys_size());
  for (const v1::BlockKey& key : get.keys()) keys.push_back(FromProto(key));
  read_ = std::make_shared<ReadSession>(context_->store, get.session(), std::move(keys), get.window_bytes(),
                                        context_->stats, [weak = weak_from_this()] {
                                          if (const auto self = weak.lock(); self != nullptr) self->Kick();
                                        });
  return absl::OkStatus();
}

void GetStream::OnWriteDone(bool ok) {
  written_ = ok ? Written::kOk : Written::kFailed;
  Kick();
}

void GetStream::OnCancel() {
  cancelled_ = true;
  Kick();
}

void GetStream::Stop() {
  stop_ = true;
  Kick();
}

void GetStream::Kick() {
  const auto self = shared_from_this();  // the step may end the call and with it the owner's reference
  stepper_.Kick([this] { Step(); });
}

void GetStream::Step() {
  if (ended_) return;
  if (const Written written = written_.exchange(Written::kNothing); written != Written::kNothing) {
    writing_ = false;
    failed_ = written == Written::kFailed;
    message_.Clear();
    read_->Consumed(std::exchange(in_flight_, 0));
  }
  if (writing_) return;
  if (cancelled_ || failed_) {
    End(absl::CancelledError("the client went away"));
  } else if (stop_) {
    End(absl::UnavailableError("the service is draining"));
  } else if (std::vector<GetPiece> batch = read_->Next(kMaxFrameData); !batch.empty()) {
    Write(std::move(batch));
  } else if (read_->done()) {
    End(absl::OkStatus());
  }
}

void GetStream::Write(std::vector<GetPiece> batch) {
  v1::GetReply header;
  std::vector<PinnedBytes> data;
  data.reserve(batch.size());
  for (const GetPiece& piece : batch) {
    v1::GetPiece* out = header.add_pieces();
    out->set_index(piece.index);
    if (!piece.status.ok()) {
      out->set_code(ToWireCode(piece.status));
      // A miss needs no words, and there may be thousands; that the session has ended does.
      if (!absl::IsNotFound(piece.status) || absl::StartsWith(piece.status.message(), "session ")) {
        out->set_message(std::string(piece.status.message().substr(0, kMaxPieceMessage)));
      }
      continue;
    }
    out->set_offset(piece.offset);
    out->set_size(piece.size);
    out->set_block_size(piece.view.size());
    out->set_checksum(piece.view.checksum());
    AppendBytes(piece.view, piece.offset, piece.size, &data);
    in_flight_ += piece.size;
  }
  message_ = EncodeFrame(header, data);
  writing_ = true;
  StartWrite(&message_);
}

void GetStream::End(const absl::Status& status) {
  if (std::exchange(ended_, true)) return;
  if (read_ != nullptr) read_->Cancel();
  Finish(ToGrpc(status));
}

}  // namespace kvferry
