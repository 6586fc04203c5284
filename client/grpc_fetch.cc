#include "client/grpc_fetch.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/interrupt.h"
#include "client/store_error.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

constexpr int kMaxRetries = 3;
constexpr Backoff::Options kBackoff{absl::Milliseconds(20), absl::Milliseconds(200)};

}  // namespace

GrpcFetch::GrpcFetch(std::shared_ptr<GrpcCore> core, absl::Span<const BlockKey> keys, absl::Time deadline)
    : core_(std::move(core)),
      keys_(keys.begin(), keys.end()),
      deadline_(deadline),
      backoff_(kBackoff, reinterpret_cast<uintptr_t>(this)) {
  if (core_->fork.forked()) return;  // the locks below may be held by threads that are not here
  session_ = core_->state.session();
  suspended_ = core_->suspension.Total(absl::Now());
  std::shared_ptr<Connection> connection = core_->state.Current();
  if (keys_.empty() || core_->state.closed() || connection == nullptr || connection->session() != session_) return;
  Ask(std::move(connection));
}

GrpcFetch::~GrpcFetch() {
  if (call_ == nullptr) return;
  if (core_->fork.forked()) {
    new std::shared_ptr<GetCall>(call_);  // leaked: gRPC's threads are not here to end it
  } else {
    call_->Abandon();
  }
}

absl::StatusOr<BlockView> GrpcFetch::Next() {
  if (!end_.ok()) return end_;
  if (next_ == keys_.size()) return absl::OutOfRangeError("all blocks have been returned");
  if (absl::Status status = core_->Check(); !status.ok()) return status;
  while (true) {
    absl::Status why;
    if (call_ != nullptr && next_ == asked_) {
      call_->Abandon();
      call_ = nullptr;
    }
    if (call_ == nullptr) why = Start();
    if (call_ != nullptr) {
      std::optional<absl::StatusOr<BlockView>> block = call_->Next(deadline_, &why);
      if (block.has_value()) return Check(*std::move(block));
      call_->Abandon();
      call_ = nullptr;
      if (why.ok()) why = absl::InternalError("the store ended the call before the last block");
    }
    if (!MayRetry(why)) return End(why);
  }
}

absl::Status GrpcFetch::Start() {
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<Connection> connection, core_->state.Wait(deadline_));
  if (connection->session() != session_) {
    return absl::FailedPreconditionError("the session that these keys belong to has ended");
  }
  Ask(std::move(connection));
  return call_ != nullptr ? absl::OkStatus() : absl::UnavailableError("the connection was lost");
}

void GrpcFetch::Ask(std::shared_ptr<Connection> connection) {
  const absl::Span<const BlockKey> next = absl::MakeConstSpan(keys_).subspan(next_, kMaxChunksInCall);
  asked_ = next_ + next.size();
  call_ = GetCall::Start(std::move(connection), next, deadline_, core_->counters);
}

bool GrpcFetch::MayRetry(const absl::Status& why) {
  if (ScopedInterrupt::Raised()) return false;
  const absl::Time now = absl::Now();
  if (absl::IsDeadlineExceeded(why)) {
    const absl::Duration suspended = core_->suspension.Total(now);
    deadline_ += suspended - suspended_;
    suspended_ = suspended;
    return deadline_ > now;
  }
  if (!absl::IsUnavailable(why) || core_->state.closed() || ++retries_ > kMaxRetries) return false;
  const absl::Duration pause = backoff_.Next();
  if (now + pause >= deadline_) return false;
  Sleep(pause);
  return true;
}

absl::StatusOr<BlockView> GrpcFetch::Check(absl::StatusOr<BlockView> block) {
  absl::Status status = block.ok() ? block->Verify() : CallStatus(call_->connection(), block.status());
  if (block.ok() && !status.ok()) ++core_->counters->checksum_errors;
  if (absl::IsNotFound(status)) {
    ++core_->counters->get_misses;
  } else if (!status.ok()) {
    return End(status);
  } else {
    core_->counters->CountGot(block->size());
  }
  ++next_;
  return block;
}

absl::Status GrpcFetch::End(const absl::Status& why) {
  // To the caller a lost session is a store that is not there: the chunks are gone, whatever the code inside.
  const bool lost = absl::IsFailedPrecondition(why);
  end_ = StoreError(core_->url, absl::StrCat("get, after ", next_, " of ", keys_.size(), " blocks"),
                    lost ? absl::UnavailableError(why.message()) : why);
  if (call_ != nullptr) call_->Abandon();
  call_ = nullptr;
  return end_;
}

}  // namespace kvferry
