#include "client/store_error.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace kvferry {
namespace {

absl::string_view Advice(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kUnavailable:
      return "; check that kvferryd runs there; the connection is made again by itself, so recompute or try later";
    case absl::StatusCode::kDeadlineExceeded:
      return "; the store is slow or stopped: recompute, or allow more time";
    case absl::StatusCode::kResourceExhausted:
      return "; release chunks, or give the store more memory";
    case absl::StatusCode::kDataLoss:
      return "; the bytes were not used: recompute these tokens";
    default:
      return "";
  }
}

}  // namespace

absl::Status StoreError(const std::string& url, absl::string_view call, const absl::Status& status) {
  if (status.ok()) return status;
  const std::string prefix = absl::StrCat("store ", url, ": ");
  if (absl::StartsWith(status.message(), prefix)) return status;
  return absl::Status(status.code(), absl::StrCat(prefix, call, ": ", status.message(), Advice(status.code())));
}

}  // namespace kvferry
