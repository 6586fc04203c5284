// A server for those who send what no client of ours does, and a witness that nothing comes of it.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "gtest/gtest.h"
#include "service/server.h"
#include "tests/base/specs.h"
#include "tests/service/block_bytes.h"
#include "tests/service/raw_caller.h"
#include "tests/service/raw_client.h"

namespace kvferry {

// KVFERRY_SEED, or another one each time.
inline uint64_t Seed() {
  static const uint64_t seed = [] {
    uint64_t given;
    const char* const text = getenv("KVFERRY_SEED");
    return text != nullptr && absl::SimpleAtoi(text, &given) ? given : uint64_t{std::random_device()()};
  }();
  return seed;
}

inline std::vector<const google::protobuf::ServiceDescriptor*> Services() {
  std::vector<const google::protobuf::ServiceDescriptor*> services;
  for (const auto* file : {v1::ChunkKey::descriptor()->file(), v1::StatsRequest::descriptor()->file()}) {
    for (int i = 0; i < file->service_count(); ++i) services.push_back(file->service(i));
  }
  return services;
}

inline std::vector<const google::protobuf::MethodDescriptor*> Methods() {
  std::vector<const google::protobuf::MethodDescriptor*> methods;
  for (const auto* service : Services()) {
    for (int i = 0; i < service->method_count(); ++i) methods.push_back(service->method(i));
  }
  return methods;
}

inline std::unique_ptr<google::protobuf::Message> NewRequest(const google::protobuf::MethodDescriptor& method) {
  return std::unique_ptr<google::protobuf::Message>(
      google::protobuf::MessageFactory::generated_factory()->GetPrototype(method.input_type())->New());
}

// A server, and a witness: a client whose blocks have to be there, whatever others send.
class BadInputTest : public testing::Test {
 protected:
  BadInputTest() {
    ServerOptions options;
    options.store.memory_bytes = 256 * kMiB;
    options.store.segment_bytes = 8 * kMiB;
    options.store.reservation_grace = absl::Milliseconds(20);  // sessions that were opened and left go soon
    options.heartbeat = absl::Minutes(10);
    options.listen = {*ParseListenAddress(absl::StrCat("unix://", testing::TempDir(), "/kvf_bad_", getpid(), ".sock"))};
    auto started = Server::Start(options);
    EXPECT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
    witness_ = NewClient();
    ns_ = witness_->Open(spec_);
    live_ = PutChunk(witness_.get(), 1);
    const ChunkKey other = PutChunk(witness_.get(), 2);
    published_ = {ns_, {1000, 1}, 0, 0};
    EXPECT_TRUE(witness_->Publish(other, published_.id).ok());
    EXPECT_EQ(witness_->Lookup({published_}, /*lease=*/true), 1u);
    EXPECT_TRUE(Eventually([this] { return server_->stats().put_streams == 0; }));
    before_ = Gauges();
  }

  std::unique_ptr<RawClient> NewClient() {
    auto client = std::make_unique<RawClient>(server_->Addresses()[0]);
    EXPECT_TRUE(client->Hello().ok());
    return client;
  }

  ChunkKey ReserveOne(RawClient* client) {
    std::vector<ChunkKey> keys;
    const grpc::Status status = client->Reserve(ns_, 1, &keys);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return keys.empty() ? ChunkKey() : keys[0];
  }
  std::vector<uint8_t> Block(uint64_t salt) const { return BlockBytes(spec_.BlockBytes(0, 0), salt); }
  static std::string Text(const std::vector<uint8_t>& bytes) { return std::string(bytes.begin(), bytes.end()); }
  // A chunk of two layers with the blocks `salt` and `salt` + 100.
  ChunkKey PutChunk(RawClient* client, uint64_t salt) {
    const ChunkKey chunk = ReserveOne(client);
    std::map<std::string, v1::PutReply::Ack> acks;
    EXPECT_TRUE(client->Put({{{chunk, 0}, Block(salt)}, {{chunk, 1}, Block(salt + 100)}}, &acks).ok());
    for (const auto& [key, ack] : acks) EXPECT_EQ(ack.code(), 0u) << ack.message();
    return chunk;
  }

  // What is held now. Free segments are kept for the next who needs one.
  std::map<std::string, uint64_t> Gauges() {
    grpc::ClientContext context;
    SetTestDeadline(&context);
    v1::StatsReply reply;
    EXPECT_TRUE(witness_->admin->Stats(&context, v1::StatsRequest(), &reply).ok());
    std::map<std::string, uint64_t> gauges;
    for (const auto& value : reply.values()) {
      if (value.gauge() && value.name() != "segments" && value.name() != "memory_free_in_segments_bytes") {
        gauges[value.name()] = value.value();
      }
    }
    return gauges;
  }

  // The server serves, the witness has its blocks, and there is nothing else.
  void ExpectNothingChanged() {
    const Answer health = RawCaller(witness_->channel).CallUnary("/grpc.health.v1.Health/Check", "");
    EXPECT_EQ(health.replies, "\x08\x01") << health.status.error_message();
    std::vector<RawClient::Got> got;
    ASSERT_TRUE(witness_->Get({{live_, 0}, {live_, 1}, {published_, 0}, {published_, 1}}, &got).ok());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].bytes, Text(Block(1 + i / 2 + 100 * (i % 2)))) << i;
    }
    EXPECT_TRUE(Eventually([this] { return Gauges() == before_; }));
    EXPECT_EQ(Gauges(), before_);
  }

  const NamespaceSpec spec_ = SmallSpec();
  std::unique_ptr<Server> server_;
  std::unique_ptr<RawClient> witness_;
  NamespaceId ns_{};
  ChunkKey live_, published_;
  std::map<std::string, uint64_t> before_;
};

}  // namespace kvferry
