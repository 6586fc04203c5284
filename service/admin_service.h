// The CacheAdmin service: what an operator asks.
#pragma once

#include "kvferry/v1/admin.grpc.pb.h"
#include "service/service_context.h"

namespace kvferry {

// Thread-safe: holds nothing of its own.
class AdminService final : public v1::CacheAdmin::WithCallbackMethod_Stats<
                               v1::CacheAdmin::WithCallbackMethod_List<v1::CacheAdmin::Service>> {
 public:
  explicit AdminService(ServiceContext* context) : context_(context) {}

 private:
  grpc::ServerUnaryReactor* Stats(grpc::CallbackServerContext* call, const v1::StatsRequest* request,
                                  v1::StatsReply* reply) override;
  grpc::ServerWriteReactor<v1::ListReply>* List(grpc::CallbackServerContext* call,
                                                const v1::ListRequest* request) override;

  ServiceContext* const context_;
};

}  // namespace kvferry
