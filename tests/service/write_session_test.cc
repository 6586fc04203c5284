#include "service/write_session.h"

#include <algorithm>
#include <random>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/service/core_fixture.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

// One client with one namespace of two layers.
class WriteSessionTest : public testing::Test {
 protected:
  WriteSessionTest() {
    session_ = f_.Attach()->session;
    ns_ = f_.Open(session_, spec_);
    size_ = spec_.BlockBytes(0, 0);
    write_ = NewStream();
  }

  std::shared_ptr<WriteSession> NewStream() {
    return std::make_shared<WriteSession>(f_.store.get(), f_.sessions.get(), &f_.stats, [this] { ++notified_; });
  }

  static PutPiece Piece(const BlockKey& key, const std::vector<uint8_t>& block, uint64_t offset, uint64_t size) {
    PutPiece piece{key, offset, BlockChecksum(ByteView(block)), {}};
    // In two slices, as the wire may cut it.
    const ByteView bytes = ByteView(block).subspan(offset, size);
    piece.bytes.push_back(bytes.subspan(0, size / 3));
    piece.bytes.push_back(bytes.subspan(size / 3));
    return piece;
  }
  static PutPiece Whole(const BlockKey& key, const std::vector<uint8_t>& block) {
    return Piece(key, block, 0, block.size());
  }

  absl::Status Send(WriteSession* stream, const std::vector<PutPiece>& pieces) {
    return stream->Receive(session_, pieces);
  }
  std::vector<PutAck> SendAndTake(const std::vector<PutPiece>& pieces) {
    EXPECT_TRUE(Send(write_.get(), pieces).ok());
    return write_->TakeAcks(1000);
  }

  // The block is there, byte for byte.
  void ExpectStored(const BlockKey& key, const std::vector<uint8_t>& block) {
    const auto view = f_.Get(session_, key);
    ASSERT_TRUE(view.ok()) << view.status();
    std::vector<uint8_t> bytes(view->size());
    view->CopyTo(0, bytes.size(), bytes.data());
    EXPECT_EQ(bytes, block);
  }

  CoreFixture f_;
  const NamespaceSpec spec_ = SmallSpec(2, 2, 64, 64);  // 64 KiB a block
  SessionId session_ = 0;
  NamespaceId ns_{};
  uint64_t size_ = 0;
  int notified_ = 0;
  std::shared_ptr<WriteSession> write_;
};

TEST_F(WriteSessionTest, StoresWholeBlocksAndCopiesEachByteOnce) {
  const ChunkKey chunk = f_.Reserve(session_, ns_)[0];
  const auto a = BlockBytes(size_, 1), b = BlockBytes(size_, 2);
  const auto acks = SendAndTake({Whole({chunk, 0}, a), Whole({chunk, 1}, b)});
  ASSERT_EQ(acks.size(), 2u);
  EXPECT_TRUE(acks[0].status.ok() && acks[1].status.ok());
  EXPECT_EQ(acks[1].block, (BlockKey{chunk, 1}));
  EXPECT_EQ(notified_, 1);  // once a message
  ExpectStored({chunk, 0}, a);
  ExpectStored({chunk, 1}, b);
  EXPECT_EQ(f_.stats.put_bytes_copied, 2 * size_);
  EXPECT_EQ(f_.stats.put_bytes, 2 * size_);
  // Sealed: the service keeps nothing for it.
  EXPECT_EQ((*f_.sessions->Find(session_))->Find(chunk), nullptr);
  EXPECT_TRUE(write_->idle());
}

TEST_F(WriteSessionTest, ABlockComesInPiecesOfAnySize) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 50; ++round) {
    const ChunkKey chunk = f_.Reserve(session_, ns_)[0];
    const auto block = BlockBytes(size_, random());
    for (uint64_t at = 0; at < size_;) {
      EXPECT_TRUE(absl::IsNotFound(f_.Get(session_, {chunk, 0}).status()));  // B31: nothing until it is whole
      const uint64_t n = std::min<uint64_t>(size_ - at, 1 + random() % (size_ / 2));
      ASSERT_TRUE(Send(write_.get(), {Piece({chunk, 0}, block, at, n)}).ok());
      at += n;
    }
    const auto acks = write_->TakeAcks(10);
    ASSERT_EQ(acks.size(), 1u);
    EXPECT_TRUE(acks[0].status.ok()) << acks[0].status;
    ExpectStored({chunk, 0}, block);
    f_.store->Release(session_, {chunk});
    (*f_.sessions->Find(session_))->Drop({chunk});
  }
}

TEST_F(WriteSessionTest, AWrongChecksumIsRefusedAndTheBlockCanBeSentAgain) {
  const ChunkKey chunk = f_.Reserve(session_, ns_)[0];
  const auto block = BlockBytes(size_, 1);
  auto damaged = block;
  damaged[size_ / 2] ^= 1;
  PutPiece piece = Whole({chunk, 0}, damaged);
  piece.checksum = BlockChecksum(ByteView(block));
  auto acks = SendAndTake({piece});
  ASSERT_EQ(acks.size(), 1u);
  EXPECT_TRUE(absl::IsDataLoss(acks[0].status)) << acks[0].status;
  EXPECT_EQ(f_.stats.put_checksum_errors, 1u);
  EXPECT_TRUE(absl::IsNotFound(f_.Get(session_, {chunk, 0}).status()));
  acks = SendAndTake({Whole({chunk, 0}, block)});
  EXPECT_TRUE(acks[0].status.ok()) << acks[0].status;
  ExpectStored({chunk, 0}, block);
}

