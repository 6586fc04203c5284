#include "client/received_block.h"

#include <numeric>
#include <vector>

#include "gmock/gmock.h"
#include "storage/base/checksum.h"

namespace kvferry {
namespace {

using Code = absl::StatusCode;

// Bytes 0, 1, 2, ... of a block of `size`.
std::vector<uint8_t> Block(size_t size) {
  std::vector<uint8_t> bytes(size);
  std::iota(bytes.begin(), bytes.end(), uint8_t{0});
  return bytes;
}

// A message as a store sends it.
class Message {
 public:
  Message& Piece(uint32_t index, uint64_t offset, uint64_t size, uint64_t block_size) {
    const std::vector<uint8_t> block = Block(block_size);
    v1::GetPiece* piece = header_.add_pieces();
    piece->set_index(index);
    piece->set_offset(offset);
    piece->set_size(size);
    piece->set_block_size(block_size);
    piece->set_checksum(BlockChecksum(block));
    auto bytes = std::make_shared<std::vector<uint8_t>>(size);
    for (uint64_t i = 0; i < size; ++i) (*bytes)[i] = static_cast<uint8_t>(offset + i);
    data_.push_back({ByteView(*bytes), bytes});
    return *this;
  }
  Message& Miss(uint32_t index) {
    v1::GetPiece* piece = header_.add_pieces();
    piece->set_index(index);
    piece->set_code(static_cast<uint32_t>(Code::kNotFound));
    return *this;
  }
  Frame<v1::GetReply> Receive() { return *DecodeGet(EncodeFrame(header_, data_)); }

 private:
  v1::GetReply header_;
  std::vector<PinnedBytes> data_;
};

class BlockAssemblerTest : public ::testing::Test {
 protected:
  absl::Status Add(Message message) { return assembler_.Add(message.Receive(), &blocks_); }

  std::shared_ptr<TransportCounters> counters_ = std::make_shared<TransportCounters>();
  BlockAssembler assembler_{3, counters_};
  std::vector<absl::StatusOr<BlockView>> blocks_;
};

TEST_F(BlockAssemblerTest, BlocksOfOneMessageAndABlockOfSeveral) {
  ASSERT_TRUE(Add(Message().Piece(0, 0, 10, 10).Piece(1, 0, 100, 300)).ok());
  ASSERT_TRUE(Add(Message().Piece(1, 100, 150, 300)).ok());
  ASSERT_EQ(blocks_.size(), 1u);
  ASSERT_TRUE(Add(Message().Piece(1, 250, 50, 300).Miss(2)).ok());
  ASSERT_EQ(blocks_.size(), 3u);
  for (const int i : {0, 1}) {
    ASSERT_TRUE(blocks_[i].ok());
    EXPECT_TRUE(blocks_[i]->Verify().ok());
    EXPECT_EQ(blocks_[i]->size(), i == 0 ? 10u : 300u);
  }
  EXPECT_EQ(blocks_[2].status().code(), Code::kNotFound);
  EXPECT_EQ(counters_->bytes_in_flight, 310u);
  blocks_.clear();
  EXPECT_EQ(counters_->bytes_in_flight, 0u);
}

TEST_F(BlockAssemblerTest, RefusesWhatDoesNotFollow) {
  for (Message message : {Message().Piece(1, 0, 10, 10),                    // out of order
                          Message().Piece(0, 5, 5, 10),                     // starts in the middle
                          Message().Piece(0, 0, 5, 10).Piece(0, 6, 4, 10),  // a gap
                          Message().Piece(0, 0, 5, 10).Piece(0, 0, 5, 10),  // twice
                          Message().Piece(0, 0, 5, 10).Piece(0, 5, 5, 11),  // another size
                          Message().Piece(0, 0, 5, 10).Piece(0, 5, 6, 10),  // too much
                          Message().Piece(0, 0, 5, 4),                      // at once
                          Message().Piece(0, 0, 5, 10).Miss(1),             // not finished
                          Message().Miss(0).Miss(1).Miss(2).Miss(3)}) {     // more than was asked for
    BlockAssembler assembler(3, counters_);
    std::vector<absl::StatusOr<BlockView>> blocks;
    EXPECT_EQ(assembler.Add(message.Receive(), &blocks).code(), Code::kInternal);
  }
  EXPECT_EQ(counters_->bytes_in_flight, 0u);
}

TEST_F(BlockAssemblerTest, AMissAfterPartOfABlockIsItsAnswer) {
  ASSERT_TRUE(Add(Message().Piece(0, 0, 5, 10)).ok());
  ASSERT_TRUE(Add(Message().Miss(0).Piece(1, 0, 4, 4)).ok());
  ASSERT_EQ(blocks_.size(), 2u);
  EXPECT_FALSE(blocks_[0].ok());
  EXPECT_TRUE(blocks_[1].ok() && blocks_[1]->Verify().ok());
}

}  // namespace
}  // namespace kvferry
