// Tells an image that is whole from one that is torn.
#pragma once

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "storage/base/chunk_image.h"

namespace kvferry {

// What is to be known of a chunk's namespace to tell whether its image is whole. nullptr: nothing.
using LayoutOf = absl::FunctionRef<const ChunkLayout*(const ChunkKey& key)>;

// The header of `image`, all of whose slots have been checked. DATA_LOSS unless the image is whole.
absl::StatusOr<ChunkHeader> CheckImage(ByteView image, LayoutOf layout_of);

}  // namespace kvferry
