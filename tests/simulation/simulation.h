// A whole store, its clients, its disk and its crashes on one thread, as one seed decides.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/simulation/model.h"
#include "tests/simulation/sim_executor.h"
#include "tests/support/sim_disk.h"

namespace kvferry::simulation {

// What happened, as a number: two runs of a seed have the same one.
class Trace {
 public:
  explicit Trace(bool verbose) : verbose_(verbose) {}
  void Add(const std::string& line);
  uint64_t hash() const { return hash_; }

 private:
  const bool verbose_;
  uint64_t hash_ = 0xcbf29ce484222325;
};

class Simulation {
 public:
  Simulation(uint64_t seed, bool verbose);
  ~Simulation();

  // Runs to the end, or to the first thing that is wrong.
  void Run();
  const std::string& failure() const { return failure_; }  // empty: nothing was
  uint64_t hash() const { return trace_.hash(); }

  // What the runs so far have met with, to see that a seed reaches what it should.
  struct Met {
    uint64_t steps = 0, crashes = 0, gets_hit = 0, gets_missed = 0, waits = 0, refusals = 0, found = 0, durable = 0;
    uint64_t evictions = 0, disk_evictions = 0, spills = 0, loads = 0, failed_writes = 0, failed_reads = 0,
             corruptions = 0, flushes = 0, erasures = 0, expirations = 0, prefetches = 0;
  };
  static Met met;

 private:
  struct View {
    BlockView view;
    uint64_t content = 0;
    int layer = 0;
    bool lies = false;
  };
  // An answer that is due, once.
  class Due;

  void Fail(const std::string& what);
  bool failed() const { return !failure_.empty(); }
  uint64_t Random(uint64_t below) { return random_() % below; }
  bool OneIn(uint64_t n) { return Random(n) == 0; }
  template <typename T>
  auto Any(T& container) {
    return std::next(container.begin(), static_cast<int64_t>(Random(container.size())));
  }

  // ---- simulation.cc: the life of the store ----
  void Open();
  void TakeOver();
  enum class End { kClean, kKilled, kPowerLost };
  void Crash(End end);
  bool RunSomething();  // a task of the executor or of the disk
  void Settle();
  void Advance(absl::Duration by);
  void Check();
  void CheckAllHeld();
  void Finish();
  void CountMet();
  bool unwell() const { return disk_.faults.out_of > 0 || disk_.faults.crash_after >= 0; }
  std::shared_ptr<Due> Expect(const std::string& what);

  // ---- steps.cc: what clients do ----
  void Step();
  void StepOpenSession();
  void StepEndSession();
  void StepSuspend();
  void StepReserve();
  void StepCommit();
  void StepAbort();
  void StepPublish();
  void StepGet();
  void StepGetOfAnother();
  void StepLookup();
  void StepRelease();
  void StepShare();
  void StepRedeem();
  void StepPrefetch();
  void StepErase();
  void StepFlush();
  void StepFaults();
  void StepViews();

  Session* AnySession();  // not suspended; nullptr: there is none
  void Forget(Session* session);
  ChunkKey AnyName(size_t tenant);
  ChunkKey AnyKey(Session& session);
  ChunkPtr Find(const Session& session, const ChunkKey& key) const;
  bool MustBe(const Chunk& chunk) const;
  void Erase(const Session& session, const ChunkKey& key);
  void Get(SessionId session, const ChunkKey& key, int layer, const ChunkPtr& chunk);
  void Got(const ChunkPtr& chunk, int layer, const absl::StatusOr<BlockView>& view, bool must);
  void Reserved(SessionId session, size_t spec, absl::StatusOr<std::vector<std::unique_ptr<ChunkWriter>>> writers);
  size_t LayersOf(size_t spec, int group) const {
    return specs_[spec].groups[static_cast<size_t>(group)].layers.size();
  }

  const uint64_t seed_;
  std::mt19937_64 random_;
  Trace trace_;
  std::string failure_;

  // Constant once the seed has decided.
  StoreOptions options_;
  std::vector<NamespaceSpec> specs_;
  std::map<std::pair<size_t, size_t>, NamespaceId> namespaces_;  // by tenant and spec
  uint64_t names_ = 0, steps_ = 0, crash_every_ = 0, most_sessions_ = 0, tasks_a_step_ = 0;
  bool may_fail_ = false, may_fill_ = false, may_flip_ = false, may_lie_ = false, may_crash_ = false;

  SimExecutor executor_{&random_};
  SimDisk disk_;
  std::unique_ptr<SimScheduler> scheduler_;
  std::unique_ptr<Store> store_;

  // The model.
  Names known_;
  std::array<std::vector<ChunkKey>, 2> recent_;  // names that each tenant has published
  std::vector<std::unique_ptr<Session>> sessions_;
  std::vector<std::unique_ptr<Ticket>> tickets_;
  std::vector<View> views_;
  std::vector<std::unique_ptr<ChunkWriter>> late_;  // writers whose session or store has gone
  std::vector<std::shared_ptr<std::atomic<bool>>> given_up_;
  std::map<uint64_t, std::string> due_;
  uint64_t next_due_ = 1, next_content_ = 1, incarnation_ = 0, unwell_times_ = 0;
  bool flipped_ = false;  // since the folder was empty
  bool closing_ = false;
};

}  // namespace kvferry::simulation
