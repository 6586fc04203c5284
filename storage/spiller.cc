#include "storage/spiller.h"

#include <algorithm>
#include <utility>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "storage/base/checksum.h"
#include "storage/base/log.h"
#include "storage/disk/aligned_buffer.h"
#include "storage/loader.h"

namespace kvferry {
namespace {

constexpr uint64_t kReadyShare = 16;          // of the budget is kept free or ready to be dropped
constexpr uint64_t kMostWriting = 64 * kMiB;  // or one chunk, if that is more
constexpr uint64_t kBytesForName = 4096;      // of the budget, for each name that is remembered
constexpr int kMostRefusals = 3;              // of one chunk, before its write fails
constexpr absl::Duration kPause = absl::Seconds(1);

uint32_t NameOf(const Record& record) { return Ghosts::Fingerprint(absl::HashOf(record.key())); }

// Answers once the last of those that hold it has let go.
class FlushAnswer {
 public:
  FlushAnswer(DiskTier* disk, FlushDone done) : disk_(disk), done_(std::move(done)) {}
  ~FlushAnswer() {
    if (status_.ok()) {
      disk_->Flush(std::move(done_));
    } else {
      std::move(done_)(status_);
    }
  }
  void Add(const absl::Status& status) {
    MutexLock lock(&mu_);
    status_.Update(status);
  }

 private:
  DiskTier* const disk_;
  FlushDone done_;
  Mutex mu_;
  absl::Status status_;
};

}  // namespace

bool Spiller::IsWanted(const Record& record) const {
  state_.AssertHeld();
  return state_.options.write_policy != WritePolicy::kOnSecondHit || record.used_again || record.family.children > 0;
}

bool Spiller::IsPaused() const {
  state_.AssertHeld();
  return state_.executor->Now() < state_.transfers.paused_until;
}

void Spiller::Remember(const Record& record) {
  state_.AssertHeld();
  if (state_.options.write_policy != WritePolicy::kOnSecondHit) return;
  const uint64_t capacity = (state_.options.memory_bytes + state_.options.disk_bytes) / record.layout().image_bytes;
  state_.transfers.seen.Add(NameOf(record), std::min(capacity, state_.options.memory_bytes / kBytesForName));
}

void Spiller::Published(Record* record) {
  state_.AssertHeld();
  if (!state_.has_disk) return;
  if (state_.options.write_policy == WritePolicy::kOnSecondHit && state_.transfers.seen.Take(NameOf(*record))) {
    Index::SetUsedAgain(record);
  }
  if (record->disk) state_.disk->Publish(record->disk, EntryOf(*record, state_.next_seq++));
  const auto write = state_.transfers.writes.find(Index::NumberOf(*record));
  if (write != state_.transfers.writes.end()) write->second.named = write->second.begun;
  if (state_.options.write_policy == WritePolicy::kWriteThrough) Write(record, false);
}

void Spiller::Clean(uint64_t wanted) {
  state_.AssertHeld();
  if (!state_.has_disk || state_.closed || IsPaused()) return;
  Transfers& transfers = state_.transfers;
  const Arena::Usage usage = state_.arena->usage();
  const uint64_t free = usage.budget - std::min(usage.budget, usage.used() + usage.reserve);
  // What is free did not help whoever waits: it lies in pieces, or in another tenant's segments.
  const auto enough = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu) {
    const uint64_t coming = state_.index.ready_bytes() + transfers.cleaning_bytes;
    return coming >= wanted && free + coming >= usage.budget / kReadyShare;
  };
  while (!enough()) {
    Record* record = state_.index.Ranked();
    if (record == nullptr) record = state_.index.Held();
    if (record == nullptr) return;
    if (record->disk || (Index::MayLeave(*record) && !IsWanted(*record))) {
      state_.index.MakeReady(record);
    } else {
      Write(record, true);
      if (IsPaused()) return;  // it was refused at once
    }
  }
}

void Spiller::Write(Record* record, bool cleaning) {
  state_.AssertHeld();
  if (record->disk || record->chunk == nullptr || !record->chunk->whole()) return;
  ChunkWrite& write = state_.transfers.writes[Index::NumberOf(*record)];
  if (write.record == nullptr) {
    write.record = record;
    write.chunk = record->chunk;
    state_.transfers.to_write.push_back(Index::NumberOf(*record));
    state_.index.Hold(record);
  }
  if (cleaning && !std::exchange(write.cleaning, true)) {
    state_.transfers.cleaning_bytes += write.chunk->charged_bytes();
  }
  StartWrites();
}

