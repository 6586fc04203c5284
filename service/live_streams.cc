#include "service/live_streams.h"

#include <utility>
#include <vector>

namespace kvferry {

void LiveStreams::Add(std::shared_ptr<LiveStream> stream) {
  bool stopping;
  {
    MutexLock lock(&mu_);
    if (stream->is_bulk()) ++bulk_;
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
  if (removed->is_bulk()) --bulk_;
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
  while (bulk_ > 0) {
    if (changed_.WaitUntil(&mu_, deadline)) return bulk_ == 0;
  }
  return true;
}

void LiveStreams::StopAll() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  ForEach([](LiveStream* stream) { stream->Stop(); });
}

}  // namespace kvferry
