// A client that knows nothing but the .proto files: what any language's generated stub does.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "kvferry/v1/admin.grpc.pb.h"
#include "kvferry/v1/cache.grpc.pb.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "storage/base/checksum.h"

namespace kvferry {

// Dials "unix:///path" or "grpc://host:port", with a connection of its own.
inline std::shared_ptr<grpc::Channel> DialUrl(absl::string_view url) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(-1);
  std::string target = absl::ConsumePrefix(&url, "unix://") ? absl::StrCat("unix:", url)
                                                            : std::string(absl::StripPrefix(url, "grpc://"));
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
}

// Every call fails rather than hang; long enough for a machine that is busy with other things.
inline void SetTestDeadline(grpc::ClientContext* context) {
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(4));
}

// One session and its calls. Not thread-safe.
class RawClient {
 public:
  using PutStream = grpc::ClientReaderWriter<v1::PutRequest, v1::PutReply>;
  struct Got {
    uint32_t code = 0;
    uint64_t checksum = 0;
    std::string bytes;
  };

  explicit RawClient(const std::string& url)
      : channel(DialUrl(url)), stub(v1::CacheStore::NewStub(channel)), admin(v1::CacheAdmin::NewStub(channel)) {}
  ~RawClient() {
    if (life_ == nullptr) return;
    session_context_->TryCancel();
    life_->Finish();
  }

  // Opens or resumes a session.
  grpc::Status Hello(uint64_t resume = 0, uint32_t version_min = 1, uint32_t version_max = 1) {
    session_context_ = std::make_unique<grpc::ClientContext>();
    SetTestDeadline(session_context_.get());
    life_ = stub->Session(session_context_.get());
    v1::SessionRequest request;
    request.mutable_hello()->set_version_min(version_min);
    request.mutable_hello()->set_version_max(version_max);
    request.mutable_hello()->set_resume(resume);
    life_->Write(request);
    v1::SessionReply reply;
    while (life_->Read(&reply)) {
      if (!reply.has_welcome()) continue;
      welcome = reply.welcome();
      return grpc::Status::OK;
    }
    return std::exchange(life_, nullptr)->Finish();
  }
  bool Say(const v1::SessionRequest& request) { return life_->Write(request); }
  bool Hear(v1::SessionReply* reply) { return life_->Read(reply); }
  grpc::Status Bye() {
    v1::SessionRequest request;
    request.mutable_bye();
    life_->Write(request);
    v1::SessionReply reply;
    while (life_->Read(&reply)) continue;
    return std::exchange(life_, nullptr)->Finish();
  }
  // What the stream ends with.
  grpc::Status WaitForEnd() {
    v1::SessionReply reply;
    while (life_->Read(&reply)) continue;
    return std::exchange(life_, nullptr)->Finish();
  }

