#include "storage/base/log.h"

#include <unistd.h>

#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace kvferry {
namespace {

std::atomic<int> min_level{static_cast<int>(LogLevel::kInfo)};

}  // namespace

void SetLogLevel(LogLevel level) { min_level.store(static_cast<int>(level), std::memory_order_relaxed); }

bool LogEnabled(LogLevel level) { return static_cast<int>(level) >= min_level.load(std::memory_order_relaxed); }

void Log(LogLevel level, absl::string_view message) {
  if (!LogEnabled(level)) return;
  const char letter = "DIWE"[static_cast<int>(level) & 3];
  const std::string line =
      absl::StrCat(absl::string_view(&letter, 1), " ",
                   absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone()), " ", message, "\n");
  // Nobody is there to be told if stderr is closed.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

bool LogGate::Open() {
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  const int64_t now = absl::GetCurrentTimeNanos();
  int64_t next = next_ns_.load(std::memory_order_relaxed);
  const int64_t after = interval_ns_ >= kNever - now ? kNever : now + interval_ns_;
  return next <= now && next_ns_.compare_exchange_strong(next, after, std::memory_order_relaxed);
}

}  // namespace kvferry
