#include "client/grpc_session.h"

#include <unistd.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/grpc_connection.h"
#include "client/grpc_unary.h"
#include "client/retry.h"
#include "proto/codec.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

constexpr absl::Duration kAttemptTimeout = absl::Seconds(5);
constexpr absl::Duration kByeTimeout = absl::Milliseconds(500);
constexpr int kSilentBeats = 3;  // the store counts the same
constexpr size_t kReleaseBatch = 1024;

// What trying again may cure is UNAVAILABLE; a refusal stays what it is.
absl::Status WhyDown(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnimplemented:
      return status;
    default:
      return absl::UnavailableError(status.message());
  }
}

}  // namespace

GrpcSession::GrpcSession(Parts parts, absl::Duration heartbeat)
    : parts_(std::move(parts)), heartbeat_(heartbeat), thread_([this] { Run(); }) {}

void GrpcSession::Wake() {
  std::shared_ptr<SessionCall> stream;
  {
    MutexLock lock(&mu_);
    stream = stream_;
  }
  if (stream != nullptr) stream->Wake();
}

void GrpcSession::Stop() {
  parts_.state->Close();
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(&mu_);
    connection = connection_;
  }
  if (connection != nullptr) connection->Cancel();
  Wake();
  MutexLock lock(&join_mu_);
  if (thread_.joinable()) thread_.join();
}

void GrpcSession::SetInUse(std::shared_ptr<SessionCall> stream, std::shared_ptr<Connection> connection) {
  MutexLock lock(&mu_);
  stream_ = std::move(stream);
  connection_ = std::move(connection);
}

void GrpcSession::Run() {
  Backoff backoff({}, std::random_device{}());
  absl::Duration delay = absl::ZeroDuration();
  std::shared_ptr<Connection> connection;  // null: dial anew
  while (parts_.state->BeginAttempt(delay)) {
    parts_.suspension->Tick(absl::Now());
    if (connection == nullptr) connection = std::make_shared<Connection>(Dial(parts_.target), SessionId{0});
    const std::shared_ptr<SessionCall> stream = SessionCall::Open(&connection->stub());
    SetInUse(stream, connection);
    absl::StatusOr<v1::SessionReply::Welcome> welcome = Handshake(stream.get());
    absl::Status why = welcome.status();
    if (why.ok() && welcome->session() != connection->session()) {
      connection->Cancel();  // whatever it still carries belongs to a session that is gone
      connection = std::make_shared<Connection>(connection->channel(), welcome->session());
      SetInUse(stream, connection);
    }
    bool silent = !why.ok();
    if (why.ok()) {
      backoff.Reset();
      if (parts_.state->session() != 0) ++parts_.counters->reconnects;
      if (welcome->resumed()) {
        parts_.releases->Resumed(welcome->released());
      } else {
        parts_.releases->SessionLost(parts_.state->epoch() + 1);
      }
      parts_.state->Up(connection, welcome->session());
      const absl::Duration beat =
          welcome->heartbeat_ms() == 0 ? heartbeat_ : absl::Milliseconds(welcome->heartbeat_ms());
      why = Serve(stream.get(), std::min(beat, heartbeat_), &silent);
      delay = absl::ZeroDuration();  // the first attempt to come back
    } else {
      delay = backoff.Next();
    }
    stream->Cancel();
    if (silent) {
      connection->Cancel();
      connection = nullptr;
    }
    parts_.state->Down(WhyDown(why));
  }
  SetInUse(nullptr, nullptr);
  if (connection != nullptr) connection->Cancel();
}

absl::StatusOr<v1::SessionReply::Welcome> GrpcSession::Handshake(SessionCall* stream) {
  v1::SessionRequest request;
  v1::SessionRequest::Hello* hello = request.mutable_hello();
  hello->set_version_min(kProtocolVersionMin);
  hello->set_version_max(kProtocolVersionMax);
  hello->set_resume(parts_.state->session());
  hello->set_client(absl::StrCat("pid ", getpid()));
  stream->Write(std::move(request));
  const absl::Time deadline = absl::Now() + kAttemptTimeout;
  while (absl::Now() < deadline && !parts_.state->closed()) {
    if (std::optional<v1::SessionReply> reply = stream->Take(); reply.has_value()) {
      if (!reply->has_welcome()) continue;
      const v1::SessionReply::Welcome& welcome = reply->welcome();
      if (welcome.version() >= kProtocolVersionMin && welcome.version() <= kProtocolVersionMax) return welcome;
      return absl::FailedPreconditionError(absl::StrCat("the store speaks protocol version ", welcome.version(),
                                                        ", this client ", kProtocolVersionMin, " to ",
                                                        kProtocolVersionMax, "; update the older of the two"));
    }
    if (stream->done()) return stream->over();
    stream->Wait(std::min(deadline, absl::Now() + heartbeat_));
    parts_.suspension->Tick(absl::Now());
  }
  return absl::UnavailableError("no welcome from the store in time");
}

absl::Status GrpcSession::Serve(SessionCall* stream, absl::Duration heartbeat, bool* silent) {
  absl::Time now = absl::Now();
  absl::Time beat = now + heartbeat, heard = now, woke = now;
  while (true) {
    if (parts_.state->closed()) {
      SayBye(stream);
      return absl::UnavailableError("closed");
    }
    if (absl::Status over = stream->over(); !over.ok()) return over;
    now = absl::Now();
    parts_.suspension->Tick(now);
    if (now - woke > kSilentBeats * heartbeat) {  // it was us who slept: give the store time to be heard
      heard = now;
      beat = now;
    }
    woke = now;
    while (std::optional<v1::SessionReply> reply = stream->Take()) {
      heard = now;
      if (reply->has_heartbeat()) parts_.releases->Confirmed(reply->heartbeat().released());
    }
    if (now - heard > kSilentBeats * heartbeat) {
      *silent = true;
      return absl::UnavailableError(absl::StrCat("no sign of life for ", absl::FormatDuration(now - heard)));
    }
    v1::SessionRequest request;
    if (now >= beat) {
      request.mutable_heartbeat();
      if (stream->Write(std::move(request))) beat = now + heartbeat;
    } else if (stream->writable()) {
      if (const auto batch = parts_.releases->Next(kReleaseBatch); batch.has_value()) {
        v1::SessionRequest::Release* release = request.mutable_release();
        release->set_seq(batch->seq);
        for (const ChunkKey& key : batch->keys) ToProto(key, release->add_keys());
        stream->Write(std::move(request));
      }
    }
    stream->Wait(std::max(std::min(beat, heard + kSilentBeats * heartbeat), now + heartbeat / 8));
  }
}

void GrpcSession::SayBye(SessionCall* stream) {
  const absl::Time deadline = absl::Now() + kByeTimeout;
  bool said = false;
  while (absl::Now() < deadline && !stream->done()) {
    v1::SessionRequest request;
    request.mutable_bye();
    said = said || stream->Write(std::move(request));
    stream->Wait(deadline);
  }
}

}  // namespace kvferry