  NamespaceId Open(const NamespaceSpec& spec) {
    grpc::ClientContext context;
    SetTestDeadline(&context);
    v1::OpenNamespaceRequest request;
    request.set_session(welcome.session());
    ToProto(spec, request.mutable_spec());
    v1::OpenNamespaceReply reply;
    const grpc::Status status = stub->OpenNamespace(&context, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return FromProto(reply.ns());
  }

  grpc::Status Reserve(const NamespaceId& ns, uint32_t count, std::vector<ChunkKey>* keys) {
    grpc::ClientContext context;
    SetTestDeadline(&context);
    v1::ReserveRequest request;
    request.set_session(welcome.session());
    ToProto(ns, request.mutable_ns());
    request.set_count(count);
    v1::ReserveReply reply;
    grpc::Status status = stub->Reserve(&context, request, &reply);
    for (const v1::Id& id : reply.ids()) keys->push_back({ns, FromProto(id), 0, 0});
    return status;
  }

  grpc::Status Publish(const ChunkKey& live, const Id128& prefix_key) {
    grpc::ClientContext context;
    SetTestDeadline(&context);
    v1::PublishRequest request;
    request.set_session(welcome.session());
    ToProto(live, request.mutable_live());
    ToProto(prefix_key, request.mutable_prefix_key());
    v1::PublishReply reply;
    return stub->Publish(&context, request, &reply);
  }

  // How many leading chunks there are.
  uint32_t Lookup(const std::vector<ChunkKey>& keys, bool lease) {
    grpc::ClientContext context;
    SetTestDeadline(&context);
    v1::LookupRequest request;
    request.set_session(welcome.session());
    for (const ChunkKey& key : keys) ToProto(key, request.add_keys());
    request.set_lease(lease);
    v1::LookupReply reply;
    const grpc::Status status = stub->Lookup(&context, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply.chunks();
  }

  // A message with one piece of one block. `checksum`: of the whole block, where the caller has it.
  v1::PutRequest Piece(const BlockKey& key, const std::vector<uint8_t>& block, uint64_t offset, uint64_t size,
                       std::optional<uint64_t> checksum = std::nullopt) const {
    v1::PutRequest request;
    request.set_session(welcome.session());
    v1::PutPiece* piece = request.add_pieces();
    ToProto(key, piece->mutable_block());
    piece->set_offset(offset);
    piece->set_size(size);
    piece->set_checksum(checksum.has_value() ? *checksum : BlockChecksum(ByteView(block)));
    request.set_data(block.data() + offset, size);
    return request;
  }

  // Sends all blocks on one stream, in pieces of 1 MiB, and collects the acknowledgements by key.
  grpc::Status Put(const std::vector<std::pair<BlockKey, std::vector<uint8_t>>>& blocks,
                   std::map<std::string, v1::PutReply::Ack>* acks) {
    grpc::ClientContext context;
    SetTestDeadline(&context);
    const auto stream = stub->Put(&context);
    for (const auto& [key, block] : blocks) {
      const uint64_t checksum = BlockChecksum(ByteView(block));
      for (uint64_t at = 0; at < block.size(); at += kMaxFrameData) {
        stream->Write(Piece(key, block, at, std::min<uint64_t>(kMaxFrameData, block.size() - at), checksum));
      }
    }
    stream->WritesDone();
    v1::PutReply reply;
    while (stream->Read(&reply)) {
      for (const auto& ack : reply.acks()) (*acks)[ToString(*FromProto(ack.block()))] = ack;
    }
    return stream->Finish();
  }

  grpc::Status Get(const std::vector<BlockKey>& keys, std::vector<Got>* got, uint64_t window = 0) {
    grpc::ClientContext context;
    SetTestDeadline(&context);
    v1::GetRequest request;
    request.set_session(welcome.session());
    request.set_window_bytes(window);
    for (const BlockKey& key : keys) ToProto(key, request.add_keys());
    const auto stream = stub->Get(&context, request);
    got->assign(keys.size(), Got());
    v1::GetReply reply;
    while (stream->Read(&reply)) {
      EXPECT_LE(reply.data().size(), kMaxFrameData);
      size_t at = 0;
      for (const auto& piece : reply.pieces()) {
        Got& block = got->at(piece.index());
        EXPECT_EQ(piece.offset(), block.bytes.size());
        block.code = piece.code();
        block.checksum = piece.checksum();
        block.bytes += reply.data().substr(at, piece.size());
        at += piece.size();
      }
    }
    return stream->Finish();
  }

  std::map<std::string, uint64_t> Stats() {
    grpc::ClientContext context;
    SetTestDeadline(&context);
    v1::StatsReply reply;
    const grpc::Status status = admin->Stats(&context, v1::StatsRequest(), &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    std::map<std::string, uint64_t> values;
    for (const auto& value : reply.values()) {
      EXPECT_TRUE(values.emplace(value.name(), value.value()).second) << value.name() << " comes twice";
    }
    return values;
  }

  const std::shared_ptr<grpc::Channel> channel;
  const std::unique_ptr<v1::CacheStore::Stub> stub;
  const std::unique_ptr<v1::CacheAdmin::Stub> admin;
  v1::SessionReply::Welcome welcome;

 private:
  std::unique_ptr<grpc::ClientContext> session_context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionReply>> life_;
};

// Waits until `condition` holds, for what another process or thread is about to do; false after two minutes.
template <typename Condition>
bool Eventually(Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

}  // namespace kvferry
