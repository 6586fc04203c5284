// The whole service in this process, spoken to with plain stubs over both kinds of sockets.
#include "service/server.h"

#include <unistd.h>

#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/base/specs.h"
#include "tests/service/block_bytes.h"
#include "tests/service/raw_client.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

ServerOptions TestOptions() {
  ServerOptions options;
  options.store.memory_bytes = 256 * kMiB;
  options.store.segment_bytes = 8 * kMiB;
  options.heartbeat = absl::Minutes(10);  // plain clients send none
  options.listen = {*ParseListenAddress("127.0.0.1:0"),
                    *ParseListenAddress(absl::StrCat("unix://", testing::TempDir(), "/kvf_", getpid(), ".sock"))};
  return options;
}

// A spec whose blocks have `kib` KiB.
NamespaceSpec SpecOf(uint32_t kib, int layers = 1) { return SmallSpec(layers, kib, 128, 1); }

class ServerTest : public testing::TestWithParam<int> {
 protected:
  explicit ServerTest(const ServerOptions& options = TestOptions()) {
    auto started = Server::Start(options);
    EXPECT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
    client_ = NewClient();
    EXPECT_TRUE(client_->Hello().ok());
  }
  ~ServerTest() override {
    client_.reset();
    server_.reset();
  }

  std::string url() const { return server_->Addresses()[GetParam()]; }
  std::unique_ptr<RawClient> NewClient() const { return std::make_unique<RawClient>(url()); }

  ChunkKey ReserveOne(RawClient* client, const NamespaceId& ns) {
    std::vector<ChunkKey> keys;
    const grpc::Status status = client->Reserve(ns, 1, &keys);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return keys.empty() ? ChunkKey() : keys[0];
  }

  // Puts one block of `bytes` into a new chunk of one layer.
  BlockKey PutOne(RawClient* client, const NamespaceId& ns, const std::vector<uint8_t>& bytes) {
    const BlockKey key{ReserveOne(client, ns), 0};
    std::map<std::string, v1::PutReply::Ack> acks;
    EXPECT_TRUE(client->Put({{key, bytes}}, &acks).ok());
    EXPECT_EQ(acks[ToString(key)].code(), 0u) << acks[ToString(key)].message();
    return key;
  }

  static std::string Text(const std::vector<uint8_t>& bytes) { return std::string(bytes.begin(), bytes.end()); }

  std::unique_ptr<Server> server_;
  std::unique_ptr<RawClient> client_;
};
INSTANTIATE_TEST_SUITE_P(Sockets, ServerTest, testing::Values(0, 1),
                         [](const auto& info) { return info.param == 0 ? "Tcp" : "Unix"; });

// B45: any block size works, by cutting it into messages; a put copies each byte once.
TEST_P(ServerTest, AnyBlockSizeRoundTripsWithoutExtraCopies) {
  uint64_t sent = 0;
  for (const uint32_t kib : {1u, 64u, 1023u, 1024u, 1025u, 4095u, 4096u, 4097u, 65536u / 4}) {
    const NamespaceId ns = client_->Open(SpecOf(kib));
    const auto block = BlockBytes(kib * kKiB, kib);
    const BlockKey key = PutOne(client_.get(), ns, block);
    sent += block.size();
    std::vector<RawClient::Got> got;
    ASSERT_TRUE(client_->Get({key}, &got).ok());
    EXPECT_EQ(got[0].bytes, Text(block)) << kib;
    EXPECT_EQ(got[0].checksum, BlockChecksum(ByteView(block)));
  }
  auto stats = client_->Stats();
  EXPECT_EQ(stats["put_bytes"], sent);
  EXPECT_EQ(stats["put_bytes_copied"], sent);
  EXPECT_EQ(stats["get_bytes"], sent);
}

