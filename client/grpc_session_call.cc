#include "client/grpc_session_call.h"

#include <utility>

#include "proto/codec.h"

namespace kvferry {

std::shared_ptr<SessionCall> SessionCall::Open(v1::CacheStore::Stub* stub) {
  std::shared_ptr<SessionCall> stream(new SessionCall);
  stream->self_ = stream;
  stub->async()->Session(&stream->context_, stream.get());
  stream->AddHold();  // for writes, which start outside of gRPC's callbacks; until the last read
  stream->StartRead(&stream->reply_);
  stream->StartCall();
  return stream;
}

bool SessionCall::Write(v1::SessionRequest request) {
  {
    MutexLock lock(&mu_);
    if (writing_ || ended_) return false;
    writing_ = true;
  }
  request_ = std::move(request);
  StartWrite(&request_);
  return true;
}

bool SessionCall::writable() const {
  MutexLock lock(&mu_);
  return !writing_ && !ended_;
}

std::optional<v1::SessionReply> SessionCall::Take() {
  MutexLock lock(&mu_);
  if (replies_.empty()) return std::nullopt;
  v1::SessionReply reply = std::move(replies_.front());
  replies_.pop_front();
  return reply;
}

void SessionCall::Wait(absl::Time deadline) {
  MutexLock lock(&mu_);
  while (!woken_) {
    if (cv_.WaitUntil(&mu_, deadline)) break;
  }
  woken_ = false;
}

void SessionCall::Wake() {
  MutexLock lock(&mu_);
  woken_ = true;
  cv_.NotifyAll();
}

absl::Status SessionCall::over() const {
  MutexLock lock(&mu_);
  if (!ended_) return absl::OkStatus();
  if (done_ && !status_.ok()) return status_;
  return absl::UnavailableError("the store ended the session's stream");
}

bool SessionCall::done() const {
  MutexLock lock(&mu_);
  return done_;
}

void SessionCall::OnReadDone(bool ok) {
  bool let_go = false;
  {
    MutexLock lock(&mu_);
    if (ok) {
      replies_.push_back(std::move(reply_));
    } else {
      ended_ = true;
      let_go = !writing_;
    }
    woken_ = true;
    cv_.NotifyAll();
  }
  if (ok) StartRead(&reply_);
  if (let_go) RemoveHold();
}

void SessionCall::OnWriteDone(bool) {
  bool let_go = false;
  {
    MutexLock lock(&mu_);
    writing_ = false;
    let_go = ended_;
    woken_ = true;
    cv_.NotifyAll();
  }
  if (let_go) RemoveHold();
}

void SessionCall::OnDone(const grpc::Status& status) {
  std::shared_ptr<SessionCall> self = std::move(self_);
  MutexLock lock(&mu_);
  done_ = true;
  status_ = FromGrpc(status);
  woken_ = true;
  cv_.NotifyAll();
}

}  // namespace kvferry
