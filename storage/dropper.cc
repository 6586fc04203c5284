#include "storage/dropper.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace kvferry {
namespace {

constexpr size_t kRecordsAtOnce = 1024;                       // looked at under one hold of the lock
constexpr size_t kChunksAtOnce = 64;                          // taken
constexpr absl::Duration kTransfer = absl::Milliseconds(10);  // before those that are under way are looked at again

}  // namespace

// Answers once the last of those that hold it has let go: the sweep, and what is trimmed on disk.
struct Dropper::Job : std::enable_shared_from_this<Job> {
  Job(NamespaceId id, uint32_t before_epoch, bool purges, DropDone d)
      : ns(id), epoch(before_epoch), purge(purges), done(std::move(d)) {}
  ~Job() {
    if (status.ok()) {
      std::move(done)(report);
    } else {
      std::move(done)(status);
    }
  }

  const NamespaceId ns;
  const uint32_t epoch;  // names from before it go
  const bool purge;
  DropDone done;
  uint64_t next = 0;                           // number of the record to go on behind
  bool again = false;                          // some were on their way from one tier to the other: another round
  std::vector<std::shared_ptr<Chunk>> chunks;  // whose memory is to be overwritten

  Mutex mu;
  DropReport report;  // of those that go on at a time under mu
  absl::Status status;
};

void Dropper::Drop(const NamespaceId& ns, bool purge, DropDone done) {
  std::shared_ptr<Job> job;
  uint64_t seq = 0;
  {
    Step step(&state_);
    if (const std::shared_ptr<const Namespace> known = state_.namespaces.Find(ns); known != nullptr) {
      job = std::make_shared<Job>(ns, ++known->epoch, purge, std::move(done));
      seq = state_.next_seq++;
    }
  }
  if (job == nullptr) return std::move(done)(absl::NotFoundError(absl::StrCat("drop: no namespace ", ToString(ns))));
  const auto sweep = [weak = state_.weak_from_this(), job](const absl::Status& synced) {
    {
      MutexLock lock(&job->mu);
      job->status.Update(synced);
    }
    const std::shared_ptr<StoreState> state = weak.lock();
    if (state != nullptr) {
      state->RunAt(state->executor->Now(), [job](StoreState& s) { Dropper(&s).Sweep(job); });
    }
  };
  job = nullptr;
  if (state_.disk == nullptr) return sweep(absl::OkStatus());
  state_.disk->Drop(ns, seq, sweep);
}

void Dropper::Sweep(const std::shared_ptr<Job>& job) {
  bool more = false;
  {
    Step step(&state_);
    std::vector<Record*> found;
    uint64_t last = job->next;
    const uint64_t end = job->next + kRecordsAtOnce;
    state_.index.ForEachAfter(job->next, kRecordsAtOnce, [&](uint64_t number, Record& record) {
      if (found.size() >= kChunksAtOnce || number > end) return;
      last = number;
      if (record.ns->id == job->ns && record.published && record.epoch < job->epoch) found.push_back(&record);
    });
    more = last != job->next;
    job->next = last;
    for (Record* record : found) {
      if (job->purge && record->holds != 0) {
        job->again = true;
      } else {
        Take(record, job.get());
      }
    }
  }
  uint64_t purged = 0, kept = 0;
  for (std::shared_ptr<Chunk>& chunk : job->chunks) {
    const MutableByteView image = chunk->Image();
    if (chunk.use_count() == 1) {
      std::fill(image.begin(), image.end(), uint8_t{0});
      purged += image.size();
    } else {
      kept += image.size();  // somebody reads it
    }
  }
  job->chunks.clear();
  {
    MutexLock lock(&job->mu);
    job->report.memory_bytes_purged += purged;
    job->report.bytes_kept += kept;
  }
  state_.OnMemoryFreed();
  absl::Time when = state_.executor->Now();
  if (!more && std::exchange(job->again, false)) {
    job->next = 0;
    more = true;
    when += kTransfer;
  }
  if (more) state_.RunAt(when, [job](StoreState& s) { Dropper(&s).Sweep(job); });
}

void Dropper::Take(Record* record, Job* job) {
  const uint64_t bytes = record->layout().image_bytes;
  const bool held = record->live || record->leases != 0;
  {
    MutexLock lock(&job->mu);
    ++job->report.chunks;
    job->report.bytes += bytes;
    if (held) job->report.bytes_kept += bytes;
  }
  if (job->purge && !held) {
    if (record->chunk != nullptr) job->chunks.push_back(record->chunk);
    if (const DiskPlace place = record->disk; place) {
      state_.index.SetDisk(record, {}, 0);
      state_.disk->Trim(place, bytes, [shared = job->shared_from_this(), bytes](const absl::Status& trimmed) {
        MutexLock lock(&shared->mu);
        if (trimmed.ok()) shared->report.disk_bytes_purged += bytes;
      });
    }
  }
  state_.index.Unpublish(record);
}

}  // namespace kvferry
