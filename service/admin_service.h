// The CacheAdmin service: what an operator asks.
#pragma once

#include "kvferry/v1/admin.grpc.pb.h"
#include "service/service_context.h"

namespace kvferry {

// Thread-safe: holds nothing of its own.
class AdminService final : public v1::CacheAdmin::WithRawCallbackMethod_Stats<
                               v1::CacheAdmin::WithRawCallbackMethod_List<v1::CacheAdmin::Service>> {
 public:
  explicit AdminService(ServiceContext* context) : context_(context) {}

 private:
  grpc::ServerUnaryReactor* Stats(grpc::CallbackServerContext* call, const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* reply) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* List(grpc::CallbackServerContext* call,
                                                   const grpc::ByteBuffer* request) override;

  ServiceContext* const context_;
};

}  // namespace kvferry
