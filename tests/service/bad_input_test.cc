// Requests for what there is not, and messages that do not add up. Each is refused by name, and nothing of it stays.
#include <algorithm>
#include <functional>
#include <set>

#include "absl/strings/escaping.h"
#include "gmock/gmock.h"
#include "google/protobuf/unknown_field_set.h"
#include "gtest/gtest.h"
#include "tests/service/any_message.h"
#include "tests/service/bad_input_fixture.h"

namespace kvferry {
namespace {

using google::protobuf::Message;
using google::protobuf::MethodDescriptor;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(BadInputTest, EveryServiceIsTried) {
  std::set<std::string> tried = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"};
  for (const auto* service : Services()) tried.insert(service->full_name());
  const std::string list_services("\x3a\x01*");
  const std::string served =
      RawCaller(witness_->channel)
          .CallUnary("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", list_services)
          .replies;
  for (const std::string& name : tried) EXPECT_THAT(served, HasSubstr(name));
  EXPECT_EQ(std::count(served.begin(), served.end(), '\n') / 2, tried.size()) << absl::CHexEscape(served);
}

// Without a word about fields that only its version has; the rest of each message works.
TEST_F(BadInputTest, AClientOfALaterVersionIsServed) {
  auto client = NewClient();
  const uint64_t session = client->welcome.session();
  RawCaller caller(client->channel);
  MessageMaker maker({session, spec_, ns_, {}, 0}, Seed());
  SCOPED_TRACE(testing::Message() << "KVFERRY_SEED=" << Seed());
  const auto call = [&](const char* method, auto request, auto* reply) {
    request.set_session(session);
    maker.AddUnknownFields(&request);
    const auto* service =
        google::protobuf::DescriptorPool::generated_pool()->FindServiceByName("kvferry.v1.CacheStore");
    const Answer answer = caller.Call(*service->FindMethodByName(method), {request.SerializeAsString()});
    EXPECT_TRUE(answer.status.ok()) << method << ": " << answer.status.error_message();
    EXPECT_TRUE(reply->ParseFromString(answer.replies));
  };
  v1::OpenNamespaceRequest open;
  ToProto(spec_, open.mutable_spec());
  v1::OpenNamespaceReply opened;
  call("OpenNamespace", open, &opened);
  EXPECT_EQ(FromProto(opened.ns()), ns_) << "what is not known is no part of the name";
  v1::ReserveRequest reserve;
  *reserve.mutable_ns() = opened.ns();
  reserve.set_count(1);
  v1::ReserveReply reserved;
  call("Reserve", reserve, &reserved);
  ASSERT_EQ(reserved.ids_size(), 1);
  const ChunkKey chunk{ns_, FromProto(reserved.ids(0)), 0, 0};
  std::vector<RawClient::Got> got;
  for (uint16_t layer = 0; layer < 2; ++layer) {
    v1::PutReply put;
    call("Put", client->Piece({chunk, layer}, Block(50 + layer), 0, Block(0).size()), &put);
    ASSERT_EQ(put.acks_size(), 1);
    EXPECT_EQ(put.acks(0).code(), 0u) << put.acks(0).message();
  }
  v1::GetRequest get;
  ToProto(BlockKey{chunk, 1}, get.add_keys());
  v1::GetReply block;
  call("Get", get, &block);
  EXPECT_EQ(block.data(), Text(Block(51)));
  const ChunkKey name{ns_, {77, 7}, 0, 0};
  v1::PublishRequest publish;
  ToProto(chunk, publish.mutable_live());
  ToProto(name.id, publish.mutable_prefix_key());
  v1::PublishReply published;
  call("Publish", publish, &published);
  v1::LookupRequest lookup;
  ToProto(name, lookup.add_keys());
  v1::LookupReply found;
  call("Lookup", lookup, &found);
  EXPECT_EQ(found.chunks(), 1u);
  v1::EraseRequest erase;
  ToProto(name, erase.mutable_key());
  v1::EraseReply erased;
  call("Erase", erase, &erased);
  EXPECT_EQ(client->Lookup({name}, false), 0u);
  v1::SessionRequest release;
  release.mutable_release()->set_seq(1);
  ToProto(chunk, release.mutable_release()->add_keys());
  maker.AddUnknownFields(&release);
  ASSERT_TRUE(client->Say(release));
  EXPECT_TRUE(Eventually([&] { return Gauges()["chunks_live"] == before_["chunks_live"]; }));
  v1::SessionRequest bye;
  bye.mutable_bye();
  maker.AddUnknownFields(&bye);
  ASSERT_TRUE(client->Say(bye));
  EXPECT_TRUE(client->WaitForEnd().ok());
  ExpectNothingChanged();
}

TEST_F(BadInputTest, EveryMethodNamesAnUnknownSession) {
  const uint64_t unknown = kLiveBit | 0xabc;
  RawCaller caller(witness_->channel);
  MessageMaker maker({unknown, spec_, ns_, {live_, published_}, 0}, Seed());
  int tried = 0;
  for (const MethodDescriptor* method : Methods()) {
    if (method->input_type()->FindFieldByName("session") == nullptr) continue;
    SCOPED_TRACE(method->full_name());
    const std::unique_ptr<Message> request = NewRequest(*method);
    maker.Fill(request.get());
    if (auto* publish = dynamic_cast<v1::PublishRequest*>(request.get())) {
      publish->mutable_prefix_key()->set_lo(1);
      publish->clear_parent();
      publish->clear_priority();
      publish->clear_ttl_ms();
    }
    const grpc::Status status = caller.Call(*method, {request->SerializeAsString()}).status;
    EXPECT_EQ(status.error_code(), grpc::NOT_FOUND);
    EXPECT_THAT(status.error_message(), HasSubstr("session 8000000000000abc"));
    ++tried;
  }
  EXPECT_GE(tried, 9);
  ExpectNothingChanged();
}

// Never opened by anybody, by another session, by another tenant: a session knows its own alone.
TEST_F(BadInputTest, ForeignNamespacesAreRefusedByName) {
  auto other = NewClient();
  Store* const store = server_->store();
  const auto tenants = store->OpenSession("another tenant");
  const auto theirs = store->OpenNamespace(*tenants, SmallSpec());
  ASSERT_TRUE(theirs.ok()) << theirs.status();
  const NamespaceId others = other->Open(SmallSpec(3));
  for (const NamespaceId& ns : {NamespaceId{1, 2}, others, *theirs}) {
    std::vector<ChunkKey> keys;
    const grpc::Status status = witness_->Reserve(ns, 1, &keys);
    EXPECT_EQ(status.error_code(), grpc::NOT_FOUND);
    EXPECT_THAT(status.error_message(),
                HasSubstr(absl::StrCat("namespace ", ToString(ns), " has not been opened by this session")));
    EXPECT_EQ(witness_->Lookup({{ns, published_.id, 0, 0}}, true), 0u);
    EXPECT_THAT(witness_->Publish({ns, live_.id, 0, 0}, {7, 7}).error_message(),
                HasSubstr(absl::StrCat("no live chunk ", ToString(ns))));
  }
  store->EndSession(*tenants);
  EXPECT_TRUE(other->Bye().ok());
  ExpectNothingChanged();
}

TEST_F(BadInputTest, AnotherSessionsChunksCannotBeTouched) {
  auto other = NewClient();
  ASSERT_EQ(other->Open(spec_), ns_);
  const ChunkKey reserved = ReserveOne(witness_.get());
  std::map<std::string, v1::PutReply::Ack> acks;
  ASSERT_TRUE(other->Put({{{live_, 0}, Block(9)}, {{reserved, 0}, Block(9)}}, &acks).ok());
  for (const ChunkKey& key : {live_, reserved}) {
    const v1::PutReply::Ack& ack = acks[ToString(BlockKey{key, 0})];
    EXPECT_EQ(ack.code(), static_cast<uint32_t>(grpc::NOT_FOUND));
    EXPECT_EQ(ack.message(), absl::StrCat("chunk ", ToString(key), " is not reserved by this session"));
    EXPECT_EQ(other->Publish(key, {7, 7}).error_code(), grpc::NOT_FOUND);
  }
  v1::SessionRequest release;
  release.mutable_release()->set_seq(1);
  for (const ChunkKey& key : {live_, reserved, published_}) ToProto(key, release.mutable_release()->add_keys());
  ASSERT_TRUE(other->Say(release));
  EXPECT_TRUE(other->Bye().ok());
  EXPECT_EQ(Gauges()["chunks_reserved"], 1u);
  release.mutable_release()->mutable_keys()->DeleteSubrange(0, 1);
  release.mutable_release()->mutable_keys()->RemoveLast();
  ASSERT_TRUE(witness_->Say(release));
  ExpectNothingChanged();
}

TEST_F(BadInputTest, NumbersOutOfRangeAreNamedWithTheirRange) {
  struct Case {
    std::function<void(v1::ReserveRequest*)> change;
    std::string named;
  };
  const std::vector<Case> cases = {
      {[](auto* r) { r->set_group(7); }, "group is 7, expected 0 to 0"},
      {[](auto* r) { r->set_shard(1); }, "shard is 1, expected 0 to 0"},
      {[](auto* r) { r->set_group(1 << 16); }, "group is 65536 and shard is 0, expected 0 to 65535"},
      {[](auto* r) { r->set_count(static_cast<uint32_t>(-1)); }, "count is 4294967295, expected 1 to 65536"},
      {[](auto* r) { r->set_count(65536); }, "asked for 65536 chunks of"},
      // No time to wait makes room for what can never be.
      {[](auto* r) { r->set_count(65536), r->set_wait_ms(static_cast<uint32_t>(-1)); }, "budget 268435456"},
  };
  for (const Case& c : cases) {
    v1::ReserveRequest request;
    request.set_session(witness_->welcome.session());
    ToProto(ns_, request.mutable_ns());
    request.set_count(1);
    c.change(&request);
    grpc::ClientContext context;
    SetTestDeadline(&context);
    v1::ReserveReply reply;
    const grpc::Status status = witness_->stub->Reserve(&context, request, &reply);
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(status.error_message(), HasSubstr(c.named));
  }
  ExpectNothingChanged();
}

TEST_F(BadInputTest, BlocksLargerThanAnythingAreRefused) {
  // More than a block may have, and more than this store can hold.
  const NamespaceSpec huge = SmallSpec(1, 1 << 16, 1 << 20, 4096), large = SmallSpec(1, 1 << 10, 1 << 10, 256);
  grpc::ClientContext context;
  SetTestDeadline(&context);
  v1::OpenNamespaceRequest request;
  request.set_session(witness_->welcome.session());
  ToProto(huge, request.mutable_spec());
  v1::OpenNamespaceReply reply;
  EXPECT_THAT(witness_->stub->OpenNamespace(&context, request, &reply).error_message(),
              HasSubstr("groups[0].layers[0]: bytes of a block is 2251799813685248, expected 1 to 4294967296"));
  auto other = NewClient();
  std::vector<ChunkKey> keys;
  const grpc::Status status = other->Reserve(other->Open(large), 1, &keys);
  EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), AllOf(HasSubstr("asked for 1 chunks of 21"), HasSubstr("budget 268435456")));
  EXPECT_TRUE(other->Bye().ok());
  ExpectNothingChanged();
}