// B25: what is wrong with one block fails that block alone.
TEST_F(WriteSessionTest, BadBlocksFailAlone) {
  const ChunkKey chunk = f_.Reserve(session_, ns_)[0];
  ChunkKey nobodys = chunk;
  nobodys.id[1] += 1000;
  const auto block = BlockBytes(size_, 1), longer = BlockBytes(size_ + 1, 1);
  const std::vector<uint8_t> empty;
  const auto acks = SendAndTake({Whole({chunk, 2}, block), Whole({nobodys, 0}, block), Whole({chunk, 0}, longer),
                                 Piece({chunk, 0}, block, 10, 20), Whole({chunk, 0}, empty),
                                 Piece({chunk, 0}, block, 0, 5), Whole({chunk, 1}, block)});
  ASSERT_EQ(acks.size(), 7u);
  EXPECT_THAT(acks[0].status.message(), HasSubstr("layer is 2, expected 0 to 1"));
  EXPECT_TRUE(absl::IsNotFound(acks[1].status)) << acks[1].status;
  EXPECT_THAT(acks[1].status.message(), HasSubstr("not reserved"));
  EXPECT_THAT(acks[2].status.message(), HasSubstr("goes beyond its 65536 bytes"));
  EXPECT_THAT(acks[3].status.message(), HasSubstr("begins at offset 10, expected 0"));
  EXPECT_THAT(acks[4].status.message(), HasSubstr("is empty"));
  EXPECT_THAT(acks[5].status.message(), HasSubstr("only 5 of the 65536 bytes"));
  EXPECT_TRUE(acks[6].status.ok());
  ExpectStored({chunk, 1}, block);
  EXPECT_EQ(f_.stats.put_bytes_copied, size_ + 5);  // bounds are checked before anything is copied
}

TEST_F(WriteSessionTest, ABlockThatTheStreamsEndCutsShortHasFailed) {
  const ChunkKey chunk = f_.Reserve(session_, ns_)[0];
  const auto block = BlockBytes(size_, 1);
  EXPECT_TRUE(SendAndTake({Piece({chunk, 0}, block, 0, 100)}).empty());
  write_->EndOfInput();
  const auto acks = write_->TakeAcks(10);
  ASSERT_EQ(acks.size(), 1u);
  EXPECT_TRUE(absl::IsInvalidArgument(acks[0].status));
  EXPECT_THAT(acks[0].status.message(), HasSubstr("only 100 of the 65536 bytes"));
  write_->EndOfInput();  // nothing is open any more
  EXPECT_TRUE(write_->idle());
  EXPECT_TRUE(SendAndTake({Whole({chunk, 0}, block)})[0].status.ok()) << "nobody holds the layer";
}

TEST_F(WriteSessionTest, AFailedBlockHasOneAcknowledgement) {
  const ChunkKey chunk = f_.Reserve(session_, ns_)[0];
  const auto block = BlockBytes(size_, 1);
  const auto acks = SendAndTake({Piece({chunk, 9}, block, 0, 100), Piece({chunk, 9}, block, 100, 100),
                                 Piece({chunk, 9}, block, 200, size_ - 200), Whole({chunk, 0}, block)});
  ASSERT_EQ(acks.size(), 2u);
  EXPECT_FALSE(acks[0].status.ok());
  EXPECT_TRUE(acks[1].status.ok());
}

// B29: the same block twice, in one message, on two streams, and after it was sealed.
TEST_F(WriteSessionTest, TheFirstOfTwoStays) {
  const ChunkKey chunk = f_.Reserve(session_, ns_)[0];
  const auto first = BlockBytes(size_, 1), second = BlockBytes(size_, 2);
  auto acks = SendAndTake({Whole({chunk, 0}, first), Whole({chunk, 0}, first), Whole({chunk, 0}, second)});
  ASSERT_EQ(acks.size(), 3u);
  EXPECT_TRUE(acks[0].status.ok());
  EXPECT_TRUE(acks[1].status.ok());  // the same bytes: an acknowledgement that got lost is given again
  EXPECT_TRUE(absl::IsAlreadyExists(acks[2].status)) << acks[2].status;
  acks = SendAndTake({Whole({chunk, 1}, first)});  // sealed now
  acks = SendAndTake({Whole({chunk, 0}, first), Whole({chunk, 0}, second)});
  ASSERT_EQ(acks.size(), 2u);
  EXPECT_TRUE(acks[0].status.ok()) << acks[0].status;
  EXPECT_TRUE(absl::IsAlreadyExists(acks[1].status)) << acks[1].status;
  ExpectStored({chunk, 0}, first);
  EXPECT_EQ(f_.stats.put_bytes_copied, 2 * size_);
}