void Spiller::StartWrites() {
  Transfers& transfers = state_.transfers;
  while (!transfers.to_write.empty()) {
    const ChunkNumber number = transfers.to_write.front();
    ChunkWrite& write = transfers.writes.at(number);
    const uint64_t bytes = write.chunk->layout().image_bytes;
    if (transfers.writing_bytes != 0 && transfers.writing_bytes + bytes > kMostWriting) return;
    const Room room = MakeRoom(bytes);
    if (room == Room::kSoon) return;  // until Resume
    transfers.to_write.pop_front();
    if (room == Room::kNone) {
      ++state_.counters.disk_writes_failed;
      End(number, absl::ResourceExhaustedError(absl::StrCat("disk: no room for ", bytes, " bytes: bound ",
                                                            state_.options.disk_bytes,
                                                            ", and nothing that lies there may go")));
      Pause();
      continue;
    }
    write.begun = true;
    transfers.writing_bytes += bytes;
    Start(number, write);
  }
}

Spiller::Room Spiller::MakeRoom(uint64_t bytes) {
  while (state_.disk->Lack(bytes) > 0) {
    Record* victim = state_.index.DiskVictim();
    if (victim == nullptr) return Room::kNone;
    ++state_.counters.disk_evictions;
    if (victim->chunk == nullptr) {
      state_.index.Unpublish(victim, /*evicted=*/true);
    } else {
      const DiskPlace place = victim->disk;
      state_.index.SetDisk(victim, {}, 0);
      state_.disk->Free(place, victim->layout().image_bytes);
    }
  }
  return state_.disk->HasRoom(bytes) ? Room::kThere : Room::kSoon;
}

ImageEntry Spiller::EntryOf(const Record& record, uint64_t seq) const {
  state_.AssertHeld();
  ImageEntry entry;
  entry.key = record.key();
  entry.parent = record.parent;
  entry.seq = seq;
  entry.blocks = static_cast<uint32_t>(record.layout().image_bytes / kDiskAlignment);
  entry.lifetime.priority = record.priority;
  if (record.expires) {
    const absl::Time expires = state_.index.ExpiryOf(record);
    entry.lifetime.expires = static_cast<uint32_t>(std::clamp<int64_t>(absl::ToUnixSeconds(expires), 1, UINT32_MAX));
  }
  return entry;
}

void Spiller::Start(ChunkNumber number, const ChunkWrite& write) {
  const Record& record = *write.record;
  const ImageEntry entry = EntryOf(record, state_.next_seq++);
  ChunkHeader header;
  header.seq = entry.seq;
  header.key = entry.key;
  header.parent = entry.parent;
  header.tokens = record.layout().tokens;
  header.image_bytes = record.layout().image_bytes;
  header.lifetime = entry.lifetime;
  header.is_finite = record.is_finite;
  header.checksums = write.chunk->checksums();
  state_.after.push_back(
      [self = state_.shared_from_this(), number, chunk = write.chunk, header = std::move(header), entry]() mutable {
        DiskTier* const disk = self->disk.get();
        disk->Post([self = std::move(self), number, chunk = std::move(chunk), header = std::move(header), entry] {
          Spiller(self.get()).Send(number, chunk, header, entry);
        });
      });
}

void Spiller::Send(ChunkNumber number, const std::shared_ptr<Chunk>& chunk, const ChunkHeader& header,
                   const ImageEntry& entry) {
  {
    Step step(&state_);
    if (state_.closed) return;
  }
  const Namespace& ns = *chunk->ns();
  for (size_t layer = 0; layer < header.checksums.size(); ++layer) {
    if (BlockChecksum(chunk->Slot(static_cast<int>(layer))) == header.checksums[layer]) continue;
    Step step(&state_);
    if (state_.closed) return;
    state_.transfers.writing_bytes -= header.image_bytes;
    Lose(state_.transfers.writes.at(number).record, "memory");
    End(number, absl::DataLossError(absl::StrCat("chunk ", ToString(header.key), " has lost its bytes")));
    return StartWrites();
  }
  state_.disk->AddNamespace(ns.id, ns.tenant, ns.spec);
  // The header is joined to the slots here, where nobody else sees it; what shares its last block goes along.
  const ByteView image = chunk->Image();
  auto head = std::make_shared<AlignedBuffer>(RoundUp(chunk->layout().header_bytes, kDiskAlignment));
  std::copy_n(image.begin(), std::min(head->size(), image.size()), head->view().begin());
  EncodeHeader(header, head->view());
  IoPieces pieces = {head->view()};
  if (head->size() < image.size()) pieces.push_back(image.subspan(head->size()));
  state_.disk->Write(std::move(pieces), entry,
                     [self = state_.shared_from_this(), number, entry, chunk = std::shared_ptr<Chunk>(chunk),
                      head](const absl::StatusOr<DiskPlace>& place) mutable {
                       chunk = nullptr;  // so that it may be dropped
                       Spiller(self.get()).Written(number, entry, place);
                     });
}