TEST_F(BadInputTest, GetsNameTheLayerAndTheWindow) {
  grpc::ClientContext context;
  SetTestDeadline(&context);
  v1::GetRequest request;
  request.set_session(witness_->welcome.session());
  ToProto(BlockKey{live_, 2}, request.add_keys());
  const auto stream = witness_->stub->Get(&context, request);
  v1::GetReply reply;
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.pieces(0).code(), static_cast<uint32_t>(grpc::INVALID_ARGUMENT));
  EXPECT_EQ(reply.pieces(0).message(), absl::StrCat("get: layer is 2, expected 0 to 1 in chunk ", ToString(live_)));
  EXPECT_TRUE(stream->Finish().ok());
  std::vector<RawClient::Got> got;
  EXPECT_EQ(witness_->Get({{live_, 0}}, &got, UINT64_MAX).error_message(),
            "window_bytes is 18446744073709551615, expected at most 67108864");
  ExpectNothingChanged();
}

// A key has two words of 64 bits. What has more or fewer bytes is none, and is never taken for another one.
TEST_F(BadInputTest, KeysOfAnotherLengthAreRefused) {
  RawCaller caller(witness_->channel);
  for (const size_t length : {1, 8, 15, 16, 17, 32}) {
    google::protobuf::UnknownFieldSet key, lookup;
    key.AddLengthDelimited(v1::ChunkKey::kNsFieldNumber)->assign(length, '\xff');
    lookup.AddFixed64(v1::LookupRequest::kSessionFieldNumber, witness_->welcome.session());
    std::string bytes;
    ASSERT_TRUE(key.SerializeToString(&bytes));
    lookup.AddLengthDelimited(v1::LookupRequest::kKeysFieldNumber, bytes);
    ASSERT_TRUE(lookup.SerializeToString(&bytes));
    const grpc::Status status = caller.CallUnary("/kvferry.v1.CacheStore/Lookup", bytes).status;
    EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
    EXPECT_EQ(status.error_message(),
              absl::StrCat("malformed message: ", bytes.size(), " bytes that are no kvferry.v1.LookupRequest"));
  }
  ExpectNothingChanged();
}

