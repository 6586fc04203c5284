// SHA-256, cut to 128 bits: what namespace ids and prefix keys are made of.
#pragma once

#include "absl/strings/string_view.h"
#include "storage/base/key.h"

namespace kvferry {

// First half of SHA-256(bytes), as Id128 reads it: two big-endian words.
Id128 Sha256Id(absl::string_view bytes);

}  // namespace kvferry
