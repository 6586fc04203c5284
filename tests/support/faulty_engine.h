// An IoEngine whose transfers turn out short or fail, as those of a real disk do now and then.
#pragma once

#include <atomic>
#include <cerrno>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "storage/disk/io_engine.h"

namespace kvferry {

class FaultyEngine : public IoEngine {
 public:
  // What becomes of the transfer `number` (from 0): 0, it goes as it will; a negative errno, it fails; a positive
  // number of bytes, it moves no more than these.
  using Fault = std::function<int64_t(int number, const IoRequest& request)>;

  FaultyEngine(std::unique_ptr<IoEngine> real, Fault fault) : real_(std::move(real)), fault_(std::move(fault)) {}

  absl::string_view name() const override { return real_->name(); }
  void Post(absl::AnyInvocable<void()> task) override { real_->Post(std::move(task)); }

  void Submit(IoRequest request) override {
    const int64_t fault = fault_(transfers_++, request);
    if (fault < 0) {
      real_->Post([done = std::move(request.done), fault]() mutable { std::move(done)(fault); });
      return;
    }
    if (fault > 0) Shorten(static_cast<uint64_t>(fault), &request);
    real_->Submit(std::move(request));
  }

  int64_t Transfer(const IoRequest& request) override {
    const int64_t fault = fault_(transfers_++, request);
    if (fault < 0) return fault;
    IoRequest changed;
    changed.kind = request.kind;
    changed.fd = request.fd;
    changed.offset = request.offset;
    changed.pieces = request.pieces;
    if (fault > 0) Shorten(static_cast<uint64_t>(fault), &changed);
    return real_->Transfer(changed);
  }

  int transfers() const { return transfers_; }

 private:
  static void Shorten(uint64_t bytes, IoRequest* request) {
    std::vector<iovec> kept;
    for (iovec piece : request->pieces) {
      if (bytes == 0) break;
      if (piece.iov_len > bytes) piece.iov_len = bytes;
      bytes -= piece.iov_len;
      kept.push_back(piece);
    }
    request->pieces = std::move(kept);
  }

  const std::unique_ptr<IoEngine> real_;
  const Fault fault_;
  std::atomic<int> transfers_{0};
};

}  // namespace kvferry
