#include "service/write_session.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/checksum.h"
#include "storage/base/status.h"

namespace kvferry {

WriteSession::WriteSession(Store* store, const ClientSessions* sessions, ServiceStats* stats,
                           std::function<void()> on_acks)
    : store_(store), sessions_(sessions), stats_(stats), on_acks_(std::move(on_acks)) {}

absl::Status WriteSession::Receive(SessionId session, absl::Span<const PutPiece> pieces) {
  KVFERRY_ASSIGN_OR_RETURN(const ChunksPtr chunks, sessions_->Find(session));
  {
    MutexLock lock(&mu_);
    receiving_ = true;
  }
  for (const PutPiece& piece : pieces) {
    uint64_t size = 0;
    for (ByteView bytes : piece.bytes) size += bytes.size();
    const bool continues =
        block_.open && piece.block == block_.key && piece.offset == block_.received && piece.offset > 0;
    if (!continues) {
      FailIfOpen("another one began");
      Begin(session, chunks, piece, size);
    }
    if (block_.failed) {
      block_.received += size;
    } else {
      Copy(chunks, piece, size);
    }
  }
  bool notify;
  {
    MutexLock lock(&mu_);
    receiving_ = false;
    notify = !acks_.empty();
  }
  if (notify) on_acks_();
  return absl::OkStatus();
}

void WriteSession::Begin(SessionId session, const ChunksPtr& chunks, const PutPiece& piece, uint64_t size) {
  block_ = Block();
  block_.key = piece.block;
  block_.received = piece.offset;
  block_.open = true;
  if (piece.offset > 0) {
    Fail(absl::InvalidArgumentError(absl::StrCat("block ", ToString(piece.block), " begins at offset ", piece.offset,
                                                 ", expected 0, or a piece of the block before it")));
    return;
  }
  if (size == 0) {
    Fail(absl::InvalidArgumentError(
        absl::StrCat("the first piece of block ", ToString(piece.block), " is empty, expected at least one byte")));
    return;
  }
  const std::shared_ptr<ReservedChunk> chunk = chunks->Find(piece.block.chunk);
  if (chunk == nullptr) {
    block_.failed = true;
    AckFromStore(session, piece);
    return;
  }
  absl::StatusOr<MutableByteView> memory = chunk->Claim(piece.block.layer);
  if (absl::IsAlreadyExists(memory.status()) && chunk->StoredChecksum(piece.block.layer) == piece.checksum) {
    block_.failed = true;
    PushAck(piece.block, absl::OkStatus(), false);
    return;
  }
  if (!memory.ok()) {
    Fail(memory.status());
    return;
  }
  block_.chunk = chunk;
  block_.size = memory->size();
  block_.claimed = true;
}

void WriteSession::Copy(const ChunksPtr& chunks, const PutPiece& piece, uint64_t size) {
  std::shared_ptr<ReservedChunk> chunk = block_.chunk.lock();
  if (chunk == nullptr) {
    Fail(absl::NotFoundError(absl::StrCat("the reservation of chunk ", ToString(block_.key.chunk),
                                          " ended while its blocks were being sent")));
    return;
  }
  if (size > block_.size - block_.received) {
    Fail(absl::InvalidArgumentError(absl::StrCat("a piece of ", size, " bytes at offset ", piece.offset, " of block ",
                                                 ToString(block_.key), " goes beyond its ", block_.size, " bytes")));
    return;
  }
  uint8_t* to = chunk->Layer(block_.key.layer).data() + block_.received;
  for (ByteView bytes : piece.bytes) to = std::copy(bytes.begin(), bytes.end(), to);
  stats_->put_bytes_copied += size;
  block_.received += size;
  if (block_.received == block_.size) Commit(chunks, std::move(chunk), piece.checksum);
}

void WriteSession::Commit(const ChunksPtr& chunks, std::shared_ptr<ReservedChunk> chunk, uint64_t checksum) {
  const int layer = block_.key.layer;
  const BlockSum sum = SumBlock(chunk->Layer(layer), chunk->layout().slots[static_cast<size_t>(layer)].elements);
  if (sum.checksum != checksum) {
    ++stats_->put_checksum_errors;
    Fail(absl::DataLossError(absl::StrCat("block ", ToString(block_.key), " arrived with checksum ",
                                          absl::Hex(sum.checksum), ", its writer declared ", absl::Hex(checksum))));
    return;
  }
  const BlockKey key = block_.key;
  const uint64_t size = block_.size;
  block_ = Block();  // the claim goes with the commit
  {
    MutexLock lock(&mu_);
    ++pending_;
  }
  ReservedChunk* reserved = chunk.get();
  ReservedChunk::Commit(std::move(chunk), layer, sum,
                        [self = shared_from_this(), chunks, reserved, key, size](absl::Status status) {
                          if (status.ok()) {
                            ++self->stats_->put_blocks;
                            self->stats_->put_bytes += size;
                            if (reserved->sealed()) chunks->Drop({key.chunk});
                          } else {
                            ++self->stats_->put_blocks_failed;
                          }
                          self->PushAck(key, std::move(status), true);
                        });
}

void WriteSession::AckFromStore(SessionId session, const PutPiece& piece) {
  {
    MutexLock lock(&mu_);
    ++pending_;
  }
  store_->Get(
      session, piece.block,
      [self = shared_from_this(), key = piece.block, checksum = piece.checksum](absl::StatusOr<BlockView> stored) {
        absl::Status status;
        if (!stored.ok()) {
          status = absl::NotFoundError(absl::StrCat("chunk ", ToString(key.chunk), " is not reserved by this session"));
        } else if (stored->checksum() != checksum) {
          status = absl::AlreadyExistsError(
              absl::StrCat("block ", ToString(key), " is stored with checksum ", absl::Hex(stored->checksum()),
                           "; blocks are immutable, and this one has ", absl::Hex(checksum)));
        }
        if (!status.ok()) ++self->stats_->put_blocks_failed;
        self->PushAck(key, std::move(status), true);
      });
}

void WriteSession::EndOfInput() { FailIfOpen("the stream ended"); }

void WriteSession::Close() {
  Unclaim();
  block_ = Block();
}

void WriteSession::Fail(absl::Status status) {
  Unclaim();
  block_.failed = true;
  ++stats_->put_blocks_failed;
  PushAck(block_.key, std::move(status), false);
}

void WriteSession::FailIfOpen(absl::string_view when) {
  if (!block_.open || block_.failed) return;
  Fail(absl::InvalidArgumentError(absl::StrCat("only ", block_.received, " of the ", block_.size, " bytes of block ",
                                               ToString(block_.key), " came before ", when)));
}

void WriteSession::Unclaim() {
  if (!std::exchange(block_.claimed, false)) return;
  if (const auto chunk = block_.chunk.lock(); chunk != nullptr) chunk->Unclaim(block_.key.layer);
}

void WriteSession::PushAck(const BlockKey& key, absl::Status status, bool was_pending) {
  bool notify;
  {
    MutexLock lock(&mu_);
    acks_.push_back({key, std::move(status)});
    if (was_pending) --pending_;
    notify = !receiving_ && acks_.size() == 1;
  }
  if (notify) on_acks_();
}

std::vector<PutAck> WriteSession::TakeAcks(size_t most) {
  std::vector<PutAck> taken;
  MutexLock lock(&mu_);
  const auto end = acks_.begin() + static_cast<ptrdiff_t>(std::min(most, acks_.size()));
  taken.assign(std::make_move_iterator(acks_.begin()), std::make_move_iterator(end));
  acks_.erase(acks_.begin(), end);
  return taken;
}

size_t WriteSession::backlog() const {
  MutexLock lock(&mu_);
  return acks_.size() + pending_;
}

}  // namespace kvferry
