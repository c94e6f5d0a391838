// What kernels of latent_attention take.
#pragma once

#include "attention/paged_attention_args.h"

namespace ingot {

// As those of paged_attention, of a latent cache: q [tokens, heads * head_dim], y [tokens, heads * value_dim], values
// are the first numbers of keys, neither window nor cap. A type of its own: no variant makes its queries.
struct LatentAttentionArgs : PagedAttentionArgs {};

}  // namespace ingot
