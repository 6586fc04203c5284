// A store behind gRPC: `unix:///path` or `grpc://host:port`.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/transport.h"

namespace kvferry {

// Connects as Connect() does. Sessions, puts and gets each have a file of their own: grpc_session, grpc_put_call,
// grpc_fetch; what they share is grpc_core.
absl::StatusOr<std::shared_ptr<Transport>> NewGrpcTransport(const std::string& url, const ConnectOptions& options);

}  // namespace kvferry
