// Whether tensors are keys and values that a layer can take. Every error is INVALID_ARGUMENT and names the argument,
// its value and what was expected.
#pragma once

#include "absl/status/status.h"
#include "client/cache/columns.h"

namespace kvferry {

// Dense tensors [batch, heads, tokens, dim], nothing empty, alike in batch, tokens and device. They are called
// key_states and value_states, as transformers does.
absl::Status CheckStates(const at::Tensor& k, const at::Tensor& v);

// Of the dtype, device, heads and dim of `first`, which the layer's first update brought. `layer` is its number in the
// model.
absl::Status CheckLike(const at::Tensor& k, const at::Tensor& v, const KeysValues& first, int layer);

// Of the batch that the cache holds.
absl::Status CheckBatch(const at::Tensor& k, int64_t batch);

}  // namespace kvferry