TEST_F(BadInputTest, ABlockThatIsCutShortByTheEndOfItsStreamIsNotStored) {
  const ChunkKey chunk = ReserveOne(witness_.get());
  const auto put = [&](const v1::PutRequest& request) {
    grpc::ClientContext context;
    SetTestDeadline(&context);
    const auto stream = witness_->stub->Put(&context);
    stream->WriteLast(request, grpc::WriteOptions());
    v1::PutReply reply, all;
    while (stream->Read(&reply)) all.MergeFrom(reply);
    const grpc::Status status = stream->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    return all;
  };
  v1::PutReply reply = put(witness_->Piece({chunk, 1}, Block(1), 0, 100));
  ASSERT_EQ(reply.acks_size(), 1);
  EXPECT_EQ(reply.acks(0).code(), static_cast<uint32_t>(grpc::INVALID_ARGUMENT));
  EXPECT_EQ(reply.acks(0).message(), absl::StrCat("only 100 of the 512 bytes of block ", ToString(BlockKey{chunk, 1}),
                                                  " came before the stream ended"));
  // Nobody is writing it any more.
  reply = put(witness_->Piece({chunk, 1}, Block(1), 0, 512));
  ASSERT_EQ(reply.acks_size(), 1);
  EXPECT_EQ(reply.acks(0).code(), 0u) << reply.acks(0).message();
  v1::SessionRequest release;
  release.mutable_release()->set_seq(1);
  ToProto(chunk, release.mutable_release()->add_keys());
  ASSERT_TRUE(witness_->Say(release));
  ExpectNothingChanged();
}

