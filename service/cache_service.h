// The CacheStore service: thin calls into the store, and the streams.
#pragma once

#include "kvferry/v1/cache.grpc.pb.h"
#include "service/service_context.h"

namespace kvferry {

// All methods take and give ByteBuffers: bulk bytes never pass through a protobuf string, and what is no message is
// refused by us (see ReadRequest).
using CacheStoreMethods = v1::CacheStore::WithRawCallbackMethod_Put<
    v1::CacheStore::WithRawCallbackMethod_Get<v1::CacheStore::WithRawCallbackMethod_Session<
        v1::CacheStore::WithRawCallbackMethod_OpenNamespace<v1::CacheStore::WithRawCallbackMethod_Reserve<
            v1::CacheStore::WithRawCallbackMethod_Publish<v1::CacheStore::WithRawCallbackMethod_Lookup<
                v1::CacheStore::WithRawCallbackMethod_Share<v1::CacheStore::WithRawCallbackMethod_Redeem<
                    v1::CacheStore::WithRawCallbackMethod_Prefetch<v1::CacheStore::WithRawCallbackMethod_Erase<
                        v1::CacheStore::WithRawCallbackMethod_Flush<v1::CacheStore::Service>>>>>>>>>>>>;

// Thread-safe: holds nothing of its own.
class CacheService final : public CacheStoreMethods {
 public:
  explicit CacheService(ServiceContext* context) : context_(context) {}

 private:
  using Call = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;

  grpc::ServerBidiReactor<Bytes, Bytes>* Session(Call* call) override;
  grpc::ServerBidiReactor<Bytes, Bytes>* Put(Call* call) override;
  grpc::ServerWriteReactor<Bytes>* Get(Call* call, const Bytes* request) override;
  grpc::ServerUnaryReactor* OpenNamespace(Call* call, const Bytes* request, Bytes* reply) override;
  grpc::ServerUnaryReactor* Reserve(Call* call, const Bytes* request, Bytes* reply) override;
  grpc::ServerUnaryReactor* Publish(Call* call, const Bytes* request, Bytes* reply) override;
  grpc::ServerUnaryReactor* Lookup(Call* call, const Bytes* request, Bytes* reply) override;
  grpc::ServerUnaryReactor* Share(Call* call, const Bytes* request, Bytes* reply) override;
  grpc::ServerUnaryReactor* Redeem(Call* call, const Bytes* request, Bytes* reply) override;
  grpc::ServerUnaryReactor* Prefetch(Call* call, const Bytes* request, Bytes* reply) override;
  grpc::ServerUnaryReactor* Erase(Call* call, const Bytes* request, Bytes* reply) override;
  grpc::ServerUnaryReactor* Flush(Call* call, const Bytes* request, Bytes* reply) override;

  // Reads the request, has it served and ends the call.
  template <typename Request, typename Reply>
  grpc::ServerUnaryReactor* Answer(Call* call, const Bytes& request, Bytes* reply,
                                   absl::Status (CacheService::*serve)(const Request&, Reply*));

  absl::Status DoOpenNamespace(const v1::OpenNamespaceRequest& request, v1::OpenNamespaceReply* reply);
  absl::Status DoPublish(const v1::PublishRequest& request, v1::PublishReply* reply);
  absl::Status DoLookup(const v1::LookupRequest& request, v1::LookupReply* reply);
  absl::Status DoShare(const v1::ShareRequest& request, v1::ShareReply* reply);
  absl::Status DoRedeem(const v1::RedeemRequest& request, v1::RedeemReply* reply);
  absl::Status DoPrefetch(const v1::PrefetchRequest& request, v1::PrefetchReply* reply);

  ServiceContext* const context_;
};

}  // namespace kvferry
