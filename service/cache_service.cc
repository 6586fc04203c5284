#include "service/cache_service.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/codec.h"
#include "service/get_stream.h"
#include "service/put_stream.h"
#include "service/reserve_call.h"
#include "service/session_stream.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* call, const absl::Status& status) {
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

grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionReply>* CacheService::Session(Call*) {
  return SessionStream::Start(context_);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* CacheService::Put(Call*) {
  return PutStream::Start(context_);
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* CacheService::Get(Call*, const grpc::ByteBuffer* request) {
  return GetStream::Start(context_, *request);
}

grpc::ServerUnaryReactor* CacheService::Reserve(Call* call, const v1::ReserveRequest* request,
                                                v1::ReserveReply* reply) {
  return ReserveCall::Start(context_, call, request, reply);
}

grpc::ServerUnaryReactor* CacheService::OpenNamespace(Call* call, const v1::OpenNamespaceRequest* request,
                                                      v1::OpenNamespaceReply* reply) {
  return Answer(call, DoOpenNamespace(*request, reply));
}

grpc::ServerUnaryReactor* CacheService::Publish(Call* call, const v1::PublishRequest* request, v1::PublishReply*) {
  return Answer(call, DoPublish(*request));
}

grpc::ServerUnaryReactor* CacheService::Lookup(Call* call, const v1::LookupRequest* request, v1::LookupReply* reply) {
  return Answer(call, DoLookup(*request, reply));
}

grpc::ServerUnaryReactor* CacheService::Prefetch(Call* call, const v1::PrefetchRequest* request, v1::PrefetchReply*) {
  return Answer(call, DoPrefetch(*request));
}

grpc::ServerUnaryReactor* CacheService::Erase(Call* call, const v1::EraseRequest* request, v1::EraseReply*) {
  return Answer(call, DoErase(*request));
}

grpc::ServerUnaryReactor* CacheService::Flush(Call* call, const v1::FlushRequest* request, v1::FlushReply*) {
  if (const auto chunks = context_->sessions->Find(request->session()); !chunks.ok()) {
    return Answer(call, chunks.status());
  }
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  context_->store->Flush([reactor](const absl::Status& status) { reactor->Finish(ToGrpc(status)); });
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

absl::Status CacheService::DoPublish(const v1::PublishRequest& request) {
  KVFERRY_ASSIGN_OR_RETURN(const ChunkKey live, FromProto(request.live()));
  return context_->store->Publish(request.session(), live,
                                  {FromProto(request.prefix_key()), FromProto(request.parent())});
}

absl::Status CacheService::DoLookup(const v1::LookupRequest& request, v1::LookupReply* reply) {
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<ChunkKey> keys, Keys(request.keys()));
  KVFERRY_ASSIGN_OR_RETURN(const Match match, context_->store->Lookup(request.session(), keys, request.lease()));
  reply->set_chunks(static_cast<uint32_t>(match.chunks));
  reply->set_bytes(match.bytes);
  return absl::OkStatus();
}

absl::Status CacheService::DoPrefetch(const v1::PrefetchRequest& request) {
  KVFERRY_RETURN_IF_ERROR(context_->sessions->Find(request.session()).status());
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<ChunkKey> keys, Keys(request.keys()));
  context_->store->Prefetch(request.session(), keys);
  return absl::OkStatus();
}

absl::Status CacheService::DoErase(const v1::EraseRequest& request) {
  KVFERRY_ASSIGN_OR_RETURN(const ChunkKey key, FromProto(request.key()));
  return context_->store->Erase(request.session(), key);
}

}  // namespace kvferry