TEST_P(ServerTest, GetsKeepTheOrderOfTheirKeysAndTellMisses) {
  const NamespaceId ns = client_->Open(SpecOf(100));
  std::vector<BlockKey> keys;
  std::vector<std::vector<uint8_t>> blocks;
  for (int i = 0; i < 100; ++i) {
    blocks.push_back(BlockBytes(100 * kKiB, i));
    keys.push_back(PutOne(client_.get(), ns, blocks.back()));
  }
  std::vector<BlockKey> asked = {keys[7], keys[3], keys[7]};
  asked.insert(asked.end(), keys.begin(), keys.end());
  asked[1].chunk.id[1] += 1'000'000;
  for (const uint64_t window : {uint64_t{0}, uint64_t{1}, 64 * kMiB}) {
    std::vector<RawClient::Got> got;
    ASSERT_TRUE(client_->Get(asked, &got, window).ok());
    EXPECT_EQ(got[0].bytes, Text(blocks[7]));
    EXPECT_EQ(got[1].code, static_cast<uint32_t>(absl::StatusCode::kNotFound));
    EXPECT_EQ(got[2].bytes, Text(blocks[7]));
    for (int i = 0; i < 100; ++i) EXPECT_EQ(got[i + 3].bytes, Text(blocks[i])) << i;
  }
  std::vector<RawClient::Got> got;
  EXPECT_EQ(client_->Get(asked, &got, kGiB).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  const grpc::Status status = client_->Get(std::vector<BlockKey>(65537, asked[0]), &got);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("65537 keys, expected at most 65536"));
}

// B25: a bad key fails that block or call alone, and the connection and stream go on.
TEST_P(ServerTest, BadKeysFailAlone) {
  const NamespaceId ns = client_->Open(SpecOf(4, 2));
  const ChunkKey chunk = ReserveOne(client_.get(), ns);
  const auto block = BlockBytes(4 * kKiB, 1);
  grpc::ClientContext context;
  SetTestDeadline(&context);
  const auto stream = client_->stub->Put(&context);
  v1::PutRequest bad = client_->Piece({chunk, 0}, block, 0, block.size());
  bad.mutable_pieces(0)->mutable_block()->set_layer(70000);
  ASSERT_TRUE(stream->Write(client_->Piece({chunk, 5}, block, 0, block.size())));
  ASSERT_TRUE(stream->Write(bad));
  ASSERT_TRUE(stream->Write(client_->Piece({chunk, 0}, block, 0, block.size())));
  ASSERT_TRUE(stream->Write(client_->Piece({chunk, 1}, block, 0, block.size())));
  stream->WritesDone();
  std::map<uint32_t, uint32_t> codes;
  v1::PutReply reply;
  while (stream->Read(&reply)) {
    for (const auto& ack : reply.acks()) codes[ack.block().layer()] = ack.code();
  }
  EXPECT_TRUE(stream->Finish().ok());
  const auto invalid = static_cast<uint32_t>(absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(codes, (std::map<uint32_t, uint32_t>{{0, 0}, {1, 0}, {5, invalid}, {70000, invalid}}));
}

TEST_P(ServerTest, AMalformedPutEndsItsStreamAlone) {
  const NamespaceId ns = client_->Open(SpecOf(4));
  const ChunkKey chunk = ReserveOne(client_.get(), ns);
  const auto block = BlockBytes(4 * kKiB, 1);
  grpc::ClientContext context;
  SetTestDeadline(&context);
  const auto stream = client_->stub->Put(&context);
  v1::PutRequest wrong = client_->Piece({chunk, 0}, block, 0, block.size());
  wrong.mutable_pieces(0)->set_size(17);
  stream->Write(wrong);
  v1::PutReply reply;
  EXPECT_FALSE(stream->Read(&reply));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("add up to 17, but `data` has 4096"));
  EXPECT_EQ(client_->Stats()["malformed_messages"], 1u);
  std::map<std::string, v1::PutReply::Ack> acks;
  EXPECT_TRUE(client_->Put({{{chunk, 0}, block}}, &acks).ok());
  EXPECT_EQ(acks[ToString(BlockKey{chunk, 0})].code(), 0u);
}

