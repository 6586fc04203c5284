#include "tests/simulation/simulation.h"

#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/record.h"
#include "tests/base/specs.h"
#include "tests/simulation/due.h"

namespace kvferry::simulation {

Simulation::Met Simulation::met;

void Trace::Add(const std::string& line) {
  for (const char c : line) hash_ = (hash_ ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  if (verbose_) std::printf("%s\n", line.c_str());
}

Simulation::Simulation(uint64_t seed, bool verbose)
    : seed_(seed), random_(seed * 0x9e3779b97f4a7c15 + 1), trace_(verbose), disk_(random_()) {
  // Two models, of one group and of two; in some seeds the images are read in several pieces.
  const bool large = OneIn(16);
  const uint32_t dim = large ? 4096 : 64u << Random(4);
  specs_.push_back(SmallSpec(2 + static_cast<int>(Random(2)), 4, dim, 8, "model/a"));
  specs_.push_back(SmallSpec(2, 2, dim, 8, "model/b"));
  specs_[1].groups.push_back(specs_[1].groups[0]);
  specs_[1].groups[1].layers.resize(1);
  const ChunkLayout layout = ChunkLayout::For(specs_[0], 0);
  const uint64_t record = layout.image_bytes + RecordOverhead(layout);
  options_.memory_bytes = std::max(64 * kKiB, (4 + Random(12)) * record) * 64 / 60 + 8192;
  options_.segment_bytes = 64 * kMiB;
  const uint64_t images = OneIn(3) ? 1000 : 3 + Random(20);  // a disk that never fills, or one that does
  options_.disk_bytes = std::max(kMiB, images * layout.image_bytes * 8 / 7);
  options_.disk_keep_free_bytes = 0;
  options_.policy = kPolicies[Random(std::size(kPolicies))];
  options_.write_policy = kWritePolicies[Random(std::size(kWritePolicies))];
  options_.live_grace = absl::Seconds(60);
  options_.reservation_grace = absl::Seconds(20);
  options_.load_patience = absl::Seconds(1 + Random(30));
  options_.random = [this] { return random_(); };
  names_ = 4 + Random(OneIn(2) ? 12 : 60);
  most_sessions_ = 1 + Random(5);
  tasks_a_step_ = 1 + Random(8);
  steps_ = large ? 400 : 3000;
  may_crash_ = !OneIn(4);
  crash_every_ = OneIn(2) ? 200 : 2000;
  may_fail_ = OneIn(3);
  may_fill_ = OneIn(4);
  may_flip_ = OneIn(6);
  may_lie_ = OneIn(4);
  for (size_t tenant = 0; tenant < 2; ++tenant) {
    for (size_t spec = 0; spec < specs_.size(); ++spec) {
      namespaces_[{tenant, spec}] = HashNamespace(absl::StrCat("tenant ", tenant), specs_[spec]);
    }
  }
}

Simulation::~Simulation() {
  late_.clear();
  for (auto& session : sessions_) session->live.clear();
  if (store_ != nullptr) {
    closing_ = true;
    store_->Close([] {});
    scheduler_->RunAll();
  }
}

void Simulation::Fail(const std::string& what) {
  if (failed()) return;
  failure_ = absl::StrCat(what, " (incarnation ", incarnation_, ")");
  trace_.Add("FAILED: " + failure_);
}

void Simulation::Run() {
  Open();
  for (uint64_t step = 0; step < steps_ && !failed(); ++step) {
    ++met.steps;
    Step();
    for (uint64_t tasks = Random(tasks_a_step_ + 1); tasks > 0 && !failed(); --tasks) RunSomething();
    if (step % 4 == 0 && !failed()) Check();
    const bool crashed = disk_.faults.crash_after >= 0 && disk_.operations() >= disk_.faults.crash_after;
    if (crashed && OneIn(4)) {
      Crash(OneIn(2) ? End::kPowerLost : End::kKilled);
    } else if (may_crash_ && OneIn(crash_every_)) {
      Crash(static_cast<End>(Random(3)));
    }
  }
  if (!failed()) Finish();
}

// ---- opening ----

void Simulation::Open() {
  closing_ = false;
  ++incarnation_;
  for (int attempt = 0; store_ == nullptr && !failed(); ++attempt) {
    scheduler_ = std::make_unique<SimScheduler>(random_());
    disk_.faults = SimDisk::Faults();
    if (may_crash_ && attempt < 3 && OneIn(3)) {
      disk_.faults.crash_after = disk_.operations() + static_cast<int>(Random(40));
      ++unwell_times_;
    } else if (may_fail_ && attempt < 3 && OneIn(2)) {
      disk_.faults.fail_at = disk_.operations() + static_cast<int>(Random(20));
      known_.NothingIsDurable();  // what could not be read is found at another start
    }
    auto opened = OpenStore(options_, &executor_, disk_.Open(scheduler_.get()));
    trace_.Add(absl::StrCat("open: ", absl::StatusCodeToString(opened.status().code())));
    scheduler_->RunAll();
    if (opened.ok()) {
      store_ = *std::move(opened);
    } else if (disk_.faults.crash_after >= 0) {
      if (OneIn(2)) {
        disk_.Crash();
      } else {
        disk_.faults.crash_after = -1;
      }
    } else if (disk_.faults.fail_at >= 0) {
      continue;
    } else if (flipped_) {  // somebody has to look at it
      disk_ = SimDisk(random_());
      known_.Clear();
      flipped_ = false;
    } else {
      Fail(absl::StrCat("the store does not open: ", opened.status().ToString()));
    }
  }
  disk_.faults.fail_at = -1;
  if (!failed()) TakeOver();
}

// What was flushed is there, what was erased is not.
void Simulation::TakeOver() {
  for (size_t tenant = 0; tenant < 2; ++tenant) {
    const absl::StatusOr<SessionId> session = store_->OpenSession(absl::StrCat("tenant ", tenant));
    if (!session.ok()) return Fail(absl::StrCat("no session at start: ", session.status().ToString()));
    std::vector<ChunkPtr> leased;
    for (size_t spec = 0; spec < specs_.size(); ++spec) {
      for (uint16_t group = 0; group < specs_[spec].groups.size(); ++group) {
        for (uint64_t id = 1; id <= names_; ++id) {
          const ChunkKey key{namespaces_.at({tenant, spec}), {0, id}, group, 0};
          const absl::StatusOr<Match> match = store_->Lookup(*session, {key}, false);
          if (!match.ok()) return Fail(absl::StrCat("lookup at start: ", match.status().ToString()));
          const ChunkPtr chunk = known_.Find(key);
          if (match->chunks == 1) ++met.found;
          if (match->chunks == 1 && chunk == nullptr) {
            return Fail(absl::StrCat("chunk ", ToString(key), " was erased, has expired or never was, and is found"));
          }
          if (flipped_ || !known_.MustBeFound(key, executor_.Now())) continue;
          if (match->chunks == 0) return Fail(absl::StrCat("chunk ", ToString(key), " was flushed and is not found"));
          if (store_->Lookup(*session, {key}, true).value_or(Match()).chunks == 0) continue;  // no memory for a lease
          ++chunk->holders;
          leased.push_back(chunk);
          ++met.durable;
          if (OneIn(2)) Get(*session, key, 0, chunk);
        }
      }
    }
    if (OneIn(2)) Settle();
    store_->EndSession(*session);
    for (const ChunkPtr& chunk : leased) --chunk->holders;
  }
}

// ---- the end of a process ----

void Simulation::Crash(End end) {
  static constexpr const char* kNames[] = {"closed", "killed", "power lost"};
  trace_.Add(kNames[static_cast<int>(end)]);
  ++met.crashes;
  CountMet();
  const bool crashed = disk_.faults.crash_after >= 0;
  if (end != End::kClean || crashed) {
    disk_.faults.out_of = 0;
    if (!crashed) disk_.faults.crash_after = disk_.operations();
  }
  const StoreStats stats = store_->Stats();
  if (stats.disk_evictions > 0 || stats.disk_reads_failed > 0 || flipped_) known_.NothingIsDurable();
  for (auto& session : sessions_) Forget(session.get());
  sessions_.clear();
  tickets_.clear();
  if (OneIn(2)) late_.clear();
  closing_ = true;
  bool closed = false;
  store_->Close([&closed] { closed = true; });
  scheduler_->RunAll();
  if (!closed) Fail("the store does not close");
  if (!due_.empty()) Fail("never answered, though the store has closed: " + due_.begin()->second);
  store_ = nullptr;
  late_.clear();
  while (executor_.RunOne()) {
  }
  if (end == End::kPowerLost) disk_.Crash();
  disk_.faults = SimDisk::Faults();
  known_.Restart(executor_.Now());
  if (!failed()) Open();
}

// ---- time ----

bool Simulation::RunSomething() {
  if (OneIn(2)) return executor_.RunOne() || scheduler_->RunOne();
  return scheduler_->RunOne() || executor_.RunOne();
}

void Simulation::Settle() {
  for (int tasks = 0; RunSomething(); ++tasks) {
    if (tasks == 1000000) return Fail("it never settles");
  }
}

void Simulation::Advance(absl::Duration by) {
  trace_.Add(absl::StrCat("advance ", absl::FormatDuration(by)));
  executor_.Advance(by);
  const absl::Time now = executor_.Now();
  known_.Expire(now);
  for (auto& session : sessions_) {
    if (!session->suspended) continue;
    if (!session->maybe_over && session->since + options_.live_grace <= now) {
      session->maybe_over = true;
      session->Hold(-1);
    }
    if (session->since + options_.reservation_grace <= now) session->maybe_aborted = true;
  }
  for (auto& ticket : tickets_) {
    if (ticket->over || ticket->expires > now) continue;
    ticket->over = true;
    for (const ChunkPtr& chunk : ticket->chunks) --chunk->holders;
  }
}

// ---- checks ----

std::shared_ptr<Simulation::Due> Simulation::Expect(const std::string& what) {
  due_[next_due_] = what;
  return std::make_shared<Due>(this, next_due_++);
}

void Simulation::Check() {
  if (absl::Status status = store_->CheckInvariants(); !status.ok()) return Fail(status.ToString());
  const StoreStats stats = store_->Stats();
  if (stats.memory_used_bytes + stats.memory_free_in_segments_bytes > stats.memory_budget_bytes) {
    return Fail("more memory than the budget");
  }
  if (stats.disk_used_bytes > stats.disk_budget_bytes) return Fail("more disk than the bound");
  uint64_t segments = 0;
  for (const std::string& name : disk_.Names())
    segments += name.rfind("segment-", 0) == 0 ? disk_.AllocatedBytes(name) : 0;
  if (!may_fail_ && disk_.faults.crash_after < 0 && segments > stats.disk_budget_bytes) {
    return Fail(absl::StrCat("segments take ", segments, " bytes, bound ", stats.disk_budget_bytes));
  }
  // After a crash what was evicted from the disk may come back, and its bytes need not.
  if (stats.corruptions > 0 && incarnation_ == 1 && !flipped_ && !may_lie_) {
    return Fail("a chunk was lost and no byte was flipped");
  }
}

// Nothing that anybody holds is lost, after whatever was under way has ended.
void Simulation::CheckAllHeld() {
  disk_.faults.out_of = 0;
  Settle();
  for (auto& session : sessions_) {
    if (session->suspended) continue;
    for (auto& [key, live] : session->live) {
      if (live.chunk->sealed) Get(session->id, key, 0, live.chunk);
    }
    for (auto& [key, lease] : session->leases) Get(session->id, key, 0, lease.chunk);
  }
  Settle();
}

void Simulation::CountMet() {
  const StoreStats stats = store_->Stats();
  met.evictions += stats.evictions;
  met.disk_evictions += stats.disk_evictions;
  met.spills += stats.disk_writes;
  met.loads += stats.disk_reads;
  met.failed_writes += stats.disk_writes_failed;
  met.failed_reads += stats.disk_reads_failed;
  met.corruptions += stats.corruptions;
  met.expirations += stats.expirations;
  met.prefetches += stats.prefetches;
  met.refusals += stats.reserves_refused;
}

void Simulation::Finish() {
  if (disk_.faults.crash_after >= 0) Crash(End::kKilled);
  if (failed()) return;
  disk_.faults = SimDisk::Faults();
  CheckAllHeld();
  if (failed()) return;
  late_.clear();
  StepViews();
  views_.clear();
  for (auto& session : sessions_) {
    Forget(session.get());
    store_->EndSession(session->id);
  }
  sessions_.clear();
  for (int hour = 0; hour < 3; ++hour) {
    Advance(absl::Hours(1));
    Settle();
  }
  if (!due_.empty()) return Fail("never answered: " + due_.begin()->second);
  for (size_t tenant = 0; tenant < 2; ++tenant) {
    const absl::StatusOr<SessionId> session = store_->OpenSession(absl::StrCat("tenant ", tenant));
    if (!session.ok()) return Fail(absl::StrCat("no session at the end: ", session.status().ToString()));
    for (const ChunkInfo& info : store_->List(0, SIZE_MAX)) {
      if (info.tenant == absl::StrCat("tenant ", tenant)) store_->Erase(*session, info.key, [](const absl::Status&) {});
    }
    store_->EndSession(*session);
  }
  Settle();
  views_.clear();
  late_.clear();
  Settle();
  if (failed()) return;
  Check();
  CountMet();
  const StoreStats s = store_->Stats();
  const uint64_t gauges[] = {s.memory_used_bytes, s.memory_free_in_segments_bytes,
                             s.metadata_bytes,    s.segments,
                             s.sessions,          s.namespaces,
                             s.chunks_live,       s.chunks_published,
                             s.chunks_reserved,   s.chunks_leased,
                             s.chunks_on_disk,    s.disk_live_bytes};
  for (size_t i = 0; i < std::size(gauges); ++i) {
    if (&gauges[i] == std::end(gauges) - 1 && s.corruptions > 0) continue;  // kept so that somebody can look at it
    if (gauges[i] != 0) return Fail(absl::StrCat("nobody holds anything, and gauge ", i, " is ", gauges[i]));
  }
}

}  // namespace kvferry::simulation
