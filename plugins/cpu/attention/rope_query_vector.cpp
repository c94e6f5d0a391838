// Queries of layers that read another layer's keys and values: rotated as in rope_kv_write, nothing written.
#include INGOT_LEVEL_HEADER
#include "attention/rope_kv_write_kernel.h"
#include "attention/rope_query_args.h"

namespace ingot {
namespace {

template <typename S>
void rope_query(const RopeQueryArgs& args, const Team& team) {
  const Team::Range mine = team.share(args.rows);
  const int64_t width = args.heads * args.head_dim;
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const float* cos_sin = args.cos_sin + (args.cos_sin ? t * 2 * args.half : 0);
    rotate_queries<S>(args, args.head_dim, args.x + t * width, cos_sin, args.y + t * width);
  }
}

}  // namespace
}  // namespace ingot

INGOT_KERNEL("rope_query.f32." INGOT_LEVEL, RopeQueryArgs, ingot::rope_query<ingot::Simd>)
