// Times that Python gives as a float.
#pragma once

#include <cmath>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace kvferry {

// INVALID_ARGUMENT for NaN, which a duration cannot be.
inline absl::StatusOr<absl::Duration> Seconds(double value, absl::string_view name) {
  if (!std::isnan(value)) return absl::Seconds(value);
  return absl::InvalidArgumentError(absl::StrCat(name, " is nan, expected a number of seconds"));
}

}  // namespace kvferry