// B46: a message beyond the limit is refused, and the connection lives.
TEST_P(ServerTest, OversizedMessagesAreRefused) {
  const NamespaceId ns = client_->Open(SpecOf(16 * 1024));
  const ChunkKey chunk = ReserveOne(client_.get(), ns);
  const auto block = BlockBytes(16 * kMiB, 1);
  grpc::ClientContext context;
  SetTestDeadline(&context);
  const auto stream = client_->stub->Put(&context);
  stream->Write(client_->Piece({chunk, 0}, block, 0, block.size()));
  stream->WritesDone();
  v1::PutReply reply;
  EXPECT_FALSE(stream->Read(&reply));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr(absl::StrCat(kMaxMessageBytes)));
  EXPECT_EQ(client_->Stats()["put_bytes_copied"], 0u);
  std::map<std::string, v1::PutReply::Ack> acks;
  ASSERT_TRUE(client_->Put({{{chunk, 0}, block}}, &acks).ok());
  EXPECT_EQ(acks[ToString(BlockKey{chunk, 0})].code(), 0u);
}

// B29: eight clients write and publish the same content at once; one name, the server lives.
TEST_P(ServerTest, EightWritersOfOneKey) {
  const NamespaceSpec spec = SpecOf(64);
  const auto block = BlockBytes(64 * kKiB, 1);
  std::vector<std::thread> threads;
  std::atomic<int> published{0}, existed{0};
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      const auto client = NewClient();
      ASSERT_TRUE(client->Hello().ok());
      const NamespaceId ns = client->Open(spec);
      const BlockKey key = PutOne(client.get(), ns, block);
      const grpc::Status status = client->Publish(key.chunk, {77, 77});
      if (status.ok()) ++published;
      if (status.error_code() == grpc::StatusCode::ALREADY_EXISTS) ++existed;
      std::vector<RawClient::Got> got;
      EXPECT_TRUE(client->Get({{{ns, {77, 77}, 0, 0}, 0}, key}, &got).ok());
      EXPECT_EQ(got[0].bytes, Text(block));
      EXPECT_EQ(got[1].bytes, Text(block));
      EXPECT_TRUE(client->Bye().ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(published, 1);
  EXPECT_EQ(existed, 7);
  EXPECT_EQ(client_->Stats()["chunks_published"], 1u);
}

// B31: while a block of 64 MiB streams in slowly, readers see a clean miss, then all of it.
TEST_P(ServerTest, ReadersSeeAllOrNothing) {
  const NamespaceId ns = client_->Open(SpecOf(64 * 1024));
  const BlockKey key{ReserveOne(client_.get(), ns), 0};
  const auto block = BlockBytes(64 * kMiB, 3);
  const uint64_t checksum = BlockChecksum(ByteView(block));
  grpc::ClientContext context;
  SetTestDeadline(&context);
  const auto stream = client_->stub->Put(&context);
  std::vector<RawClient::Got> got;
  for (uint64_t at = 0; at < block.size(); at += kMiB) {
    if (at % (8 * kMiB) == 0) {
      ASSERT_TRUE(client_->Get({key}, &got).ok());
      EXPECT_EQ(got[0].code, static_cast<uint32_t>(absl::StatusCode::kNotFound));
    }
    ASSERT_TRUE(stream->Write(client_->Piece(key, block, at, kMiB, checksum)));
  }
  v1::PutReply reply;
  ASSERT_TRUE(stream->Read(&reply));
  ASSERT_EQ(reply.acks(0).code(), 0u) << reply.acks(0).message();
  ASSERT_TRUE(client_->Get({key}, &got).ok());
  EXPECT_EQ(got[0].bytes, Text(block));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

// B30: a writer that vanishes in the middle leaves nothing visible, and after its bye nothing at all.
TEST_P(ServerTest, ABrokenPutLeavesNothingVisible) {
  const NamespaceSpec spec = SpecOf(2048);
  const auto block = BlockBytes(2 * kMiB, 1);
  auto writer = NewClient();
  ASSERT_TRUE(writer->Hello().ok());
  const BlockKey key{ReserveOne(writer.get(), writer->Open(spec)), 0};
  {
    grpc::ClientContext context;
    const auto stream = writer->stub->Put(&context);
    ASSERT_TRUE(stream->Write(writer->Piece(key, block, 0, kMiB)));
    ASSERT_TRUE(Eventually([&] { return server_->stats().put_bytes_copied == kMiB; }));
    context.TryCancel();
    stream->Finish();
  }
  ASSERT_TRUE(Eventually([&] { return server_->stats().put_streams == 0; }));
  std::vector<RawClient::Got> got;
  ASSERT_TRUE(writer->Get({key}, &got).ok());
  EXPECT_EQ(got[0].code, static_cast<uint32_t>(absl::StatusCode::kNotFound));
  EXPECT_EQ(client_->Stats()["chunks_reserved"], 1u);
  // The reservation survived the stream: the block is sent anew.
  std::map<std::string, v1::PutReply::Ack> acks;
  ASSERT_TRUE(writer->Put({{key, block}}, &acks).ok());
  EXPECT_EQ(acks[ToString(key)].code(), 0u) << acks[ToString(key)].message();
  EXPECT_TRUE(writer->Bye().ok());
  EXPECT_TRUE(Eventually([&] { return client_->Stats()["chunks_live"] == 0; }));
}

TEST_P(ServerTest, ASlowReaderBoundsWhatIsReadAhead) {
  const NamespaceId ns = client_->Open(SpecOf(1024));
  std::vector<BlockKey> keys;
  const auto block = BlockBytes(kMiB, 1);
  for (int i = 0; i < 100; ++i) keys.push_back(PutOne(client_.get(), ns, block));
  grpc::ClientContext context;
  SetTestDeadline(&context);
  v1::GetRequest request;
  request.set_session(client_->welcome.session());
  request.set_window_bytes(2 * kMiB);
  for (const BlockKey& key : keys) ToProto(key, request.add_keys());
  const auto stream = client_->stub->Get(&context, request);
  v1::GetReply reply;
  ASSERT_TRUE(stream->Read(&reply));
  // Not read further: the flow control of the wire and the window stop the service well before the end.
  EXPECT_LT(server_->store()->Stats().blocks_got, 60u);
  context.TryCancel();
  stream->Finish();
  EXPECT_TRUE(Eventually([&] { return server_->stats().get_streams == 0; }));
}

// B46: 64 streams of 64 MiB whose readers hardly read: what the service holds for them are their windows.
TEST_P(ServerTest, SixtyFourSlowReadersHoldTheirWindowsAlone) {
  constexpr uint64_t kStreams = 64, kBlock = 256 * kKiB, kWindow = kMiB;
  const NamespaceId ns = client_->Open(SpecOf(kBlock / kKiB));
  std::vector<BlockKey> keys;
  for (int i = 0; i < 16; ++i) keys.push_back(PutOne(client_.get(), ns, BlockBytes(kBlock, i)));
  v1::GetRequest request;
  request.set_session(client_->welcome.session());
  request.set_window_bytes(kWindow);
  for (uint64_t i = 0; i < 64 * kMiB / kBlock; ++i) ToProto(keys[i % keys.size()], request.add_keys());
  struct Reader {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<v1::GetReply>> stream;
  };
  std::vector<std::unique_ptr<Reader>> readers;
  for (uint64_t i = 0; i < kStreams; ++i) {
    Reader& reader = *readers.emplace_back(std::make_unique<Reader>());
    SetTestDeadline(&reader.context);
    reader.stream = client_->stub->Get(&reader.context, request);
  }
  const Counter& held = server_->stats().get_bytes_held;
  v1::GetReply reply;
  for (int round = 0; round < 3; ++round) {
    for (const auto& reader : readers) {
      ASSERT_TRUE(reader->stream->Read(&reply));
      ASSERT_LE(held, kStreams * (kWindow + kBlock));
    }
  }
  // Now nobody reads, and each has more to come.
  EXPECT_TRUE(Eventually([&] { return held >= kStreams * kBlock; })) << held;
  EXPECT_LE(held, kStreams * (kWindow + kBlock));
  EXPECT_EQ(client_->Stats()["get_streams"], kStreams);
  for (const auto& reader : readers) reader->context.TryCancel();
  for (const auto& reader : readers) reader->stream->Finish();
  EXPECT_TRUE(Eventually([&] { return held == 0; })) << held;
}

// Many answers at once go in messages of bounded size, also those to keys that have no value of ours.
TEST_P(ServerTest, AcknowledgementsComeInPortions) {
  constexpr int kBlocks = 4096;
  v1::PutRequest request;
  request.set_session(client_->welcome.session());
  for (int i = 0; i < kBlocks; ++i) {
    v1::PutPiece* piece = request.add_pieces();
    piece->mutable_block()->set_layer(70000 + i);
    piece->set_size(1);
  }
  request.set_data(std::string(kBlocks, 'x'));
  grpc::ClientContext context;
  SetTestDeadline(&context);
  const auto stream = client_->stub->Put(&context);
  ASSERT_TRUE(stream->Write(request));
  stream->WritesDone();
  v1::PutReply reply;
  std::vector<uint32_t> layers;
  while (stream->Read(&reply)) {
    EXPECT_LE(reply.acks_size(), 1024);
    for (const auto& ack : reply.acks()) layers.push_back(ack.block().layer());
  }
  EXPECT_TRUE(stream->Finish().ok());
  ASSERT_EQ(layers.size(), static_cast<size_t>(kBlocks));
  for (int i = 0; i < kBlocks; ++i) EXPECT_EQ(layers[i], static_cast<uint32_t>(70000 + i));
}

TEST_P(ServerTest, TooManyKeysAreRefusedByNumber) {
  const auto call = [&](auto method, auto request, auto reply) {
    request.set_session(client_->welcome.session());
    for (int i = 0; i < 65537; ++i) request.add_keys();
    grpc::ClientContext context;
    SetTestDeadline(&context);
    const grpc::Status status = (client_->stub.get()->*method)(&context, request, &reply);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("65537 keys, expected at most 65536"));
  };
  call(&v1::CacheStore::Stub::Lookup, v1::LookupRequest(), v1::LookupReply());
  call(&v1::CacheStore::Stub::Prefetch, v1::PrefetchRequest(), v1::PrefetchReply());
  const NamespaceId ns = client_->Open(SpecOf(4));
  std::vector<ChunkKey> keys;
  const grpc::Status status = client_->Reserve(ns, 65537, &keys);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("count is 65537, expected 1 to 65536"));
}

