#include "storage/write_policy.h"

#include "absl/strings/str_cat.h"

namespace kvferry {

absl::StatusOr<WritePolicy> ParseWritePolicy(absl::string_view name) {
  for (const WritePolicy policy : kWritePolicies) {
    if (name == WritePolicyName(policy)) return policy;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("write policy is \"", name, "\", expected write_back, write_through or on_second_hit"));
}

absl::string_view WritePolicyName(WritePolicy policy) {
  switch (policy) {
    case WritePolicy::kWriteBack:
      return "write_back";
    case WritePolicy::kWriteThrough:
      return "write_through";
    case WritePolicy::kOnSecondHit:
      break;
  }
  return "on_second_hit";
}

}  // namespace kvferry