TEST_F(WriteSessionTest, TwoStreamsDoNotWriteOneLayerAtOnce) {
  const ChunkKey chunk = f_.Reserve(session_, ns_)[0];
  const auto block = BlockBytes(size_, 1);
  ASSERT_TRUE(Send(write_.get(), {Piece({chunk, 0}, block, 0, 100)}).ok());
  const auto other = NewStream();
  ASSERT_TRUE(Send(other.get(), {Whole({chunk, 0}, block)}).ok());
  EXPECT_TRUE(absl::IsAborted(other->TakeAcks(1)[0].status));
  write_->Close();  // the first one breaks: the block is free to be sent anew
  ASSERT_TRUE(Send(other.get(), {Whole({chunk, 0}, block)}).ok());
  EXPECT_TRUE(other->TakeAcks(1)[0].status.ok());
  ExpectStored({chunk, 0}, block);
}

// B30: a stalled writer wakes up after its reservation is gone: it writes nowhere, and the memory had another use.
TEST_F(WriteSessionTest, ALateWriterTouchesNothing) {
  const ChunkKey chunk = f_.Reserve(session_, ns_)[0];
  const auto block = BlockBytes(size_, 1);
  EXPECT_TRUE(write_->idle());
  ASSERT_TRUE(Send(write_.get(), {Piece({chunk, 0}, block, 0, size_ / 2)}).ok());
  EXPECT_FALSE(write_->idle()) << "a block is half way";
  EXPECT_EQ(f_.store->Stats().chunks_reserved, 1u);
  (*f_.sessions->Find(session_))->DropAll();  // as the reservations' grace does
  EXPECT_EQ(f_.store->Stats().chunks_reserved, 0u);
  const uint64_t copied = f_.stats.put_bytes_copied;
  const auto acks = SendAndTake({Piece({chunk, 0}, block, size_ / 2, size_ - size_ / 2)});
  ASSERT_EQ(acks.size(), 1u);
  EXPECT_TRUE(absl::IsNotFound(acks[0].status)) << acks[0].status;
  EXPECT_EQ(f_.stats.put_bytes_copied, copied);
  // The client reserves again and sends the block anew.
  const ChunkKey anew = f_.Reserve(session_, ns_)[0];
  EXPECT_TRUE(SendAndTake({Whole({anew, 0}, block)})[0].status.ok());
  ExpectStored({anew, 0}, block);
}

TEST_F(WriteSessionTest, AnEndedSessionRefusesTheMessage) {
  const auto attached = f_.Attach();
  f_.sessions->End(*attached);
  f_.executor.Run();
  const auto status = write_->Receive(attached->session, {});
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
}

TEST_F(WriteSessionTest, TakesAcknowledgementsInPortions) {
  const auto chunks = f_.Reserve(session_, ns_, 5);
  const auto block = BlockBytes(size_, 1);
  std::vector<PutPiece> pieces;
  for (const ChunkKey& chunk : chunks) pieces.push_back(Whole({chunk, 0}, block));
  ASSERT_TRUE(Send(write_.get(), pieces).ok());
  EXPECT_EQ(write_->backlog(), 5u);
  std::vector<PutAck> taken = write_->TakeAcks(2);
  EXPECT_FALSE(write_->idle()) << "acknowledgements are owed";
  for (PutAck& ack : write_->TakeAcks(9)) taken.push_back(std::move(ack));
  ASSERT_EQ(taken.size(), 5u);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(taken[i].block.chunk, chunks[i]);
  EXPECT_TRUE(write_->idle());
  EXPECT_TRUE(write_->TakeAcks(9).empty());
}

// Several streams of one session, each with chunks of its own, and one that drops reservations under them.
TEST_F(WriteSessionTest, StreamsRunAtOnce) {
  constexpr int kStreams = 4, kChunks = 30;
  const auto keys = f_.Reserve(session_, ns_, kStreams * kChunks);
  const auto block = BlockBytes(size_, 1);
  std::vector<std::thread> threads;
  std::atomic<int> acks{0};
  for (int t = 0; t < kStreams; ++t) {
    threads.emplace_back([&, t] {
      const auto stream = std::make_shared<WriteSession>(f_.store.get(), f_.sessions.get(), &f_.stats, [] {});
      for (int c = 0; c < kChunks; ++c) {
        const ChunkKey& chunk = keys[t * kChunks + c];
        for (uint16_t layer = 0; layer < 2; ++layer) {
          EXPECT_TRUE(Send(stream.get(), {Piece({chunk, layer}, block, 0, size_ / 2),
                                          Piece({chunk, layer}, block, size_ / 2, size_ - size_ / 2)})
                          .ok());
        }
        acks += static_cast<int>(stream->TakeAcks(100).size());
      }
    });
  }
  threads.emplace_back([&] {
    for (int i = 0; i < kStreams * kChunks; i += 3) (*f_.sessions->Find(session_))->Drop({keys[i]});
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(acks, 2 * kStreams * kChunks);
  EXPECT_EQ(f_.store->Stats().blocks_committed, f_.stats.put_blocks);
}

}  // namespace
}  // namespace kvferry