// One acknowledgement for a block without a right key, wherever it begins and in however many pieces it comes.
TEST_F(BadInputTest, ABlockWithABadKeyIsAcknowledgedOnce) {
  v1::PutRequest request;
  request.set_session(witness_->welcome.session());
  const auto add = [&request](uint32_t layer, uint64_t offset) {
    v1::PutPiece* piece = request.add_pieces();
    piece->mutable_block()->set_layer(layer);
    piece->set_offset(offset);
    piece->set_size(10);
    request.mutable_data()->append(10, 'x');
  };
  add(70000, 0), add(70000, 10), add(70000, 20);
  add(70001, 512), add(70001, 522);
  add(70001, 512);
  grpc::ClientContext context;
  SetTestDeadline(&context);
  const auto stream = witness_->stub->Put(&context);
  stream->WriteLast(request, grpc::WriteOptions());
  std::vector<std::string> messages;
  v1::PutReply reply;
  while (stream->Read(&reply)) {
    for (const auto& ack : reply.acks()) messages.push_back(ack.message());
  }
  EXPECT_TRUE(stream->Finish().ok());
  const std::string first = "layer of a block key is 70000, expected 0 to 65535";
  const std::string second = "layer of a block key is 70001, expected 0 to 65535";
  EXPECT_EQ(messages, (std::vector<std::string>{first, second, second}));
  ExpectNothingChanged();
}

TEST_F(BadInputTest, AMessageOfTooManyPiecesIsRefused) {
  v1::PutRequest request;
  request.set_session(witness_->welcome.session());
  for (int i = 0; i < 4097; ++i) request.add_pieces();
  grpc::ClientContext context;
  SetTestDeadline(&context);
  const auto stream = witness_->stub->Put(&context);
  stream->WriteLast(request, grpc::WriteOptions());
  v1::PutReply reply;
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_EQ(stream->Finish().error_message(), "a message of 4097 pieces, expected at most 4096");
  ExpectNothingChanged();
}

}  // namespace
}  // namespace kvferry
