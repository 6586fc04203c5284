// Namespace specs for tests.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "storage/base/namespace_spec.h"

namespace kvferry {

// `layers` layers of K and V, [heads, tokens, dim] elements of four bytes each.
inline NamespaceSpec SmallSpec(int layers = 2, uint32_t heads = 2, uint32_t dim = 8, uint32_t tokens = 4,
                               std::string model = "test/model") {
  NamespaceSpec spec;
  spec.model = std::move(model);
  spec.dtype = "float32";
  spec.dtype_bytes = 4;
  spec.block_tokens = tokens;
  spec.groups.resize(1);
  spec.groups[0].layers.assign(layers, LayerSpec{{{heads, dim}, {heads, dim}}});
  return spec;
}

// B78: five layers of 8x64, one of 4x128, one latent without V, and a state layer in a group of its own.
inline NamespaceSpec MixedSpec() {
  NamespaceSpec spec = SmallSpec(5, 8, 64, 16);
  spec.groups[0].layers.push_back(LayerSpec{{{4, 128}, {4, 128}}});
  spec.groups[0].layers.push_back(LayerSpec{{{1, 576}}});
  GroupSpec state;
  state.retention = Retention::kState;
  state.layers.push_back(LayerSpec{{{1, 16}, {2, 3}}});
  spec.groups.push_back(state);
  return spec;
}

}  // namespace kvferry
