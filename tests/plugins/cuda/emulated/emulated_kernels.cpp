// One file of kernels of an engine for the emulated device: its source, and a door to each of them by name. Macros:
// EMULATED_UNIT, the file, and EMULATED_ with its name.
#include "before_kernels.h"
#include EMULATED_UNIT

template <>
float half_to_float<BF16>(uint32_t word, unsigned high) {
  return to_float(BF16{static_cast<uint16_t>(high ? word >> 16 : word)});
}
template <>
float half_to_float<F16>(uint32_t word, unsigned high) {
  return to_float(F16{static_cast<uint16_t>(high ? word >> 16 : word)});
}

namespace {

// Takes each argument from where the launch says it lies, with the type that the kernel declares.
template <class... Types, size_t... kIndex>
__attribute__((no_sanitize("thread"))) void call(void (*kernel)(Types...), void** arguments,
                                                 std::index_sequence<kIndex...>) {
  kernel(*static_cast<Types*>(arguments[kIndex])...);
}
template <auto kKernel>
struct Door;
template <class... Types, void (*kKernel)(Types...)>
struct Door<kKernel> {
  static void open(void** arguments) { call(kKernel, arguments, std::index_sequence_for<Types...>()); }
  static constexpr int kCount = sizeof...(Types);
  static constexpr size_t kSizes[] = {sizeof(Types)...};
};

struct Entry {
  const char* name;
  void (*open)(void**);
  int arguments;
  const size_t* sizes;
};
#define ENTRY(name) {#name, &Door<&name>::open, Door<&name>::kCount, Door<&name>::kSizes}
#define PRODUCTS(format, rows)                                                                 \
  ENTRY(product_##format##_8), ENTRY(product_##format##_8_half), ENTRY(product_##format##_16), \
      ENTRY(product_##format##_16_half), ENTRY(product_##format##_64), ENTRY(product_##format##_128),
#define KEPT_PRODUCTS(format, rows) \
  ENTRY(product_##format##_wide_64), ENTRY(product_##format##_wide_128), ENTRY(product_##format##_wide_256),
#define WIDE_EXPERTS(format, rows) ENTRY(experts_##format##_wide_64), ENTRY(experts_##format##_wide_128),
#define EXPERTS(format, rows) ENTRY(experts_##format##_8), ENTRY(experts_##format##_64), ENTRY(experts_##format##_128),
const Entry kEntries[] = {
#ifdef EMULATED_draw
    ENTRY(draw_tokens),
#endif
#ifdef EMULATED_rows
    ENTRY(embed),
    ENTRY(rope_table),
    ENTRY(residual_norm),
    ENTRY(epilogue),
    ENTRY(gather_rows),
    ENTRY(soft_cap),
    ENTRY(scale_rows),
    ENTRY(add_gated),
    ENTRY(gate_rows),
#ifdef INGOT_CODES
    ENTRY(embed_codes),
#endif
#ifdef INGOT_FP8
    ENTRY(round_to_fp8),
#endif
#endif
#ifdef EMULATED_streams
    ENTRY(take_columns),
    ENTRY(gather_columns),
    ENTRY(join_columns),
    ENTRY(mix_streams),
    ENTRY(add_to_streams),
    ENTRY(match_magnitude),
    ENTRY(cut_below),
#endif
#ifdef EMULATED_ranks
    ENTRY(add_ranks),
    ENTRY(join_ranks),
#endif
#ifdef EMULATED_products
#ifdef INGOT_WEIGHT_IS_F32
    ENTRY(product_f32),
#else
    ENTRY(product_8),
    ENTRY(product_8_half),
    ENTRY(product_16),
    ENTRY(product_16_half),
    ENTRY(product_64),
    ENTRY(product_128),
#endif
#ifdef INGOT_CODES
    INGOT_FOR_CODES(PRODUCTS)
#endif
#if defined(INGOT_WIDE) || defined(INGOT_FP8)
        ENTRY(product_sum),
#endif
#if defined(INGOT_FP8) && !defined(INGOT_WIDE)
    ENTRY(product_f8f8_16),
    ENTRY(product_f8f8_64),
    ENTRY(product_f8f8_128),
#endif
#ifdef INGOT_WIDE
    ENTRY(product_wide_64),
    ENTRY(product_wide_128),
#ifdef INGOT_CODES_W8
    ENTRY(product_w8_wide_64),
    ENTRY(product_w8_wide_128),
    ENTRY(product_w8_wide_256),
#endif
#ifdef INGOT_CODES_W4
    ENTRY(product_w4_wide_64),
    ENTRY(product_w4_wide_128),
    ENTRY(product_w4_wide_256),
#endif
#ifdef INGOT_FP8
    ENTRY(product_f8f8_wide_16),
    ENTRY(product_f8f8_wide_64),
    ENTRY(product_f8f8_wide_128),
#endif
    INGOT_FOR_KEPT_CODES(KEPT_PRODUCTS)
#endif
#ifdef INGOT_EXPERTS
#ifdef INGOT_WEIGHT_IS_F32
        ENTRY(experts_f32),
#else
        ENTRY(experts_8),
    ENTRY(experts_64),
    ENTRY(experts_128),
#endif
    INGOT_FOR_CODES(EXPERTS)
#ifdef INGOT_WIDE
        ENTRY(experts_wide_64),
    ENTRY(experts_wide_128),
    INGOT_FOR_CODES(WIDE_EXPERTS)
#ifdef INGOT_FP8
        ENTRY(experts_f8f8_wide_16),
    ENTRY(experts_f8f8_wide_64),
    ENTRY(experts_f8f8_wide_128),
#endif
#elif defined(INGOT_FP8)
        ENTRY(experts_f8f8_16),
    ENTRY(experts_f8f8_64),
    ENTRY(experts_f8f8_128),
#endif
#endif
#ifdef INGOT_LATENT
#ifdef INGOT_WEIGHT_IS_F32
    ENTRY(heads_f32),
#else
    ENTRY(heads_8),
    ENTRY(heads_64),
    ENTRY(heads_128),
#endif
#endif
#endif
#if defined(EMULATED_experts) && defined(INGOT_EXPERTS)
    ENTRY(moe_route),
    ENTRY(group_by_expert),
    ENTRY(sum_experts),
#endif
#ifdef EMULATED_states
    ENTRY(gated_norm),
#ifdef INGOT_STATES
    ENTRY(causal_conv),
    ENTRY(leave_inputs),
    ENTRY(linear_attention_128),
    ENTRY(linear_attention_256),
    ENTRY(delta_prompts_128),
    ENTRY(delta_prompts_256),
    ENTRY(kda_prompts_128),
    ENTRY(kda_prompts_256),
    ENTRY(mamba_prompts_128),
    ENTRY(mamba_prompts_256),
#endif
#endif
#ifdef EMULATED_latent
    ENTRY(write_latent),
#ifdef INGOT_KV_IS_F32
    ENTRY(latent_rows),
#else
    ENTRY(latent_attention),
    ENTRY(latent_combine),
#endif
#endif
#ifdef EMULATED_rope_kv_write
    ENTRY(rotate_and_store),
    ENTRY(rotate_and_make_values),
#endif
#ifdef EMULATED_paged_attention
#ifdef INGOT_KV_IS_F32
    ENTRY(attention_rows),
#else
    ENTRY(attention_decode),
    ENTRY(attention_combine),
#ifdef INGOT_WARPGROUPS
    ENTRY(attention_prompt),
    ENTRY(attention_prompt_bent),
#else
    ENTRY(attention_prefill),
#endif
#endif
#endif
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

// The kernel called `name`, or null. count, sizes: how many arguments it takes, and the bytes of each.
extern "C" void (*emulated_find(const char* name, int* count, const size_t** sizes))(void**) {
  for (const Entry* entry = kEntries; entry->name; ++entry) {
    if (std::strcmp(entry->name, name) == 0) {
      *count = entry->arguments, *sizes = entry->sizes;
      return entry->open;
    }
  }
  return nullptr;
}
