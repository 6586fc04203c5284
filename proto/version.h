// Version of this build, as `--version` and Stats tell it.
#pragma once

namespace kvferry {

extern const char kVersion[];

}  // namespace kvferry
