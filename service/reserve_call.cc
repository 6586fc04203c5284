#include "service/reserve_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/server_context.h"
#include "kvferry/v1/cache.pb.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "service/request.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

constexpr absl::Duration kMaxWait = absl::Hours(1);

}  // namespace

grpc::ServerUnaryReactor* ReserveCall::Start(ServiceContext* context, grpc::CallbackServerContext* call,
                                             const grpc::ByteBuffer& request, grpc::ByteBuffer* reply) {
  auto self = std::make_shared<ReserveCall>(context, reply);
  context->streams->Add(self);
  if (const absl::Status status = self->Open(call, request); !status.ok()) self->Answer(status);
  return self.get();
}

absl::Status ReserveCall::Open(grpc::CallbackServerContext* call, const grpc::ByteBuffer& bytes) {
  v1::ReserveRequest request;
  KVFERRY_RETURN_IF_ERROR(ReadRequest(bytes, context_->stats, &request));
  if (context_->draining) return absl::UnavailableError("the service is draining and reserves no memory");
  if (request.count() == 0 || request.count() > uint32_t{kMaxChunksInCall}) {
    return absl::InvalidArgumentError(absl::StrCat("count is ", request.count(), ", expected 1 to ", kMaxChunksInCall));
  }
  if (request.group() > UINT16_MAX || request.shard() > UINT16_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat("group is ", request.group(), " and shard is ", request.shard(), ", expected 0 to 65535"));
  }
  const NamespaceId ns = FromProto(request.ns());
  KVFERRY_ASSIGN_OR_RETURN(chunks_, context_->sessions->Find(request.session()));
  KVFERRY_ASSIGN_OR_RETURN(layout_, context_->store->Layout(request.session(), ns, static_cast<int>(request.group())));

  ReserveOptions options;
  options.group = static_cast<uint16_t>(request.group());
  options.shard = static_cast<uint16_t>(request.shard());
  options.count = static_cast<int>(request.count());
  const absl::Duration wait = std::min(absl::Milliseconds(request.wait_ms()), kMaxWait);
  options.deadline = std::min(absl::Now() + wait, absl::FromChrono(call->deadline()));
  options.given_up = given_up_;
  context_->store->Reserve(request.session(), ns, options,
                           [self = shared_from_this()](auto writers) { self->Reserved(std::move(writers)); });
  return absl::OkStatus();
}

void ReserveCall::Reserved(absl::StatusOr<std::vector<std::unique_ptr<ChunkWriter>>> writers) {
  if (!writers.ok()) {
    Answer(writers.status());
    return;
  }
  if (answered_) return;  // nobody waits for them any more
  std::vector<ChunkKey> keys;
  for (const auto& writer : *writers) keys.push_back(writer->key());
  if (!chunks_->Add(*std::move(writers), layout_)) {
    Answer(absl::NotFoundError("the session ended while memory was being reserved"));
    return;
  }
  {
    MutexLock lock(&mu_);
    reserved_ = keys;
  }
  if (answered_.exchange(true)) {
    chunks_->Drop(keys);
    return;
  }
  v1::ReserveReply reply;
  for (const ChunkKey& key : keys) ToProto(key.id, reply.add_ids());
  *reply_ = EncodeMessage(reply);
  Finish(grpc::Status::OK);
}

// Before the answer: the client has given up. After it: the answer did not arrive.
void ReserveCall::OnCancel() {
  Answer(absl::CancelledError("the client went away"));
  std::vector<ChunkKey> lost;
  {
    MutexLock lock(&mu_);
    lost = reserved_;
  }
  if (!lost.empty()) chunks_->DropUntouched(lost);
}

void ReserveCall::Answer(const absl::Status& status) {
  *given_up_ = true;
  if (!answered_.exchange(true)) Finish(ToGrpc(status));
}

}  // namespace kvferry
