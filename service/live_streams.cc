#include "service/live_streams.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace kvferry {

void LiveStreams::Add(std::shared_ptr<LiveStream> stream) {
  bool stopping;
  {
    MutexLock lock(&mu_);
    streams_.emplace(stream.get(), stream);
    stopping = stopping_;
  }
  if (stopping) stream->Stop();
}

void LiveStreams::Remove(LiveStream* stream) {
  std::shared_ptr<LiveStream> removed;  // destroyed after the lock is released
  MutexLock lock(&mu_);
  auto node = streams_.extract(stream);
  if (node.empty()) return;
  removed = std::move(node.mapped());
  changed_.NotifyAll();
}

template <typename Visit>
void LiveStreams::ForEach(Visit visit) {
  std::vector<std::shared_ptr<LiveStream>> streams;
  {
    MutexLock lock(&mu_);
    for (const auto& [_, stream] : streams_) streams.push_back(stream);
  }
  for (const auto& stream : streams) visit(stream.get());
}

void LiveStreams::SendDrainNotices() {
  ForEach([](LiveStream* stream) { stream->SendDrainNotice(); });
}

bool LiveStreams::WaitForBulk(absl::Time deadline) {
  MutexLock lock(&mu_);
  while (AnyBulk()) {
    if (changed_.WaitUntil(&mu_, deadline)) return !AnyBulk();
  }
  return true;
}

void LiveStreams::NoteIdle() {
  MutexLock lock(&mu_);  // or the wait could miss it between its look and its sleep
  changed_.NotifyAll();
}

bool LiveStreams::AnyBulk() const {
  return std::any_of(streams_.begin(), streams_.end(), [](const auto& entry) { return entry.second->is_bulk(); });
}

void LiveStreams::StopAll() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  ForEach([](LiveStream* stream) { stream->Stop(); });
}

}  // namespace kvferry
