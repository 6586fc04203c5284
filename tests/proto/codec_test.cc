#include "proto/codec.h"

#include <limits>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/base/specs.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

BlockKey AnyKey() {
  BlockKey key;
  key.chunk.ns = {1, std::numeric_limits<uint64_t>::max()};
  key.chunk.id = {kLiveBit | 7, 9};
  key.chunk.group = 65535;
  key.chunk.shard = 3;
  key.layer = 65534;
  return key;
}

TEST(Codec, KeysRoundTrip) {
  v1::BlockKey message;
  ToProto(AnyKey(), &message);
  v1::BlockKey received;
  ASSERT_TRUE(received.ParseFromString(message.SerializeAsString()));
  const auto key = FromProto(received);
  ASSERT_TRUE(key.ok()) << key.status();
  EXPECT_EQ(*key, AnyKey());
}

// B25: a key that is not one of ours is refused by name, never cut to fit.
TEST(Codec, RefusesNumbersThatDoNotFit) {
  v1::BlockKey message;
  ToProto(AnyKey(), &message);
  message.set_layer(65536);
  EXPECT_THAT(FromProto(message).status().message(), HasSubstr("layer of a block key is 65536"));
  message.set_layer(0);
  message.mutable_chunk()->set_group(1 << 20);
  EXPECT_THAT(FromProto(message).status().message(), HasSubstr("group of a chunk key is 1048576"));
  message.mutable_chunk()->set_group(0);
  message.mutable_chunk()->set_shard(70000);
  const auto status = FromProto(message).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(status.message(), HasSubstr("shard of a chunk key is 70000"));
}

TEST(Codec, SpecsRoundTrip) {
  NamespaceSpec spec = MixedSpec();
  spec.rope = "yarn";
  spec.shards = 2;
  spec.model = std::string("\0\xff bytes of any kind", 20);
  spec.groups[1].retention = Retention::kWindow;
  spec.groups[1].window = 4096;
  v1::NamespaceSpec message;
  ToProto(spec, &message);
  v1::NamespaceSpec received;
  ASSERT_TRUE(received.ParseFromString(message.SerializeAsString()));
  const auto back = FromProto(received);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(Canonical(*back), Canonical(spec));
}

TEST(Codec, RefusesAnUnknownRetention) {
  v1::NamespaceSpec message;
  ToProto(MixedSpec(), &message);
  message.mutable_groups(1)->set_retention(3);
  EXPECT_THAT(FromProto(message).status().message(), HasSubstr("retention of group 1 is 3"));
}

TEST(Codec, StatusesKeepTheirCodes) {
  for (int code = 0; code <= static_cast<int>(absl::StatusCode::kUnauthenticated); ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "why");
    EXPECT_EQ(FromGrpc(ToGrpc(status)), status);
    EXPECT_EQ(FromWireCode(ToWireCode(status), "why"), status);
  }
  EXPECT_EQ(FromWireCode(99, "later").code(), absl::StatusCode::kUnknown);
}

// B45: what goes into a trailer stays below gRPC's limit on metadata.
TEST(Codec, LongMessagesAreCut) {
  const grpc::Status status = ToGrpc(absl::InternalError(std::string(100'000, 'x')));
  EXPECT_EQ(status.error_message().size(), 1024u);
}

}  // namespace
}  // namespace kvferry
