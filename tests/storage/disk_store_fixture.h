// A store over memory and a simulated disk, on one thread.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "tests/storage/store_fixture.h"
#include "tests/support/sim_disk.h"

namespace kvferry {

// Nothing happens but what a test lets happen: Settle runs the disk and the executor until both have nothing to do.
class DiskStoreFixture : public StoreFixture {
 protected:
  ~DiskStoreFixture() override { Close(); }

  // Memory for `chunks` of the spec and a disk for `on_disk`.
  void OpenTiers(const NamespaceSpec& spec, uint64_t chunks, uint64_t on_disk = 1000) {
    options_.memory_bytes = BudgetFor(spec, chunks);
    options_.disk_bytes = on_disk * ChunkLayout::For(spec, 0).image_bytes + kMiB;
    options_.disk_keep_free_bytes = 0;
    OpenAgain();
  }
  void OpenAgain() {
    scheduler_ = std::make_unique<SimScheduler>(1);
    auto opened = OpenStore(options_, &executor_, disk_.Open(scheduler_.get()));
    ASSERT_TRUE(opened.ok()) << opened.status();
    store_ = *std::move(opened);
  }
  // As a process that ends; `power`: and takes with it what was not synced.
  void Close(bool power = false) {
    if (store_ == nullptr) return;
    if (power) disk_.faults.crash_after = disk_.operations();
    store_->Close([] {});
    if (scheduler_ != nullptr) scheduler_->RunAll();
    store_ = nullptr;
    disk_.faults.crash_after = -1;
    if (power) disk_.Crash();
  }

  void Settle() {
    do {
      executor_.Run();
    } while (scheduler_->RunOne());
  }
  // Until the answer of an asynchronous call is there.
  template <typename Result, typename Start>
  Result Await(Start start) {
    auto result = std::make_shared<std::optional<Result>>();
    start([result](Result r) {
      EXPECT_FALSE(result->has_value()) << "answered twice";
      result->emplace(std::move(r));
    });
    Settle();
    EXPECT_TRUE(result->has_value()) << "not answered";
    return result->has_value() ? *std::move(*result) : Result(absl::InternalError("not answered"));
  }
  absl::Status Flush() {
    return Await<absl::Status>([this](auto done) { store_->Flush(std::move(done)); });
  }
  absl::Status EraseAndWait(SessionId session, const ChunkKey& key) {
    return Await<absl::Status>([&](auto done) { store_->Erase(session, key, std::move(done)); });
  }
  absl::StatusOr<BlockView> Fetch(SessionId session, const ChunkKey& key, int layer = 0) {
    return Await<absl::StatusOr<BlockView>>([&](auto done) {
      store_->Get(session, BlockKey{key, static_cast<uint16_t>(layer)}, std::move(done));
    });
  }
  // True if the chunk is there and has its own bytes; false if it is a miss. Anything else fails the test.
  bool Holds(SessionId session, const ChunkKey& key, uint64_t seed, int layers = 2) {
    bool all = true;
    for (int layer = 0; layer < layers; ++layer) {
      const absl::StatusOr<BlockView> view = Fetch(session, key, layer);
      EXPECT_TRUE(view.ok() || absl::IsNotFound(view.status())) << view.status();
      if (view.ok()) ExpectBytes(*view, seed, layer);
      all = all && view.ok();
    }
    return all;
  }
  absl::StatusOr<Writers> ReserveAndWait(SessionId session, const NamespaceId& ns, int count = 1) {
    const Answer answer = Ask(session, ns, count, absl::Seconds(10));
    Settle();
    if (!answer->has_value()) executor_.Advance(absl::Seconds(10));
    Settle();
    EXPECT_TRUE(answer->has_value());
    return answer->has_value() ? *std::move(*answer) : absl::InternalError("not answered");
  }
  ChunkKey LiveOne(SessionId session, const NamespaceId& ns, uint64_t seed) {
    absl::StatusOr<Writers> writers = ReserveAndWait(session, ns);
    EXPECT_TRUE(writers.ok()) << writers.status();
    if (!writers.ok()) return ChunkKey{};
    Seal(*(*writers)[0], seed);
    return (*writers)[0]->key();
  }
  ChunkKey PublishedOne(SessionId session, const NamespaceId& ns, uint64_t id, uint64_t parent = 0) {
    const ChunkKey live = LiveOne(session, ns, id);
    const absl::Status status = Publish(session, live, id, parent);
    EXPECT_TRUE(status.ok()) << status;
    store_->Release(session, {live});
    Settle();
    return Prefix(ns, id);
  }

  StoreOptions options_;
  SimDisk disk_{1};
  std::unique_ptr<SimScheduler> scheduler_;
};

}  // namespace kvferry
