#include "storage/store_writer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status.h"

namespace kvferry {

StoreWriter::~StoreWriter() {
  Step step(state_.get());
  if (!IsReserved()) return;
  if (Session* session = state_->sessions.Find(key().Owner())) session->live.erase(key().id[1]);
  state_->DropLive(record_);
}

void StoreWriter::Commit(int layer, BlockSum sum, CommitDone done) { std::move(done)(TryCommit(layer, sum)); }

absl::Status StoreWriter::TryCommit(int layer, BlockSum sum) {
  const size_t layers = chunk_->layout().slots.size();
  Step step(state_.get());
  if (state_->closed) return absl::UnavailableError("commit: the store is closed");
  if (layer < 0 || static_cast<size_t>(layer) >= layers) {
    return absl::InvalidArgumentError(
        absl::StrCat("commit: layer is ", layer, ", chunk ", ToString(key()), " has ", layers, " layers"));
  }
  // Once it is sealed all its layers are readable, wherever its record has gone.
  if (chunk_->readable(static_cast<size_t>(layer))) {
    return absl::FailedPreconditionError(
        absl::StrCat("commit: layer ", layer, " of chunk ", ToString(key()), " was committed before"));
  }
  if (!IsReserved()) {
    return absl::NotFoundError(
        absl::StrCat("commit: chunk ", ToString(key()), " is gone: its session ended, or released it"));
  }
  chunk_->SetReadable(static_cast<size_t>(layer), sum.checksum);
  if (!sum.is_finite) state_->index.SetNotFinite(record_);
  ++state_->counters.blocks_committed;
  state_->counters.bytes_committed += chunk_->layout().slots[layer].size;
  if (chunk_->whole()) state_->index.Seal(record_);
  return absl::OkStatus();
}

absl::Status UnknownSession(SessionId id) {
  return absl::NotFoundError(absl::StrCat("session ", absl::Hex(id, absl::kZeroPad16), " is unknown or has ended"));
}

absl::Status NamespaceNotOpen(const NamespaceId& ns) {
  return absl::NotFoundError(absl::StrCat("namespace ", ToString(ns), " has not been opened by this session"));
}

}  // namespace kvferry
