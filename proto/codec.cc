#include "proto/codec.h"

#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

#define KVFERRY_SAME_CODE(grpc_name, absl_name)                                                                 \
  static_assert(static_cast<int>(grpc::StatusCode::grpc_name) == static_cast<int>(absl::StatusCode::absl_name), \
                "status codes of gRPC and Abseil differ")
KVFERRY_SAME_CODE(OK, kOk);
KVFERRY_SAME_CODE(CANCELLED, kCancelled);
KVFERRY_SAME_CODE(UNKNOWN, kUnknown);
KVFERRY_SAME_CODE(INVALID_ARGUMENT, kInvalidArgument);
KVFERRY_SAME_CODE(DEADLINE_EXCEEDED, kDeadlineExceeded);
KVFERRY_SAME_CODE(NOT_FOUND, kNotFound);
KVFERRY_SAME_CODE(ALREADY_EXISTS, kAlreadyExists);
KVFERRY_SAME_CODE(PERMISSION_DENIED, kPermissionDenied);
KVFERRY_SAME_CODE(RESOURCE_EXHAUSTED, kResourceExhausted);
KVFERRY_SAME_CODE(FAILED_PRECONDITION, kFailedPrecondition);
KVFERRY_SAME_CODE(ABORTED, kAborted);
KVFERRY_SAME_CODE(OUT_OF_RANGE, kOutOfRange);
KVFERRY_SAME_CODE(UNIMPLEMENTED, kUnimplemented);
KVFERRY_SAME_CODE(INTERNAL, kInternal);
KVFERRY_SAME_CODE(UNAVAILABLE, kUnavailable);
KVFERRY_SAME_CODE(DATA_LOSS, kDataLoss);
KVFERRY_SAME_CODE(UNAUTHENTICATED, kUnauthenticated);
#undef KVFERRY_SAME_CODE

// Trailers are limited to 8 KiB in all, and a status grows threefold where it is percent-encoded.
constexpr size_t kMaxStatusMessage = 1024;

absl::StatusOr<uint16_t> Narrow(const char* field, uint32_t value) {
  if (value > std::numeric_limits<uint16_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, ", expected 0 to 65535"));
  }
  return static_cast<uint16_t>(value);
}

}  // namespace

void ToProto(const Id128& id, v1::Id* out) {
  out->set_hi(id[0]);
  out->set_lo(id[1]);
}

void ToProto(const ChunkKey& key, v1::ChunkKey* out) {
  ToProto(key.ns, out->mutable_ns());
  ToProto(key.id, out->mutable_id());
  out->set_group(key.group);
  out->set_shard(key.shard);
}

void ToProto(const BlockKey& key, v1::BlockKey* out) {
  ToProto(key.chunk, out->mutable_chunk());
  out->set_layer(key.layer);
}

void ToProto(const NamespaceSpec& spec, v1::NamespaceSpec* out) {
  out->Clear();
  out->set_scheme(spec.scheme);
  out->set_model(spec.model);
  out->set_dtype(spec.dtype);
  out->set_dtype_bytes(spec.dtype_bytes);
  out->set_codec(spec.codec);
  out->set_rope(spec.rope);
  out->set_block_tokens(spec.block_tokens);
  out->set_shards(spec.shards);
  for (const GroupSpec& group : spec.groups) {
    v1::GroupSpec* g = out->add_groups();
    g->set_retention(static_cast<uint32_t>(group.retention));
    g->set_window(group.window);
    for (const LayerSpec& layer : group.layers) {
      v1::LayerSpec* l = g->add_layers();
      for (const PartSpec& part : layer.parts) {
        v1::PartSpec* p = l->add_parts();
        p->set_heads(part.heads);
        p->set_dim(part.dim);
      }
    }
  }
}

Id128 FromProto(const v1::Id& id) { return {id.hi(), id.lo()}; }

absl::StatusOr<ChunkKey> FromProto(const v1::ChunkKey& key) {
  ChunkKey out;
  out.ns = FromProto(key.ns());
  out.id = FromProto(key.id());
  KVFERRY_ASSIGN_OR_RETURN(out.group, Narrow("group of a chunk key", key.group()));
  KVFERRY_ASSIGN_OR_RETURN(out.shard, Narrow("shard of a chunk key", key.shard()));
  return out;
}

absl::StatusOr<BlockKey> FromProto(const v1::BlockKey& key) {
  BlockKey out;
  KVFERRY_ASSIGN_OR_RETURN(out.chunk, FromProto(key.chunk()));
  KVFERRY_ASSIGN_OR_RETURN(out.layer, Narrow("layer of a block key", key.layer()));
  return out;
}

absl::StatusOr<NamespaceSpec> FromProto(const v1::NamespaceSpec& spec) {
  NamespaceSpec out;
  out.scheme = spec.scheme();
  out.model = spec.model();
  out.dtype = spec.dtype();
  out.dtype_bytes = spec.dtype_bytes();
  out.codec = spec.codec();
  out.rope = spec.rope();
  out.block_tokens = spec.block_tokens();
  out.shards = spec.shards();
  out.groups.reserve(spec.groups_size());
  for (const v1::GroupSpec& g : spec.groups()) {
    if (g.retention() > static_cast<uint32_t>(Retention::kState)) {
      return absl::InvalidArgumentError(absl::StrCat("retention of group ", out.groups.size(), " is ", g.retention(),
                                                     ", expected 0 (full), 1 (window) or 2 (state)"));
    }
    GroupSpec& group = out.groups.emplace_back();
    group.retention = static_cast<Retention>(g.retention());
    group.window = g.window();
    group.layers.reserve(g.layers_size());
    for (const v1::LayerSpec& l : g.layers()) {
      LayerSpec& layer = group.layers.emplace_back();
      layer.parts.reserve(l.parts_size());
      for (const v1::PartSpec& p : l.parts()) layer.parts.push_back({p.heads(), p.dim()});
    }
  }
  return out;
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()),
                      std::string(status.message().substr(0, kMaxStatusMessage)));
}

absl::Status FromGrpc(const grpc::Status& status) {
  return FromWireCode(static_cast<uint32_t>(status.error_code()), status.error_message());
}

uint32_t ToWireCode(const absl::Status& status) { return static_cast<uint32_t>(status.code()); }

absl::Status FromWireCode(uint32_t code, absl::string_view message) {
  if (code == 0) return absl::OkStatus();
  if (code > static_cast<uint32_t>(absl::StatusCode::kUnauthenticated)) {
    return absl::UnknownError(absl::StrCat("status code ", code, ": ", message));
  }
  return absl::Status(static_cast<absl::StatusCode>(code), message);
}

}  // namespace kvferry
