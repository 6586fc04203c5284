// The blocks of one Fetch from a remote store.
#pragma once

#include <memory>
#include <vector>

#include "client/grpc_core.h"
#include "client/grpc_get_call.h"
#include "client/retry.h"
#include "client/transport.h"

namespace kvferry {

// One Get call, another one for what is left if the connection broke under it and the session did not, and as many as
// that many keys need. Checks every block before it hands it out. Threads: one at a time.
class GrpcFetch : public FetchStream {
 public:
  GrpcFetch(std::shared_ptr<GrpcCore> core, absl::Span<const BlockKey> keys, absl::Time deadline);
  ~GrpcFetch() override;

  absl::StatusOr<BlockView> Next() override;

 private:
  // Starts a call for the blocks from next_ on; waits for a session if there is none.
  absl::Status Start();
  void Ask(std::shared_ptr<Connection> connection);
  // Whether `why` is worth another call; waits a little before it says yes.
  bool MayRetry(const absl::Status& why);
  absl::StatusOr<BlockView> Check(absl::StatusOr<BlockView> block);
  absl::Status End(const absl::Status& why);

  const std::shared_ptr<GrpcCore> core_;
  const std::vector<BlockKey> keys_;
  SessionId session_ = 0;  // the one that the keys belong to
  absl::Time deadline_;
  absl::Duration suspended_;  // time that this process had been suspended for when deadline_ was set
  Backoff backoff_;
  int retries_ = 0;
  size_t next_ = 0;
  size_t asked_ = 0;  // of keys_: up to here the call in progress brings them
  std::shared_ptr<GetCall> call_;
  absl::Status end_;
};

}  // namespace kvferry
