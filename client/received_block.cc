#include "client/received_block.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/codec.h"
#include "storage/base/status.h"

namespace kvferry {

// Keeps the messages that a block came in.
struct BlockAssembler::Pin {
  std::shared_ptr<TransportCounters> counters;
  absl::InlinedVector<std::shared_ptr<const void>, 1> messages;
  uint64_t bytes = 0;

  ~Pin() { counters->bytes_in_flight -= bytes; }
};

absl::Status BlockAssembler::Check(const v1::GetPiece& piece) const {
  if (index_ >= keys_ || piece.index() != index_) {
    return absl::InternalError(
        absl::StrCat("the store sent a piece of block ", piece.index(), " of ", keys_, ", expected block ", index_));
  }
  if (piece.code() != 0) return absl::OkStatus();
  const bool follows = piece.offset() == have_ && piece.size() <= piece.block_size() - have_;
  if (piece.block_size() < have_ || !follows || (have_ > 0 && piece.block_size() != size_)) {
    return absl::InternalError(absl::StrCat("the store sent bytes ", piece.offset(), " + ", piece.size(), " of ",
                                            piece.block_size(), " of block ", index_, ", expected byte ", have_));
  }
  return absl::OkStatus();
}

absl::Status BlockAssembler::Add(Frame<v1::GetReply> frame, std::vector<absl::StatusOr<BlockView>>* blocks) {
  for (const v1::GetPiece& piece : frame.header.pieces()) {
    KVFERRY_RETURN_IF_ERROR(Check(piece));
    if (piece.code() != 0) {
      blocks->push_back(FromWireCode(piece.code(), piece.message()));
    } else {
      if (pin_ == nullptr) {
        pin_ = std::make_shared<Pin>();
        pin_->counters = counters_;
      }
      for (const ByteView view : frame.payload.Take(piece.size())) pieces_.push_back(view);
      pin_->messages.push_back(frame.payload.pin());
      pin_->bytes += piece.size();
      counters_->bytes_in_flight += piece.size();
      size_ = piece.block_size();
      have_ += piece.size();
      if (have_ < size_) continue;
      blocks->push_back(BlockView(std::move(pieces_), piece.checksum(), std::move(pin_)));
    }
    pieces_.clear();
    pin_ = nullptr;
    have_ = 0;
    ++index_;
  }
  return absl::OkStatus();
}

}  // namespace kvferry
