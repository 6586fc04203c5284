#include "storage/loader.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/checksum.h"
#include "storage/base/log.h"
#include "storage/reserver.h"
#include "storage/spiller.h"

namespace kvferry {
namespace {

constexpr uint64_t kPieceBytes = kMiB;
constexpr size_t kMostHints = 4096;
constexpr size_t kMostHintedLoads = 8;

// Whole slots from block to block. Small slots share blocks: then it is the image as a whole.
std::vector<ChunkLoad::Piece> PiecesOf(const ChunkLayout& layout) {
  std::vector<ChunkLoad::Piece> pieces = {{}};
  for (size_t slot = 0; slot < layout.slots.size(); ++slot) {
    const uint64_t at = layout.slots[slot].offset;
    if (at % kDiskAlignment == 0 && at - pieces.back().offset >= kPieceBytes) {
      pieces.back().bytes = at - pieces.back().offset;
      pieces.push_back({at, 0, slot, 0, false});
    }
    ++pieces.back().slots;
  }
  pieces.back().bytes = layout.image_bytes - pieces.back().offset;
  return pieces;
}

absl::Status CheckHeader(const absl::StatusOr<ChunkHeader>& header, const Record& record) {
  if (!header.ok()) return header.status();
  const ChunkLayout& layout = record.layout();
  if (header->seq == record.disk_seq && header->key.ns == record.ns->id && header->key.group == record.group &&
      header->key.shard == record.shard && header->image_bytes == layout.image_bytes &&
      header->checksums.size() == layout.slots.size()) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat("the image is of chunk ", ToString(header->key), " with seq ", header->seq,
                                          ", expected seq ", record.disk_seq));
}

absl::Status CheckSlots(const Chunk& chunk, const ChunkLoad::Piece& piece, const std::vector<uint64_t>& checksums) {
  for (size_t slot = piece.first_slot; slot < piece.first_slot + piece.slots; ++slot) {
    if (BlockChecksum(chunk.Slot(static_cast<int>(slot))) == checksums[slot]) continue;
    return absl::DataLossError(absl::StrCat("layer ", slot, " does not have its checksum"));
  }
  return absl::OkStatus();
}

}  // namespace

void Loader::Get(Record* record, ChunkLoad::Waiter waiter) {
  state_.AssertHeld();
  ChunkLoad* load = Find(record);
  if (load == nullptr) {
    load = Open(record);
    load->waiters.push_back(std::move(waiter));
    Reserver(&state_).Load(record, /*may_wait=*/true);
  } else {
    load->waiters.push_back(std::move(waiter));
  }
}

bool Loader::IsGivenUp(const Record* record) {
  state_.AssertHeld();
  const std::vector<ChunkLoad::Waiter>& waiters = Find(record)->waiters;
  return std::all_of(waiters.begin(), waiters.end(),
                     [](const ChunkLoad::Waiter& waiter) { return HasGivenUp(waiter.given_up); });
}

ChunkLoad* Loader::Find(const Record* record) {
  const auto it = state_.transfers.loads.find(Index::NumberOf(*record));
  return it == state_.transfers.loads.end() ? nullptr : it->second.get();
}

ChunkLoad* Loader::Open(Record* record) {
  std::unique_ptr<ChunkLoad>& load = state_.transfers.loads[Index::NumberOf(*record)];
  load = std::make_unique<ChunkLoad>();
  load->record = record;
  load->place = record->disk;
  load->pieces = PiecesOf(record->layout());
  load->pieces_left = load->pieces.size();
  state_.index.Hold(record);
  return load.get();
}

void Loader::Prefetch(SessionId session, absl::Span<const ChunkKey> keys, const GivenUp& given_up) {
  Step step(&state_);
  for (const ChunkKey& key : keys) {
    state_.transfers.hints.push_back({session, key, given_up});
    if (state_.transfers.hints.size() <= kMostHints) continue;
    state_.transfers.hints.pop_front();
    ++state_.counters.prefetches_dropped;
  }
  FollowHints();
}

