#include "proto/version.h"

namespace kvferry {

const char kVersion[] = KVFERRY_VERSION;

}  // namespace kvferry
