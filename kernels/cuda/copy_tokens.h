// CopyTokens on a CUDA device. Both sides are device or mapped host pointers.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/copy_tokens.h"

namespace kvferry {

// Queues the copy on `stream` and returns; errors are those of the launch.
cudaError_t CopyTokensCuda(const ConstTokenRows& from, const TokenRows& to, const TokenExtent& extent,
                           cudaStream_t stream);

}  // namespace kvferry
