// All kernels of an engine, compiled as one piece. Heads of each further size have a piece of their own, with those
// kernels alone that depend on it.
#ifndef INGOT_ATTENTION_ALONE
#include "draw.cu"
#include "experts.cu"
#include "products.cu"
#include "ranks.cu"
#include "rows.cu"
#include "states.cu"
#include "streams.cu"
#endif

// Attention of one kind: heads of other sizes are no matter of these kernels.
#ifdef INGOT_LATENT
#include "latent.cu"
#else
#include "paged_attention.cu"
#include "rope_kv_write.cu"
#endif
