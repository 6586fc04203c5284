// Our values <-> messages of the wire, absl::Status <-> grpc::Status. The only file that knows both.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/support/status.h"
#include "kvferry/v1/cache.pb.h"
#include "storage/base/key.h"
#include "storage/base/namespace_spec.h"

namespace kvferry {

// Range of protocol versions this build speaks.
inline constexpr uint32_t kProtocolVersionMin = 1;
inline constexpr uint32_t kProtocolVersionMax = 1;

void ToProto(const Id128& id, v1::Id* out);
void ToProto(const ChunkKey& key, v1::ChunkKey* out);
void ToProto(const BlockKey& key, v1::BlockKey* out);
void ToProto(const NamespaceSpec& spec, v1::NamespaceSpec* out);

// INVALID_ARGUMENT names the field that has no value of ours: a group, shard or layer above 65535, an unknown
// retention. A namespace spec is translated only; Validate() judges it.
Id128 FromProto(const v1::Id& id);
absl::StatusOr<ChunkKey> FromProto(const v1::ChunkKey& key);
absl::StatusOr<BlockKey> FromProto(const v1::BlockKey& key);
absl::StatusOr<NamespaceSpec> FromProto(const v1::NamespaceSpec& spec);

// Codes are the same numbers on both sides; messages are cut to what fits into a trailer.
grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

// A status inside a message (PutReply.Ack, GetPiece): google.rpc.Code and text.
uint32_t ToWireCode(const absl::Status& status);
absl::Status FromWireCode(uint32_t code, absl::string_view message);

}  // namespace kvferry
