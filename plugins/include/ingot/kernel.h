// The contract between a Session and its kernels: plain structs in, nothing out but memory.
//
// Every thread of the pool calls the kernel with the same arguments and its own Team view; the kernel splits the work.
// The plan says where a barrier stands between two calls; a kernel that needs one inside calls team.barrier().
#pragma once

#include <cstddef>
#include <cstdint>
#include <typeinfo>

namespace ingot {

enum class Activation : int32_t { kNone, kSilu, kGelu, kGeluTanh, kRelu };

// One thread's view of the pool during a kernel.
class Team {
 public:
  int index = 0;  // 0 .. count-1
  int count = 1;
  std::byte* shared = nullptr;  // the step's scratch, as large as the kernel's scratch function asked, 64-byte aligned

  void barrier() const;                         // all threads of the team
  int64_t take() const;                         // 0, 1, 2, ...: each number to one thread; anew after every barrier
  int64_t taken() const;                        // how many of them were given out since the last barrier
  std::byte* scratch(size_t bytes) const;       // this thread's own, 64-byte aligned, valid during the call
  std::byte* rows_scratch(size_t bytes) const;  // another one, for rows that this thread prepares for itself

  // Contiguous share [begin, end) of n items for this thread.
  struct Range {
    int64_t begin, end;
  };
  Range share(int64_t n) const { return {n * index / count, n * (index + 1) / count}; }

  void* pool = nullptr;
};

// Rows of so many elements in all are prepared for a product, that is normed or rounded, by every thread for itself
// instead of by the team, which then need not wait: that takes a core some 10 us at most, about as long as 64 threads
// take to meet at a barrier. Two threads meet sooner, but one of them is mostly late.
constexpr int64_t kOwnElements = 16384;

// Panels [begin, end) of a weight, contiguous at data.
struct Piece {
  int64_t begin, end;
  const std::byte* data;
};

// How many ways of going about its work a product has, on tiles (AMX) more than elsewhere. Sessions and timing refuse
// numbers beyond them.
constexpr int32_t kMatmulTactics = 2, kTileTactics = 5, kGateUpTactics = 3, kDownTactics = 2;

// sum = x + residual; y = norm(sum) * weight (+ bias). sum may be null, or alias residual or x. Where y is the calling
// thread's `own`, it computes all rows, else its share of them.
struct NormArgs {
  const float* x;
  const float* weight;    // [hidden]
  const float* bias;      // [hidden] or null
  const float* residual;  // [rows, hidden] or null
  float* y;
  float* sum;  // [rows, hidden] or null
  int64_t rows, hidden;
  float eps;
  bool own = false;
};

// A norm that a product computes itself, each row when it prepares it.
struct RowNorm {
  void (*run)(const void* args, const Team& team);
  NormArgs args;  // without residual and sum

