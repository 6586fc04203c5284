// A store over memory and a folder of this machine, whose threads answer when they like.
#pragma once

#include <chrono>
#include <future>
#include <memory>
#include <set>
#include <utility>

#include "storage/base/status.h"
#include "storage/disk/posix_folder.h"
#include "tests/storage/store_fixture.h"
#include "tests/support/disk_folder.h"

namespace kvferry {

class FolderStoreFixture : public StoreFixture {
 protected:
  // Memory for `chunks`; the folder is that of temp_.
  absl::Status OpenFolder(uint64_t chunks, PosixCalls calls) {
    options_.memory_bytes = BudgetFor(BigSpec(), chunks);
    options_.disk_bytes = 8 * kMiB;
    options_.disk_keep_free_bytes = 0;
    PosixFolderOptions where;
    where.path = temp_->path() + "/store";
    KVFERRY_ASSIGN_OR_RETURN(std::unique_ptr<Folder> folder, OpenPosixFolder(where, std::move(calls)));
    KVFERRY_ASSIGN_OR_RETURN(store_, OpenStore(options_, &executor_, std::move(folder)));
    session_ = Session();
    ns_ = Namespace(session_, BigSpec());
    return absl::OkStatus();
  }
  void Close() { store_ = nullptr; }

  // Runs the executor until the answer of an asynchronous call is there.
  template <typename Result, typename Start>
  Result Await(Start start) {
    std::promise<Result> promise;
    std::future<Result> future = promise.get_future();
    start([&promise](Result result) { promise.set_value(std::move(result)); });
    while (future.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
      executor_.Advance(absl::Milliseconds(10));  // whoever waits for memory or for a pause of the disk goes on
    }
    return future.get();
  }
  absl::Status Flush() {
    return Await<absl::Status>([this](auto done) { store_->Flush(std::move(done)); });
  }
  // Published under `id`, if the store has memory for it.
  void Put(uint64_t id) {
    ReserveOptions options;
    options.deadline = executor_.Now() + absl::Seconds(5);
    absl::StatusOr<Writers> writers =
        Await<absl::StatusOr<Writers>>([&](auto done) { store_->Reserve(session_, ns_, options, std::move(done)); });
    if (!writers.ok()) return;
    Seal(*(*writers)[0], id);
    const ChunkKey live = (*writers)[0]->key();
    writers->clear();
    const absl::Status status = Publish(session_, live, id);
    EXPECT_TRUE(status.ok()) << status;
    store_->Release(session_, {live});
  }
  // The chunks of 1 to `count` that are there, each with its own bytes.
  std::set<uint64_t> Read(uint64_t count) {
    std::set<uint64_t> found;
    for (uint64_t id = 1; id <= count; ++id) {
      bool all = true;
      for (uint16_t layer = 0; layer < 2; ++layer) {
        const absl::StatusOr<BlockView> view = Await<absl::StatusOr<BlockView>>([&](auto done) {
          store_->Get(session_, BlockKey{Prefix(ns_, id), layer}, std::move(done));
        });
        EXPECT_TRUE(view.ok() || absl::IsNotFound(view.status())) << id << ": " << view.status();
        if (view.ok()) ExpectBytes(*view, id, layer);
        all = all && view.ok();
      }
      if (all) found.insert(id);
    }
    return found;
  }

  StoreOptions options_;
  std::unique_ptr<TempFolder> temp_ = std::make_unique<TempFolder>();
  SessionId session_ = 0;
  NamespaceId ns_{};
};

}  // namespace kvferry
