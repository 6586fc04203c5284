// Every error of a transport names the store, the call and what to do next.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvferry {

// `status` with "store URL: CALL: " before its message and, where somebody can do something about it, advice behind
// it. An OK status stays as it is, and one that names the store already is not wrapped again.
absl::Status StoreError(const std::string& url, absl::string_view call, const absl::Status& status);

}  // namespace kvferry