void Spiller::Written(ChunkNumber number, const ImageEntry& entry, const absl::StatusOr<DiskPlace>& place) {
  {
    Step step(&state_);
    if (state_.closed) return;
    ChunkWrite& write = state_.transfers.writes.at(number);
    Record* const record = write.record;
    const uint64_t bytes = record->layout().image_bytes;
    state_.transfers.writing_bytes -= bytes;
    if (place.ok()) {
      ++state_.counters.disk_writes;
      state_.counters.disk_bytes_written += bytes;
      state_.index.SetDisk(record, *place, entry.seq);
      if (record->published && write.named) {
        state_.disk->Publish(*place, EntryOf(*record, state_.next_seq++));
      }
      End(number, absl::OkStatus());
    } else if (absl::IsResourceExhausted(place.status()) && ++write.refusals < kMostRefusals) {
      write.begun = write.named = false;  // others took the room that was there
      state_.transfers.to_write.push_front(number);
    } else {
      ++state_.counters.disk_writes_failed;
      KVFERRY_LOG_EVERY(kWarning, absl::Seconds(10),
                        absl::StrCat("disk: a chunk is not written: ", place.status().message()));
      End(number, place.status());
      Pause();
    }
    StartWrites();
    Loader(&state_).FollowHints();
  }
  state_.OnMemoryFreed();  // it may be dropped now
}

void Spiller::End(ChunkNumber number, const absl::Status& status) {
  const auto it = state_.transfers.writes.find(number);
  ChunkWrite write = std::move(it->second);
  state_.transfers.writes.erase(it);
  if (write.cleaning) state_.transfers.cleaning_bytes -= write.chunk->charged_bytes();
  for (FlushDone& done : write.waiters) {
    state_.after.push_back([done = std::move(done), status]() mutable { std::move(done)(status); });
  }
  Record* const record = write.record;
  const bool stays = record->live || record->published || record->leases != 0 || record->holds > 1;
  state_.index.Unhold(record);
  if (stays && write.cleaning) state_.index.MakeReady(record);
}

void Spiller::Pause() {
  const absl::Time now = state_.executor->Now();
  if (state_.transfers.paused_until > now) return;
  state_.transfers.paused_until = now + kPause;
  state_.RunAt(now + kPause, [](StoreState& state) { state.OnMemoryFreed(); });
}

void Spiller::Resume() {
  {
    Step step(&state_);
    if (state_.closed) return;
    StartWrites();
  }
  state_.OnMemoryFreed();
}

void Spiller::Flush(FlushDone done) {
  if (state_.disk == nullptr) return std::move(done)(absl::OkStatus());
  const auto answer = std::make_shared<FlushAnswer>(state_.disk.get(), std::move(done));  // lets go after the step
  Step step(&state_);
  const std::vector<ChunkNumber> dirty(state_.index.dirty().begin(), state_.index.dirty().end());
  for (const ChunkNumber number : dirty) {
    Write(state_.index.at(number), false);
    const auto write = state_.transfers.writes.find(number);
    if (write == state_.transfers.writes.end()) {
      answer->Add(absl::ResourceExhaustedError("flush: the disk has no room for all chunks"));
    } else {
      write->second.waiters.push_back([answer](const absl::Status& status) { answer->Add(status); });
    }
  }
}

void Spiller::Lose(Record* record, absl::string_view where) {
  state_.AssertHeld();
  ++state_.counters.corruptions;
  KVFERRY_LOG(kError, absl::StrCat("chunk ", ToString(record->key()), " has lost its bytes in ", where, ", segment ",
                                   record->disk.segment, " block ", record->disk.block));
  state_.index.Hold(record);
  if (record->disk) state_.disk->Quarantine(record->disk);
  state_.index.SetDisk(record, {}, 0);
  state_.index.SetChunk(record, nullptr);
  if (record->published) state_.index.Unpublish(record);
  state_.index.Unhold(record);
}

}  // namespace kvferry