void Loader::FollowHints() {
  state_.AssertHeld();
  Transfers& transfers = state_.transfers;
  while (transfers.hinted_loads < kMostHintedLoads && !transfers.hints.empty()) {
    const Hint hint = transfers.hints.front();
    const Session* session = HasGivenUp(hint.given_up) ? nullptr : state_.sessions.Find(hint.session);
    Record* record = session == nullptr ? nullptr : state_.FindAny(*session, hint.key);
    if (record != nullptr && record->chunk == nullptr && record->disk && Find(record) == nullptr) {
      ChunkLoad* const load = Open(record);
      if (!Reserver(&state_).Load(record, /*may_wait=*/false)) return End(Index::NumberOf(*record));  // later
      load->hinted = true;
      ++transfers.hinted_loads;
      ++state_.counters.prefetches;
    }
    transfers.hints.pop_front();
  }
}

void Loader::Begin(Record* record, const Extent& extent) {
  state_.AssertHeld();
  ChunkLoad& load = *Find(record);
  load.chunk = std::make_shared<Chunk>(state_.arena, extent, state_.namespaces.Find(record->ns->id), record->key());
  state_.index.SetChunk(record, load.chunk);
  ++state_.counters.disk_reads;
  const ChunkNumber number = Index::NumberOf(*record);
  for (size_t i = 0; i < load.pieces.size(); ++i) {
    const ChunkLoad::Piece& piece = load.pieces[i];
    state_.after.push_back([self = state_.shared_from_this(), number, i, chunk = load.chunk, place = load.place,
                            offset = piece.offset, bytes = piece.bytes]() mutable {
      DiskTier* const disk = self->disk.get();
      const MutableByteView to = chunk->Image().subspan(offset, bytes);
      disk->Read(place, offset, to, [self = std::move(self), number, i, chunk](const absl::Status& status) {
        Loader(self.get()).Arrived(number, i, chunk, status);
      });
    });
  }
}

void Loader::Arrived(ChunkNumber number, size_t i, const std::shared_ptr<Chunk>& chunk, const absl::Status& status) {
  absl::StatusOr<ChunkHeader> header = absl::UnknownError("not read yet");
  bool blank = false;
  if (i == 0 && status.ok()) {
    const ByteView bytes = chunk->Image().subspan(0, chunk->layout().header_bytes);
    header = DecodeHeader(bytes);
    blank = !header.ok() && std::all_of(bytes.begin(), bytes.end(), [](uint8_t byte) { return byte == 0; });
  }
  std::vector<ChunkLoad::Piece> here;  // to be checked now
  std::vector<uint64_t> checksums;
  {
    Step step(&state_);
    ChunkLoad* load = Find(number, chunk);
    if (load == nullptr) return;
    ChunkLoad::Piece& piece = load->pieces[i];
    if (!status.ok()) return Fail(number, status, /*lost=*/false);
    if (blank) return Forget(number);
    if (i == 0) {
      if (absl::Status right = CheckHeader(header, *load->record); !right.ok()) return Fail(number, right, true);
      load->checksums = header->checksums;
    } else if (load->checksums.empty()) {
      piece.arrived = true;  // until the header comes
      return;
    }
    here.push_back(piece);
    for (ChunkLoad::Piece& other : load->pieces) {
      if (std::exchange(other.arrived, false)) here.push_back(other);
    }
    checksums = load->checksums;
  }
  for (const ChunkLoad::Piece& piece : here) {
    const absl::Status right = CheckSlots(*chunk, piece, checksums);
    Step step(&state_);
    ChunkLoad* load = Find(number, chunk);
    if (load == nullptr) return;
    if (!right.ok()) return Fail(number, right, /*lost=*/true);
    for (size_t slot = piece.first_slot; slot < piece.first_slot + piece.slots; ++slot) {
      chunk->SetReadable(slot, checksums[slot]);
    }
    Deliver(load);
    if (--load->pieces_left == 0) {
      state_.counters.disk_bytes_read += chunk->layout().image_bytes;
      End(number);
    }
  }
  state_.OnMemoryFreed();  // it may leave again
}

ChunkLoad* Loader::Find(ChunkNumber number, const std::shared_ptr<Chunk>& chunk) {
  const auto it = state_.transfers.loads.find(number);
  return it == state_.transfers.loads.end() || it->second->chunk != chunk ? nullptr : it->second.get();
}

void Loader::Deliver(ChunkLoad* load) {
  std::vector<ChunkLoad::Waiter> waiters = std::exchange(load->waiters, {});
  for (ChunkLoad::Waiter& waiter : waiters) {
    if (!load->chunk->readable(waiter.layer)) {
      load->waiters.push_back(std::move(waiter));
      continue;
    }
    state_.after.push_back([done = std::move(waiter.done), view = state_.View(load->chunk, waiter.layer)]() mutable {
      std::move(done)(std::move(view));
    });
  }
}

