// The CacheStore service: thin calls into the store, and the streams.
#pragma once

#include "kvferry/v1/cache.grpc.pb.h"
#include "service/service_context.h"

namespace kvferry {

// Put and Get take and give ByteBuffers, so bulk bytes never pass through a protobuf string; the rest is typed.
using CacheStoreMethods = v1::CacheStore::WithRawCallbackMethod_Put<
    v1::CacheStore::WithRawCallbackMethod_Get<v1::CacheStore::WithCallbackMethod_Session<
        v1::CacheStore::WithCallbackMethod_OpenNamespace<v1::CacheStore::WithCallbackMethod_Reserve<
            v1::CacheStore::WithCallbackMethod_Publish<v1::CacheStore::WithCallbackMethod_Lookup<
                v1::CacheStore::WithCallbackMethod_Prefetch<v1::CacheStore::WithCallbackMethod_Erase<
                    v1::CacheStore::WithCallbackMethod_Flush<v1::CacheStore::Service>>>>>>>>>>;

// Thread-safe: holds nothing of its own.
class CacheService final : public CacheStoreMethods {
 public:
  explicit CacheService(ServiceContext* context) : context_(context) {}

 private:
  using Call = grpc::CallbackServerContext;

  grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionReply>* Session(Call* call) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Put(Call* call) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Get(Call* call, const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* OpenNamespace(Call* call, const v1::OpenNamespaceRequest* request,
                                          v1::OpenNamespaceReply* reply) override;
  grpc::ServerUnaryReactor* Reserve(Call* call, const v1::ReserveRequest* request, v1::ReserveReply* reply) override;
  grpc::ServerUnaryReactor* Publish(Call* call, const v1::PublishRequest* request, v1::PublishReply* reply) override;
  grpc::ServerUnaryReactor* Lookup(Call* call, const v1::LookupRequest* request, v1::LookupReply* reply) override;
  grpc::ServerUnaryReactor* Prefetch(Call* call, const v1::PrefetchRequest* request, v1::PrefetchReply* reply) override;
  grpc::ServerUnaryReactor* Erase(Call* call, const v1::EraseRequest* request, v1::EraseReply* reply) override;
  grpc::ServerUnaryReactor* Flush(Call* call, const v1::FlushRequest* request, v1::FlushReply* reply) override;

  absl::Status DoOpenNamespace(const v1::OpenNamespaceRequest& request, v1::OpenNamespaceReply* reply);
  absl::Status DoPublish(const v1::PublishRequest& request);
  absl::Status DoLookup(const v1::LookupRequest& request, v1::LookupReply* reply);
  absl::Status DoPrefetch(const v1::PrefetchRequest& request);
  absl::Status DoErase(const v1::EraseRequest& request);

  ServiceContext* const context_;
};

}  // namespace kvferry
