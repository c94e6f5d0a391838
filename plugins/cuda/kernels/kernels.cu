// All kernels of an engine, compiled as one piece.
#include "draw.cu"
#include "experts.cu"
#include "paged_attention.cu"
#include "products.cu"
#include "rope_kv_write.cu"
#include "rows.cu"
#include "states.cu"
