#include "storage/store_writer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status.h"

namespace kvferry {

StoreWriter::~StoreWriter() {
  MutexLock lock(&state_->mu);
  if (!record_->live || record_->sealed) return;
  if (Session* session = state_->sessions.Find(key().Owner())) session->live.erase(key().id[1]);
  state_->DropLive(record_.get());
  // record_ holds the memory still; it is freed with it, outside the lock.
}

void StoreWriter::Commit(int layer, uint64_t checksum, CommitDone done) { std::move(done)(TryCommit(layer, checksum)); }

absl::Status StoreWriter::TryCommit(int layer, uint64_t checksum) {
  ChunkHeader header;
  {
    MutexLock lock(&state_->mu);
    KVFERRY_RETURN_IF_ERROR(CheckLive());
    Record& record = *record_;
    if (layer < 0 || layer >= static_cast<int>(record.committed.size())) {
      return absl::InvalidArgumentError(absl::StrCat("commit: layer is ", layer, ", chunk ", ToString(key()), " has ",
                                                     record.committed.size(), " layers"));
    }
    if (record.committed[layer]) {
      return absl::FailedPreconditionError(
          absl::StrCat("commit: layer ", layer, " of chunk ", ToString(key()), " was committed before"));
    }
    record.checksums[layer] = checksum;
    record.committed[layer] = true;
    ++record.committed_count;
    ++state_->counters.blocks_committed;
    state_->counters.bytes_committed += record.chunk->layout().slots[layer].size;
    if (record.committed_count < record.committed.size()) return absl::OkStatus();
    header = HeaderOf(record, state_->next_seq++);
  }
  // Outside the lock: it may be the first touch of the page. Nobody else writes here before the chunk is sealed.
  EncodeHeader(header, record_->chunk->Image());
  MutexLock lock(&state_->mu);
  KVFERRY_RETURN_IF_ERROR(CheckLive());
  state_->index.Seal(record_.get());
  return absl::OkStatus();
}

absl::Status StoreWriter::CheckLive() const {
  if (state_->closed) return absl::UnavailableError("commit: the store is closed");
  if (!record_->live) {
    return absl::NotFoundError(
        absl::StrCat("commit: chunk ", ToString(key()), " is gone: its session ended, or released it"));
  }
  return absl::OkStatus();
}

ChunkHeader HeaderOf(const Record& record, uint64_t seq) {
  ChunkHeader header;
  header.seq = seq;
  header.key = record.published ? record.PublishedKey() : record.chunk->key();
  header.parent = record.parent;
  header.tokens = record.chunk->layout().tokens;
  header.image_bytes = record.chunk->layout().image_bytes;
  header.checksums = record.checksums;
  return header;
}

absl::Status UnknownSession(SessionId id) {
  return absl::NotFoundError(absl::StrCat("session ", absl::Hex(id, absl::kZeroPad16), " is unknown or has ended"));
}

absl::Status NamespaceNotOpen(const NamespaceId& ns) {
  return absl::NotFoundError(absl::StrCat("namespace ", ToString(ns), " has not been opened by this session"));
}

}  // namespace kvferry