  // Row `row` of the norm → to.
  void row(int64_t row, float* to, const Team& team) const {
    NormArgs one = args;
    one.x += row * args.hidden;
    one.y = to;
    one.rows = 1;
    one.own = true;
    run(&one, team);
  }
};

// y[r, :] = epilogue(x[r, :] . W^T), see plugins/ops/matmul.py. Panel layouts: plugins/layouts.py.
struct MatmulArgs {
  const float* x;       // [rows, k]
  const Piece* pieces;  // packed weight, num_panels panels of 16 columns
  int64_t num_pieces;
  int64_t num_panels;     // gated: gate and up panels alternate
  const float* bias;      // [n] or null, in the weight's logical order (gated: gate part, then up part)
  const float* residual;  // [rows, out] or null; may alias y
  float* y;               // [rows, out]
  int64_t rows, n, k;     // n: logical weight rows; out = gated ? n / 2 : n
  Activation activation;
  bool gated;
  int64_t group;       // columns that share a multiplier of a w4 weight, 0 for all others
  int32_t tactic = 0;  // how the work is cut, of no consequence for y: 0 as shipped, 1 otherwise (matmul_parts.h)
  const RowNorm* norm = nullptr;  // makes x; null where x is there. Only for kernels with scratch, which prepare rows
};

// The experts that each row takes, see plugins/ops/moe_route.py.
struct MoeRouteArgs {
  const float* logits;  // [rows, experts]
  float* ids;           // [rows, slots], whole numbers
  float* weights;       // [rows, slots]
  int64_t rows, experts, slots;
  bool normalized;
};

// Products with the weights of experts, see plugins/ops/moe_gate_up.py and moe_down.py.
struct MoeMatmulArgs {
  const float* x;        // moe_gate_up: [rows, k]; moe_down: [rows, slots, k]
  const float* ids;      // [rows, slots], whole numbers
  const float* weights;  // moe_down: [rows, slots]
  const Piece* pieces;   // each holds its panels of every expert, one expert after the other
  int64_t num_panels;    // of one expert; moe_gate_up: gate and up panels alternate
  float* y;              // moe_gate_up: [rows, slots, n / 2]; moe_down: [rows, n]
  int64_t rows, slots, experts;
  int64_t n, k;           // of one expert's weight
  int64_t group;          // as in MatmulArgs
  Activation activation;  // moe_gate_up
  int32_t tactic = 0;     // how the work is shared, of no consequence for y: 0 as shipped, else see moe_matmul_parts.h
};

struct EmbeddingArgs {
  const int32_t* ids;          // [tokens]
  const int32_t* positions;    // [tokens]
  const void* table;           // [vocab, hidden]
  const void* position_table;  // [positions, hidden] or null, same type
  float* y;                    // [tokens, hidden]
  int64_t rows, hidden;        // rows: tokens
  float scale;                 // of the table's rows
};

// y = activation(a) * b (op activation; b may be null) or cap * tanh(a / cap) (op softcap)
struct ElementwiseArgs {
  const float* a;
  const float* b;
  float* y;
  int64_t rows, cols;
  Activation activation;
  float cap;
};

struct GatherRowsArgs {
  const float* x;        // [tokens, cols]
  const int32_t* taken;  // [rows], of x
  float* y;              // [rows, cols]
  int64_t rows, cols;
};

struct RopeTableArgs {
  const float* inv_freq;     // [half]
  const int32_t* positions;  // [tokens]
  float* y;                  // [tokens, 2 * half]: cosines, then sines
  int64_t rows, half;        // rows: tokens
  float scale;
};

// One layer's part of block 0, from which block b's lies b * block_bytes further on, and the batch that uses them.
// Entries of a table for blocks that no token of the step sees may be anything: no kernel reads them.
// How a head's keys and values lie in it: plugins/cpu/kv_head.h.
struct PagedKv {
  std::byte* keys;
  std::byte* values;
  int64_t block_bytes;
  int64_t kv_heads, head_dim, padded_dim, block_size;
  int64_t group;                // of the plan's cache groups: the one that the layer is in
  const int32_t* block_tables;  // of the group, [sequences, table_width]
  int64_t table_width;
  const int32_t* query_starts;  // [sequences + 1]
  const int32_t* past_lengths;  // [sequences]
  const int32_t* positions;     // [tokens]
  const int32_t* sequence_of;   // [tokens]
  int64_t sequences, tokens;
};

struct RopeKvWriteArgs {
  const float* qkv;      // [tokens, (heads + 2 kv_heads) * head_dim]
  const float* cos_sin;  // [tokens, 2 * half] or null
  float* q;              // [tokens, heads * head_dim] or null: attention turns the queries itself
  const float* q_norm;   // [q_run] or null: an RMS norm over each run of so many dims before the rotation
  const float* k_norm;   // [k_run] or null
  PagedKv kv;
  int64_t heads, half, q_run, k_run;
  float norm_eps;
  bool interleaved;
};

// Queries that attention norms and turns itself, by the kernel that else would, where a norm takes each head by itself.
struct RopeQueries {
  void (*run)(const void* args, const Team& team);
  RopeKvWriteArgs args;
};

struct PagedAttentionArgs {
  const float* q;  // [tokens, heads * head_dim]
  float* y;        // [tokens, heads * head_dim]
  PagedKv kv;
  int64_t heads, window;              // window: tokens that a token sees, itself included
  float scale, softcap;               // softcap: 0 without
  const RopeQueries* rope = nullptr;  // makes q; null where q is there
};

// One token from a row of logits, or the probability of one that is known; see plugins/ops/sample.py.
struct Draw {
  int32_t row = 0;
  float temperature = 0, top_p = 1, min_p = 0;
  int32_t top_k = 0;
  uint64_t seed = 0, counter = 0;
  const int32_t* bias_ids = nullptr;
  const float* bias = nullptr;  // -inf bans a token
  int64_t num_biases = 0;
  float repetition_penalty = 1, frequency_penalty = 0, presence_penalty = 0;
  const int32_t* history = nullptr;  // the prompt, then the generated tokens; none where nothing is penalised
  int64_t history_length = 0, num_prompt = 0;
  const float* processed = nullptr;  // [vocab], logits to draw from in place of the row; probabilities are the row's
  int32_t known = -1;                // a token whose probability is wanted: then nothing is drawn
  int32_t* rank = nullptr;           // null where nobody wants to know
  int32_t num_top = 0;
  int32_t* top_ids = nullptr;  // [num_top]
  float* top_log_probs = nullptr;
};

struct SampleArgs {
  const float* logits;  // [rows, vocab]
  int64_t vocab, num_draws;
  const Draw* draws;
  int32_t* ids;  // [num_draws]
  float* log_probs;
};

// The best tokens of rows of logits, see plugins/ops/screen.py.
struct ScreenArgs {
  const float* x;          // [rows, k]
  const float* centres;    // [rows, vocab]
  const float* scales;     // [vocab]
  const float* dither;     // [k]
  const std::byte* table;  // rows of w8, row_bytes each
  int64_t rows, vocab, k, row_bytes;
  int32_t* ids;         // [rows], -1 where a row is not decided
  int64_t* candidates;  // [rows]
};

// A session screens steps of at most so many rows: the more there are, the less the bytes of lm_head count beside its
// arithmetic, which a screen does not lessen.
constexpr int64_t kScreenRows = 4;
constexpr int64_t kScreenThreads = 256;  // a team's most

// ISA levels in the order of what they include; a kernel's last name part is one of their names.
enum class Isa : int32_t { kAvx2, kAvx512, kAmx };

using KernelFn = void (*)(const void* args, const Team& team);
using ScratchFn = size_t (*)(const void* args);  // bytes of Team::shared for args with the largest rows

void register_kernel(const char* name, const std::type_info& args, KernelFn run, ScratchFn scratch);

template <typename Args, void (*kRun)(const Args&, const Team&)>
struct KernelEntry {
  explicit KernelEntry(const char* name, ScratchFn scratch = nullptr) {
    register_kernel(
        name, typeid(Args), [](const void* args, const Team& team) { kRun(*static_cast<const Args*>(args), team); },
        scratch);
  }
};

}  // namespace ingot

// Last line of a kernel file: INGOT_KERNEL("matmul.bf16.avx2", MatmulArgs, matmul_bf16_avx2) or, with scratch,
// INGOT_KERNEL("matmul.bf16.amx", MatmulArgs, matmul_bf16_amx, matmul_bf16_amx_scratch)
#define INGOT_JOIN2(a, b) a##b
#define INGOT_JOIN(a, b) INGOT_JOIN2(a, b)
#define INGOT_KERNEL(name, Args, fn, ...)                                                                           \
  namespace {                                                                                                       \
  const ::ingot::KernelEntry<::ingot::Args, fn> INGOT_JOIN(registered_, __LINE__){name __VA_OPT__(, ) __VA_ARGS__}; \
  }
