#include "client/grpc_core.h"

#include "client/store_error.h"

namespace kvferry {

void GrpcCore::Release(absl::Span<const ChunkKey> keys, uint64_t epoch) {
  if (keys.empty() || fork.forked() || state.closed()) return;
  releases.Push(keys, epoch);
  session.Wake();
}

void GrpcCore::Put(SessionId owner, OutgoingBlock block) {
  releases.PutStarted(block.key.chunk);
  block.done = [weak = weak_from_this(), chunk = block.key.chunk,
                done = std::move(block.done)](absl::Status status) mutable {
    const std::shared_ptr<GrpcCore> core = weak.lock();
    if (core != nullptr && core->releases.PutDone(chunk)) core->session.Wake();
    done(std::move(status));
  };
  absl::Status why;
  if (state.closed()) why = absl::UnavailableError("this transport is closed; connect again");
  // A stream that broke is opened again once; if that one breaks too, the block's `done` hears of it.
  for (int attempt = 0; why.ok() && attempt < 2; ++attempt) {
    std::shared_ptr<Connection> connection = state.Current();
    if (connection == nullptr || connection->session() != owner) {
      why = absl::UnavailableError("the session that reserved this chunk has ended");
      break;
    }
    std::shared_ptr<PutCall> stream;
    {
      MutexLock lock(&put_mu_);
      if (put_connection_ == connection) stream = put_;
    }
    if (stream != nullptr && stream->Add(block)) return;
    std::shared_ptr<PutCall> opened = PutCall::Open(connection, url, counters);
    if (opened == nullptr) {
      why = absl::UnavailableError("the connection was lost");
      break;
    }
    {
      MutexLock lock(&put_mu_);
      if (put_connection_ == connection && put_ != stream) {
        stream = put_;  // another thread was quicker
      } else {
        put_ = opened;
        put_connection_ = connection;
        stream = opened;
      }
    }
    if (stream != opened) opened->End();
    if (stream->Add(block)) return;
  }
  if (why.ok()) why = absl::UnavailableError("the stream of puts broke");
  counters->CountPut(false, 0);
  block.done(StoreError(url, "put", why));
}

}  // namespace kvferry
