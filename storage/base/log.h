// Lines on stderr. One line is one write, so lines of several threads do not mix.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace kvferry {

enum class LogLevel : int { kDebug, kInfo, kWarning, kError, kNone };

// Lines below `level` are dropped. At first kInfo. Thread-safe.
void SetLogLevel(LogLevel level);
bool LogEnabled(LogLevel level);

// "I 2026-01-31T12:00:00.123Z message". Thread-safe; never fails.
void Log(LogLevel level, absl::string_view message);

// Lets one line through per interval; lets a caller that fails a thousand times a second be heard once. Thread-safe.
class LogGate {
 public:
  explicit LogGate(absl::Duration interval) : interval_ns_(absl::ToInt64Nanoseconds(interval)) {}
  bool Open();

 private:
  const int64_t interval_ns_;  // the largest value: once
  std::atomic<int64_t> next_ns_{0};
};

}  // namespace kvferry

// `message` is evaluated only if the line is written.
#define KVFERRY_LOG(level, message)                                                                               \
  do {                                                                                                            \
    if (::kvferry::LogEnabled(::kvferry::LogLevel::level)) ::kvferry::Log(::kvferry::LogLevel::level, (message)); \
  } while (false)
#define KVFERRY_LOG_EVERY(level, interval, message)                               \
  do {                                                                            \
    static ::kvferry::LogGate kvferry_gate(interval);                             \
    if (::kvferry::LogEnabled(::kvferry::LogLevel::level) && kvferry_gate.Open()) \
      ::kvferry::Log(::kvferry::LogLevel::level, (message));                      \
  } while (false)
#define KVFERRY_LOG_ONCE(level, message) KVFERRY_LOG_EVERY(level, ::absl::InfiniteDuration(), message)
