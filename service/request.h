// A call's request, from the bytes that came.
#pragma once

#include "absl/status/status.h"
#include "grpcpp/support/byte_buffer.h"
#include "proto/frame.h"
#include "service/service_stats.h"

namespace kvferry {

// INVALID_ARGUMENT where they are no such message, and counted. Every method takes bytes for its sake: gRPC's own
// reading answers bad bytes with UNIMPLEMENTED, and in a stream takes them for its end.
inline absl::Status ReadRequest(const grpc::ByteBuffer& bytes, ServiceStats* stats,
                                google::protobuf::MessageLite* request) {
  absl::Status status = DecodeMessage(bytes, request);
  if (!status.ok()) ++stats->malformed_messages;
  return status;
}

}  // namespace kvferry
