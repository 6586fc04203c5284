#include "service/session_stream.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "service/request.h"

namespace kvferry {

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* SessionStream::Start(ServiceContext* context) {
  auto stream = std::make_shared<SessionStream>(context);
  context->streams->Add(stream);
  stream->Kick();
  return stream.get();
}

void SessionStream::OnReadDone(bool ok) {
  read_done_ = ok ? Event::kOk : Event::kFailed;
  Kick();
}

void SessionStream::OnWriteDone(bool ok) {
  write_done_ = ok ? Event::kOk : Event::kFailed;
  Kick();
}

void SessionStream::OnCancel() {
  cancelled_ = true;
  Kick();
}

void SessionStream::SendDrainNotice() {
  drain_ = true;
  Kick();
}

void SessionStream::Stop() {
  stop_ = true;
  Kick();
}

void SessionStream::Kick() {
  const auto self = shared_from_this();  // the step may end the call and with it the owner's reference
  stepper_.Kick([this] { Step(); });
}

void SessionStream::Step() {
  std::optional<absl::StatusOr<ClientSessions::Attachment>> attach_done;
  std::optional<absl::Status> closed;
  {
    MutexLock lock(&mu_);
    attach_done.swap(attach_done_);
    closed.swap(closed_);
  }
  if (attach_done.has_value()) Welcome(*attach_done);
  if (ended_) return;

  if (const Event event = write_done_.exchange(Event::kNothing); event != Event::kNothing) {
    writing_ = false;
    if (event == Event::kFailed) Want(absl::CancelledError("the client went away"));
  }
  if (const Event event = read_done_.exchange(Event::kNothing); event != Event::kNothing) {
    reading_ = false;
    if (event == Event::kFailed) {
      Want(absl::OkStatus());  // half-closed without a bye: suspended, like a broken stream
    } else if (!ending_.has_value()) {
      Receive();
    }
  }
  if (closed.has_value()) Want(*closed);
  if (cancelled_) Want(absl::CancelledError("the client went away"));
  if (stop_) Want(absl::UnavailableError("the service is draining"));
  if (drain_.exchange(false)) owe_drain_ = true;

  if (!writing_) Write();
  if (!writing_ && ending_.has_value()) End(*ending_);
  // After a hello the next message waits until the table has answered it.
  if (!ended_ && !ending_.has_value() && !reading_ && greeted_ == attached_) {
    reading_ = true;
    StartRead(&incoming_);
  }
}

void SessionStream::Receive() {
  v1::SessionRequest request;
  if (absl::Status status = ReadRequest(incoming_, context_->stats, &request); !status.ok()) {
    Want(std::move(status));
    return;
  }
  if (!attached_) {
    if (request.has_hello()) {
      Hello(request.hello());
    } else {
      Want(absl::InvalidArgumentError("the first message of a session must be `hello`"));
    }
    return;
  }
  context_->sessions->Heard(attachment_);
  switch (request.kind_case()) {
    case v1::SessionRequest::kHeartbeat:
      owe_heartbeat_ = true;
      break;
    case v1::SessionRequest::kRelease:
      Release(request.release());
      break;
    case v1::SessionRequest::kBye:
      context_->sessions->End(attachment_);
      Want(absl::OkStatus());
      break;
    case v1::SessionRequest::kHello:
      Want(absl::InvalidArgumentError("a session has one `hello`, at its beginning"));
      break;
    case v1::SessionRequest::KIND_NOT_SET:
      break;  // something a later client says
  }
}

void SessionStream::Hello(const v1::SessionRequest::Hello& hello) {
  if (hello.version_min() > kProtocolVersionMax || hello.version_max() < kProtocolVersionMin) {
    Want(absl::FailedPreconditionError(absl::StrCat("the client speaks protocol versions ", hello.version_min(), " to ",
                                                    hello.version_max(), ", this service ", kProtocolVersionMin, " to ",
                                                    kProtocolVersionMax, ": update the older one")));
    return;
  }
  greeted_ = true;
  version_ = std::min(hello.version_max(), kProtocolVersionMax);
  const std::weak_ptr<SessionStream> weak = weak_from_this();
  ClientSessions* const sessions = context_->sessions;
  const auto close = [weak](const absl::Status& why) {
    const auto self = weak.lock();
    if (self == nullptr) return;
    {
      MutexLock lock(&self->mu_);
      self->closed_ = why;
    }
    self->Kick();
  };
  sessions->Attach(kDefaultTenant, hello.resume(), close,
                   [weak, sessions](absl::StatusOr<ClientSessions::Attachment> attached) {
                     const auto self = weak.lock();
                     if (self == nullptr) {
                       if (attached.ok()) sessions->Detach(*attached);
                       return;
                     }
                     {
                       MutexLock lock(&self->mu_);
                       self->attach_done_ = std::move(attached);
                     }
                     self->Kick();
                   });
}

void SessionStream::Release(const v1::SessionRequest::Release& release) {
  if (release.keys_size() > kMaxChunksInCall) {
    Want(absl::InvalidArgumentError(
        absl::StrCat("a release of ", release.keys_size(), " keys, expected at most ", kMaxChunksInCall)));
    return;
  }
  if (release.seq() == 0) {
    Want(absl::InvalidArgumentError("a release's seq is 0, expected 1 for the first one of a session"));
    return;
  }
  if (!chunks_->TakeRelease(release.seq())) return;
  std::vector<ChunkKey> keys;
  keys.reserve(release.keys_size());
  for (const v1::ChunkKey& key : release.keys()) {
    if (const auto chunk = FromProto(key); chunk.ok()) keys.push_back(*chunk);
  }
  chunks_->Drop(keys);
  context_->store->Release(attachment_.session, keys);
}

void SessionStream::Welcome(const absl::StatusOr<ClientSessions::Attachment>& attached) {
  if (!attached.ok()) {
    Want(attached.status());
    return;
  }
  if (ended_) {  // the client left while it was let in
    context_->sessions->Detach(*attached);
    return;
  }
  const auto chunks = context_->sessions->Find(attached->session);
  if (!chunks.ok()) {  // it has ended already
    Want(chunks.status());
    return;
  }
  attachment_ = *attached;
  chunks_ = *chunks;
  attached_ = true;
  owe_welcome_ = true;
}

void SessionStream::Write() {
  if (ending_.has_value() && !owe_drain_) return;
  v1::SessionReply reply;
  if (std::exchange(owe_welcome_, false)) {
    v1::SessionReply::Welcome* welcome = reply.mutable_welcome();
    welcome->set_session(attachment_.session);
    welcome->set_boot(context_->boot);
    welcome->set_version(version_);
    welcome->set_max_message_bytes(kMaxMessageBytes);
    welcome->set_heartbeat_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(context_->heartbeat)));
    welcome->set_resumed(attachment_.resumed);
    welcome->set_released(chunks_->released());
  } else if (std::exchange(owe_drain_, false)) {
    reply.mutable_drain();
  } else if (std::exchange(owe_heartbeat_, false)) {
    reply.mutable_heartbeat()->set_released(chunks_->released());
  } else {
    return;
  }
  outgoing_ = EncodeMessage(reply);
  writing_ = true;
  StartWrite(&outgoing_);
}

void SessionStream::Want(absl::Status status) {
  if (!ending_.has_value()) ending_ = std::move(status);
}

void SessionStream::End(const absl::Status& status) {
  ended_ = true;
  if (attached_) context_->sessions->Detach(attachment_);  // nothing to do if it has ended
  Finish(ToGrpc(status));
}

}  // namespace kvferry
