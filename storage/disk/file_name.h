// Names of files that are numbered: "segment-0000002a".
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace kvferry {

inline constexpr absl::string_view kSegmentPrefix = "segment-";

// `prefix` and eight hex digits.
inline std::string NumberedName(absl::string_view prefix, uint32_t number) {
  return absl::StrCat(prefix, absl::Hex(number, absl::kZeroPad8));
}

// nullopt unless `name` is such a name; numbers begin with 1.
inline std::optional<uint32_t> NumberInName(absl::string_view prefix, absl::string_view name) {
  uint32_t number = 0;
  if (!absl::ConsumePrefix(&name, prefix) || name.size() != 8) return std::nullopt;
  if (!absl::SimpleHexAtoi(name, &number) || number == 0) return std::nullopt;
  return number;
}

}  // namespace kvferry