void Loader::Refuse(Record* record, const absl::Status& status) {
  state_.AssertHeld();
  Answer(Find(record), status);
  End(Index::NumberOf(*record));
}

void Loader::Forget(ChunkNumber number) {
  ChunkLoad* const load = state_.transfers.loads.at(number).get();
  Record* const record = load->record;
  Answer(load, absl::NotFoundError(absl::StrCat("get: chunk ", ToString(record->key()), " had been given up")));
  state_.index.SetChunk(record, nullptr);
  if (record->published) state_.index.Unpublish(record);
  End(number);
}

void Loader::Fail(ChunkNumber number, const absl::Status& status, bool lost) {
  ChunkLoad* const load = state_.transfers.loads.at(number).get();
  Record* const record = load->record;
  ++state_.counters.disk_reads_failed;
  KVFERRY_LOG_EVERY(kWarning, absl::Seconds(1),
                    absl::StrCat("disk: chunk ", ToString(record->key()), " is not read: ", status.message()));
  Answer(load, absl::NotFoundError(absl::StrCat("get: chunk ", ToString(record->key()), ": ", status.message())));
  if (lost) {
    Spiller(&state_).Lose(record, "its image on disk");
  } else {
    state_.index.SetChunk(record, nullptr);
    // Whoever holds it may ask again; others had better write it anew.
    if (record->published && !record->live && record->leases == 0) state_.index.Unpublish(record);
  }
  End(number);
}

void Loader::Answer(ChunkLoad* load, const absl::Status& status) {
  for (ChunkLoad::Waiter& waiter : load->waiters) {
    if (absl::IsNotFound(status)) ++state_.counters.get_misses;
    state_.after.push_back([done = std::move(waiter.done), status]() mutable { std::move(done)(status); });
  }
  load->waiters.clear();
}

Record* Loader::OwnerOf(const ImageEntry& image, DiskPlace place) {
  const Session* session = state_.sessions.Find(image.key.Owner());
  Record* record = !image.key.IsLive()  ? state_.index.Find(image.key)
                   : session != nullptr ? session->FindLive(image.key)
                                        : nullptr;
  if (record != nullptr && record->disk == place) return record;
  // It may have lost its name since, and be held still.
  record = nullptr;
  state_.index.ForEachAfter(0, SIZE_MAX, [&record, place](uint64_t, Record& other) {
    if (other.disk == place) record = &other;
  });
  return record;
}

void Loader::Moved(const ImageEntry& image, uint64_t header_seq, DiskPlace from, const absl::StatusOr<DiskPlace>& to) {
  const uint64_t bytes = image.blocks * kDiskAlignment;
  Step step(&state_);
  if (state_.closed) return;
  Record* const record = OwnerOf(image, from);
  if (record == nullptr) {
    if (to.ok()) state_.disk->Free(*to, bytes);
    return;
  }
  ChunkLoad* const load = Find(record);
  if (to.ok()) {
    state_.index.SetDisk(record, *to, header_seq);
  } else if (record->chunk != nullptr && record->chunk->whole()) {
    state_.index.SetDisk(record, {}, 0);
  } else if (absl::IsDataLoss(to.status())) {
    Spiller(&state_).Lose(record, "its image on disk");
  } else {
    ++state_.counters.disk_reads_failed;
    // As when it is asked for: whoever holds it may find it readable one day, others had better write it anew.
    if (load == nullptr && record->published && !record->live && record->leases == 0) state_.index.Unpublish(record);
    return;
  }
  if (load != nullptr) {
    load->moved = true;
  } else {
    state_.disk->Free(from, bytes);
  }
}

void Loader::End(ChunkNumber number) {
  const auto it = state_.transfers.loads.find(number);
  const std::unique_ptr<ChunkLoad> load = std::move(it->second);
  state_.transfers.loads.erase(it);
  if (load->hinted) --state_.transfers.hinted_loads;
  if (load->moved) state_.disk->Free(load->place, load->record->layout().image_bytes);
  state_.index.Unhold(load->record);
  if (load->hinted) FollowHints();
}

}  // namespace kvferry