TEST_P(ServerTest, SessionsResumeAndKeepTheirChunks) {
  const NamespaceId ns = client_->Open(SpecOf(4));
  const auto block = BlockBytes(4 * kKiB, 1);
  const BlockKey key = PutOne(client_.get(), ns, block);
  const uint64_t session = client_->welcome.session();
  EXPECT_FALSE(client_->welcome.resumed());
  client_ = NewClient();  // the old connection breaks without a word
  ASSERT_TRUE(client_->Hello(session).ok());
  EXPECT_TRUE(client_->welcome.resumed());
  EXPECT_EQ(client_->welcome.session(), session);
  std::vector<RawClient::Got> got;
  ASSERT_TRUE(client_->Get({key}, &got).ok());
  EXPECT_EQ(got[0].bytes, Text(block));
  // A newer stream of the session ends the older one.
  const auto newer = NewClient();
  ASSERT_TRUE(newer->Hello(session).ok());
  EXPECT_TRUE(newer->welcome.resumed());
  EXPECT_EQ(client_->WaitForEnd().error_code(), grpc::StatusCode::ABORTED);
}

TEST_P(ServerTest, GreetingsAreChecked) {
  const auto client = NewClient();
  const grpc::Status status = client->Hello(0, 7, 9);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("versions 7 to 9, this service 1 to 1"));
  EXPECT_TRUE(client->Hello(0, 0, 5).ok());
  EXPECT_EQ(client->welcome.version(), 1u);
  EXPECT_NE(client->welcome.boot(), 0u);
  EXPECT_GT(client->welcome.heartbeat_ms(), 0u);
  EXPECT_GT(client->welcome.max_message_bytes(), kMaxFrameData);
  v1::SessionRequest heartbeat;
  heartbeat.mutable_heartbeat();
  ASSERT_TRUE(client->Say(heartbeat));
  v1::SessionReply reply;
  ASSERT_TRUE(client->Hear(&reply));
  EXPECT_TRUE(reply.has_heartbeat());
  v1::SessionRequest again;
  again.mutable_hello()->set_version_max(1);
  ASSERT_TRUE(client->Say(again));
  EXPECT_EQ(client->WaitForEnd().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_P(ServerTest, ReleaseFreesLiveChunksAndReservations) {
  const NamespaceId ns = client_->Open(SpecOf(4));
  const BlockKey stored = PutOne(client_.get(), ns, BlockBytes(4 * kKiB, 1));
  const ChunkKey reserved = ReserveOne(client_.get(), ns);
  v1::SessionRequest release;
  release.mutable_release()->set_seq(1);
  ToProto(stored.chunk, release.mutable_release()->add_keys());
  ToProto(reserved, release.mutable_release()->add_keys());
  release.mutable_release()->add_keys()->set_group(1 << 20);  // nobody's
  ASSERT_TRUE(client_->Say(release));
  EXPECT_TRUE(Eventually([&] {
    const StoreStats stats = server_->store()->Stats();
    return stats.chunks_live == 0 && stats.chunks_reserved == 0;
  }));
}

// A lease is counted, so a release that a client sends again must not give back another one.
TEST_P(ServerTest, AReleaseCountsOnceAlsoOverAnotherStream) {
  const NamespaceId ns = client_->Open(SpecOf(4));
  const BlockKey stored = PutOne(client_.get(), ns, BlockBytes(4 * kKiB, 1));
  const ChunkKey name{ns, {7, 7}, 0, 0};
  ASSERT_TRUE(client_->Publish(stored.chunk, name.id).ok());
  for (int lease = 0; lease < 2; ++lease) ASSERT_EQ(client_->Lookup({name}, /*lease=*/true), 1);
  v1::SessionRequest release, heartbeat;
  release.mutable_release()->set_seq(1);
  ToProto(stored.chunk, release.mutable_release()->add_keys());  // else its live key would hold it
  ToProto(name, release.mutable_release()->add_keys());
  heartbeat.mutable_heartbeat();
  v1::SessionReply reply;
  ASSERT_TRUE(client_->Say(release) && client_->Say(release) && client_->Say(heartbeat) && client_->Hear(&reply));
  EXPECT_EQ(reply.heartbeat().released(), 1u);
  RawClient again(url());
  ASSERT_TRUE(again.Hello(client_->welcome.session()).ok());
  EXPECT_TRUE(again.welcome.resumed());
  EXPECT_EQ(again.welcome.released(), 1u);
  ASSERT_TRUE(again.Say(release) && again.Say(heartbeat) && again.Hear(&reply));
  EXPECT_EQ(server_->store()->Stats().chunks_leased, 1u);
  release.mutable_release()->set_seq(2);
  ASSERT_TRUE(again.Say(release) && again.Say(heartbeat) && again.Hear(&reply));
  EXPECT_EQ(reply.heartbeat().released(), 2u);
  EXPECT_EQ(server_->store()->Stats().chunks_leased, 0u);
}

TEST_P(ServerTest, TooLargeAReleaseIsRefused) {
  v1::SessionRequest release;
  for (int i = 0; i <= 65536; ++i) release.mutable_release()->add_keys();
  ASSERT_TRUE(client_->Say(release));
  EXPECT_THAT(client_->WaitForEnd().error_message(), HasSubstr("a release of 65537 keys, expected at most 65536"));
}

TEST_P(ServerTest, AReleaseWithoutANumberIsRefused) {
  v1::SessionRequest release;
  release.mutable_release()->add_keys();
  ASSERT_TRUE(client_->Say(release));
  EXPECT_THAT(client_->WaitForEnd().error_message(), HasSubstr("seq is 0, expected 1"));
}

TEST_P(ServerTest, CallsOfUnknownSessionsSaySo) {
  const NamespaceId ns = client_->Open(SpecOf(4));
  client_->welcome.set_session(kLiveBit | 1);
  std::vector<ChunkKey> keys;
  EXPECT_EQ(client_->Reserve(ns, 1, &keys).error_code(), grpc::StatusCode::NOT_FOUND);
  std::vector<RawClient::Got> got;
  const grpc::Status status = client_->Get({{{ns, {1, 1}, 0, 0}, 0}}, &got);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("session 8000000000000001"));
}

