#include "service/cache_service.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "service/get_stream.h"
#include "service/put_stream.h"
#include "service/request.h"
#include "service/reserve_call.h"
#include "service/session_stream.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

grpc::ServerUnaryReactor* Finish(grpc::CallbackServerContext* call, const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

absl::StatusOr<std::vector<ChunkKey>> Keys(const google::protobuf::RepeatedPtrField<v1::ChunkKey>& keys) {
  if (keys.size() > kMaxChunksInCall) {
    return absl::InvalidArgumentError(
        absl::StrCat("a call with ", keys.size(), " keys, expected at most ", kMaxChunksInCall));
  }
  std::vector<ChunkKey> out;
  out.reserve(keys.size());
  for (const v1::ChunkKey& key : keys) {
    KVFERRY_ASSIGN_OR_RETURN(out.emplace_back(), FromProto(key));
  }
  return out;
}

}  // namespace

template <typename Request, typename Reply>
grpc::ServerUnaryReactor* CacheService::Answer(Call* call, const Bytes& request, Bytes* reply,
                                               absl::Status (CacheService::*serve)(const Request&, Reply*)) {
  Request read;
  Reply answer;
  absl::Status status = ReadRequest(request, context_->stats, &read);
  if (status.ok()) status = (this->*serve)(read, &answer);
  if (status.ok()) *reply = EncodeMessage(answer);
  return Finish(call, status);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* CacheService::Session(Call*) {
  return SessionStream::Start(context_);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* CacheService::Put(Call*) {
  return PutStream::Start(context_);
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* CacheService::Get(Call*, const Bytes* request) {
  return GetStream::Start(context_, *request);
}

grpc::ServerUnaryReactor* CacheService::Reserve(Call* call, const Bytes* request, Bytes* reply) {
  return ReserveCall::Start(context_, call, *request, reply);
}

grpc::ServerUnaryReactor* CacheService::OpenNamespace(Call* call, const Bytes* request, Bytes* reply) {
  return Answer(call, *request, reply, &CacheService::DoOpenNamespace);
}

grpc::ServerUnaryReactor* CacheService::Publish(Call* call, const Bytes* request, Bytes* reply) {
  return Answer(call, *request, reply, &CacheService::DoPublish);
}

grpc::ServerUnaryReactor* CacheService::Lookup(Call* call, const Bytes* request, Bytes* reply) {
  return Answer(call, *request, reply, &CacheService::DoLookup);
}

grpc::ServerUnaryReactor* CacheService::Share(Call* call, const Bytes* request, Bytes* reply) {
  return Answer(call, *request, reply, &CacheService::DoShare);
}

grpc::ServerUnaryReactor* CacheService::Redeem(Call* call, const Bytes* request, Bytes* reply) {
  return Answer(call, *request, reply, &CacheService::DoRedeem);
}

grpc::ServerUnaryReactor* CacheService::Prefetch(Call* call, const Bytes* request, Bytes* reply) {
  return Answer(call, *request, reply, &CacheService::DoPrefetch);
}

grpc::ServerUnaryReactor* CacheService::Erase(Call* call, const Bytes* request, Bytes* reply) {
  v1::EraseRequest read;
  if (absl::Status status = ReadRequest(*request, context_->stats, &read); !status.ok()) return Finish(call, status);
  const absl::StatusOr<ChunkKey> key = FromProto(read.key());
  if (!key.ok()) return Finish(call, key.status());
  *reply = EncodeMessage(v1::EraseReply());
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  context_->store->Erase(read.session(), *key,
                         [reactor](const absl::Status& erased) { reactor->Finish(ToGrpc(erased)); });
  return reactor;
}

grpc::ServerUnaryReactor* CacheService::Flush(Call* call, const Bytes* request, Bytes* reply) {
  v1::FlushRequest read;
  absl::Status status = ReadRequest(*request, context_->stats, &read);
  if (status.ok()) status = context_->sessions->Find(read.session()).status();
  if (!status.ok()) return Finish(call, status);
  *reply = EncodeMessage(v1::FlushReply());
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  context_->store->Flush([reactor](const absl::Status& flushed) { reactor->Finish(ToGrpc(flushed)); });
  return reactor;
}

absl::Status CacheService::DoOpenNamespace(const v1::OpenNamespaceRequest& request, v1::OpenNamespaceReply* reply) {
  KVFERRY_ASSIGN_OR_RETURN(const auto chunks, context_->sessions->Find(request.session()));
  KVFERRY_ASSIGN_OR_RETURN(const NamespaceSpec spec, FromProto(request.spec()));
  KVFERRY_ASSIGN_OR_RETURN(const NamespaceId ns, context_->store->OpenNamespace(request.session(), spec));
  chunks->MarkUsed();
  ToProto(ns, reply->mutable_ns());
  return absl::OkStatus();
}

absl::Status CacheService::DoPublish(const v1::PublishRequest& request, v1::PublishReply*) {
  KVFERRY_ASSIGN_OR_RETURN(const ChunkKey live, FromProto(request.live()));
  PublishOptions options;
  options.prefix_key = FromProto(request.prefix_key());
  options.parent = FromProto(request.parent());
  if (request.has_priority()) options.priority = request.priority();
  if (request.has_ttl_ms()) {
    options.ttl = absl::Milliseconds(std::min<uint64_t>(request.ttl_ms(), std::numeric_limits<int64_t>::max()));
  }
  return context_->store->Publish(request.session(), live, options);
}

absl::Status CacheService::DoLookup(const v1::LookupRequest& request, v1::LookupReply* reply) {
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<ChunkKey> keys, Keys(request.keys()));
  KVFERRY_ASSIGN_OR_RETURN(const Match match, context_->store->Lookup(request.session(), keys, request.lease()));
  reply->set_chunks(static_cast<uint32_t>(match.chunks));
  reply->set_bytes(match.bytes);
  return absl::OkStatus();
}

absl::Status CacheService::DoShare(const v1::ShareRequest& request, v1::ShareReply* reply) {
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<ChunkKey> keys, Keys(request.keys()));
  const auto most = static_cast<uint64_t>(absl::ToInt64Milliseconds(kMaxTicketLife));
  if (request.ttl_ms() == 0 || request.ttl_ms() > most) {  // it may be too long for a Duration
    return absl::InvalidArgumentError(absl::StrCat("ttl_ms is ", request.ttl_ms(), ", expected 1 to ", most));
  }
  KVFERRY_ASSIGN_OR_RETURN(const TicketId ticket,
                           context_->store->Share(request.session(), keys, absl::Milliseconds(request.ttl_ms())));
  reply->set_ticket(ticket);
  return absl::OkStatus();
}

absl::Status CacheService::DoRedeem(const v1::RedeemRequest& request, v1::RedeemReply* reply) {
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<ChunkKey> keys,
                           context_->store->Redeem(request.session(), request.ticket()));
  for (const ChunkKey& key : keys) ToProto(key, reply->add_keys());
  return absl::OkStatus();
}

absl::Status CacheService::DoPrefetch(const v1::PrefetchRequest& request, v1::PrefetchReply*) {
  KVFERRY_RETURN_IF_ERROR(context_->sessions->Find(request.session()).status());
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<ChunkKey> keys, Keys(request.keys()));
  context_->store->Prefetch(request.session(), keys);
  return absl::OkStatus();
}

}  // namespace kvferry
