// When a chunk is written to disk.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvferry {

enum class WritePolicy : uint8_t {
  kWriteBack,     // when memory gives it up
  kWriteThrough,  // as soon as it is published
  kOnSecondHit,   // when memory gives it up, if it was asked for or came a second time, as far as names are
                  // remembered (as many as the store holds chunks); else it is lost
};
inline constexpr WritePolicy kWritePolicies[] = {WritePolicy::kWriteBack, WritePolicy::kWriteThrough,
                                                 WritePolicy::kOnSecondHit};
// "write_back", "write_through" or "on_second_hit"; INVALID_ARGUMENT names another one.
absl::StatusOr<WritePolicy> ParseWritePolicy(absl::string_view name);
absl::string_view WritePolicyName(WritePolicy policy);

}  // namespace kvferry