TEST_P(ServerTest, ReserveNamesWhatIsWrongAndWaitsNoLongerThanAsked) {
  const NamespaceId ns = client_->Open(SpecOf(1024));
  std::vector<ChunkKey> keys;
  EXPECT_THAT(client_->Reserve(ns, 0, &keys).error_message(), HasSubstr("count is 0"));
  EXPECT_THAT(client_->Reserve({1, 2}, 1, &keys).error_message(), HasSubstr("has not been opened"));
  EXPECT_EQ(client_->Reserve(ns, 1000, &keys).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_P(ServerTest, ListsChunks) {
  NamespaceSpec spec = SpecOf(4);
  spec.model = "bytes that are no text: \xff\xfe";
  const NamespaceId ns = client_->Open(spec);
  PutOne(client_.get(), ns, BlockBytes(4 * kKiB, 1));
  std::vector<ChunkKey> reserved;
  ASSERT_TRUE(client_->Reserve(ns, 1200, &reserved).ok());
  int messages = 0;
  const auto list = [&](uint32_t limit) {
    grpc::ClientContext context;
    SetTestDeadline(&context);
    v1::ListRequest request;
    request.set_limit(limit);
    const auto stream = client_->admin->List(&context, request);
    v1::ListReply reply;
    std::vector<v1::ListReply::Chunk> chunks;
    for (messages = 0; stream->Read(&reply); ++messages) {
      chunks.insert(chunks.end(), reply.chunks().begin(), reply.chunks().end());
    }
    EXPECT_TRUE(stream->Finish().ok());
    return chunks;
  };
  const auto all = list(0);
  ASSERT_EQ(all.size(), 1201u);
  EXPECT_GT(messages, 1);
  EXPECT_EQ(all[0].model(), spec.model);
  EXPECT_EQ(all[0].tenant(), "default");
  EXPECT_EQ(all[0].state(), "live");
  EXPECT_EQ(all[0].layers_committed(), 1u);
  EXPECT_EQ(all[1200].state(), "reserved");
  EXPECT_EQ(list(3).size(), 3u);
  EXPECT_EQ(list(1000).size(), 1000u);
  // A session's id would let whoever lists go on with it: a tag stands for it, the same in all its chunks.
  const uint64_t session = client_->welcome.session();
  for (const auto& chunk : all) {
    EXPECT_EQ(chunk.key().id().hi(), all[0].key().id().hi());
    EXPECT_NE(chunk.key().id().hi(), session);
    EXPECT_EQ(chunk.key().id().hi() >> 32, kLiveBit >> 32) << "no more of it than a tag";
    EXPECT_THAT(chunk.DebugString(), testing::Not(HasSubstr(absl::StrCat(session))));
  }
}

// B81: exact counts, and none that move while nothing happens.
TEST_P(ServerTest, StatsStandStillWhileIdle) {
  const NamespaceId ns = client_->Open(SpecOf(4));
  const BlockKey key = PutOne(client_.get(), ns, BlockBytes(4 * kKiB, 1));
  BlockKey miss = key;
  miss.chunk.id[1] += 9;
  std::vector<RawClient::Got> got;
  ASSERT_TRUE(client_->Get({key, key, miss}, &got).ok());
  ASSERT_TRUE(Eventually([&] { return server_->stats().get_streams == 0 && server_->stats().put_streams == 0; }));
  auto stats = client_->Stats();
  EXPECT_EQ(stats["blocks_committed"], 1u);
  EXPECT_EQ(stats["get_blocks"], 2u);
  EXPECT_EQ(stats["blocks_got"], 2u);
  EXPECT_EQ(stats["get_misses"], 1u);
  EXPECT_EQ(client_->Stats(), stats);
}

TEST(ServerStart, RefusesWhatItCannotServeOn) {
  ServerOptions options = TestOptions();
  const auto first = Server::Start(options);
  ASSERT_TRUE(first.ok()) << first.status();
  // Its unix socket is taken.
  EXPECT_TRUE(absl::IsAlreadyExists(Server::Start(options).status()));
  // Its port is taken: never shared.
  options.listen = {*ParseListenAddress((*first)->Addresses()[0])};
  const auto status = Server::Start(options).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr((*first)->Addresses()[0]));
  options.listen = {};
  EXPECT_FALSE(Server::Start(options).ok());
}

}  // namespace
}  // namespace kvferry
