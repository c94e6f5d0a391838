// How tiles of K and V come to shared memory in prompts.
//
// Where codes have rows of whole 16 bytes, a thread copies pieces of 16 codes to a place of its own, a tile ahead, and
// makes bf16 of them when the tile's turn comes. What a thread converts it has copied itself, so it waits for its own
// copies alone; the barrier that shows the bf16 numbers to the others is there anyway.
//
//   while tile t - 1 is computed       codes of t become bf16, then codes of t + 1 begin to come
#pragma once

#include "matrix_units.cuh"
#include "paged_attention.cuh"

// What a block has to do, in shared memory: what is rarely needed takes no registers.
struct PrefillWork {
  Item item;
  const int* table;  // of the sequence's blocks
  int kv_head;
  int begin, end;   // tokens that some row sees
  int plain[4][2];  // where each warp's tiles begin and end of which every row sees all, with scores of a scale alone
};

// Copies tiles of K and V of one KV head to shared memory. Tokens outside begin .. end - 1 become zeros: their blocks
// may not be there any more, or not yet.
template <class Shape, bool kAhead>
struct Pages {
  static constexpr int kTile = Shape::kTile, kStride = Shape::kStride;
  static constexpr int kChunks = kHeadDim / 8, kRowsAtOnce = kChunks ? Shape::kThreads / kChunks : 1;
  static constexpr int kPage = kBlockTokens < kTile ? kBlockTokens : kTile;
  static constexpr bool kWide = kHeadDim % 8 == 0 && (kTile % kBlockTokens == 0 || kBlockTokens % kTile == 0);

  const Attention& at;
  const PrefillWork& work;
  float* scales;  // of Shape::kScaleTiles tiles: of keys, then of values

  // The first tile, while the queries come; what is left of that when they are here; whatever is under way.
  template <bool kKeys, bool kValues>
  INGOT_DEVICE void begin(Kv* keys, Kv* values, int tile) const {
    load<kKeys, kValues>(keys, values, tile);
    copy_commit();
  }
  template <bool kKeys, bool kValues>
  INGOT_DEVICE void finish_first(Kv*, Kv*, int) const {}
  INGOT_DEVICE static void wait() { copy_wait<0>(); }

  INGOT_DEVICE float* of_scales(int tile) const {
    return scales + static_cast<int>(static_cast<unsigned>(tile) % Shape::kScaleTiles) * 2 * kTile;
  }

  template <bool kKeys, bool kValues>
  INGOT_DEVICE void load(Kv* keys, Kv* values, int tile) const {
    load_scales<kTile, kKeys, kValues>(of_scales(tile), at, work.item, tile, work.begin, work.end, work.kv_head);
    if constexpr (!kWide) return load_rows<kKeys, kValues>(keys, values, tile);
    const unsigned thread = thread_anew();
    const int begin = work.begin, end = work.end, chunk = thread % kChunks, row = thread / kChunks;
    if (kChunks * kRowsAtOnce < Shape::kThreads && row >= kRowsAtOnce) return;
#pragma unroll
    for (int i = 0; i < kTile / kPage; ++i) {
      const int position = tile * kTile + i * kPage, to = (i * kPage + row) * kStride + chunk * 8;
      const int64_t block =
          position < end && position + kPage > begin ? work.table[static_cast<unsigned>(position) / kBlockTokens] : 0;
      const int64_t slot = (block * at.kv_heads + work.kv_head) * kBlockTokens;
      const int64_t from = slot + static_cast<unsigned>(position) % kBlockTokens + row;
      const Stored *from_keys = at.key(from) + chunk * 8, *from_values = at.value(from) + chunk * 8;
      const auto copy = [&](int next, bool valid) {
        if constexpr (kKeys) copy_eight(keys + to + next * kStride, from_keys + next * kHeadDim, valid);
        if constexpr (kValues) copy_eight(values + to + next * kStride, from_values + next * kPaddedDim, valid);
      };
      if (position >= begin && position + kPage <= end) {
#pragma unroll
        for (int next = 0; next < kPage; next += kRowsAtOnce) {
          if (kPage % kRowsAtOnce == 0 || row + next < kPage) copy(next, true);
        }
      } else {
#pragma unroll 1
        for (int next = 0; row + next < kPage; next += kRowsAtOnce) {
          copy(next, position + row + next >= begin && position + row + next < end);
        }
      }
    }
  }

  // The same, element by element: blocks or rows are no whole 16 bytes.
  template <bool kKeys, bool kValues>
  INGOT_DEVICE void load_rows(Kv* keys, Kv* values, int tile) const {
    for (int i = threadIdx.x; i < kTile * kHeadDim; i += Shape::kThreads) {
      const int row = i / kHeadDim, dim = i % kHeadDim, position = tile * kTile + row;
      const bool valid = position >= work.begin && position < work.end;
      int64_t slot = 0;
      if (valid)
        slot = static_cast<int64_t>(work.table[static_cast<unsigned>(position) / kBlockTokens]) * at.kv_heads +
               work.kv_head;
      slot = slot * kBlockTokens + static_cast<unsigned>(position) % kBlockTokens;
      if constexpr (kKeys) keys[row * kStride + dim] = valid ? as_kv(at.key(slot)[dim]) : Kv{0};
      if constexpr (kValues) values[row * kStride + dim] = valid ? as_kv(at.value(slot)[dim]) : Kv{0};
    }
  }
};

#ifdef INGOT_KV_CODES
// The same of codes that come ahead.
template <class Shape>
struct Pages<Shape, true> {
  static constexpr int kTile = Shape::kTile, kPieces = kHeadDim / 16;        // of 16 codes in a row
  static constexpr int64_t kHead = kBlockTokens * (kHeadDim + kScaleBytes);  // bytes of a KV head in a block
  // Rows that the threads copy at once, a power of two; some threads may have nothing to do. Rows of a block that a
  // tile shares: likewise, so that either is a multiple of the other.
  static constexpr int kFit = Shape::kThreads / kPieces;
  static constexpr int kRows = kFit >= 64 ? 64 : kFit >= 32 ? 32 : kFit >= 16 ? 16 : 8;
  static constexpr int kShared = kBlockTokens & -kBlockTokens, kPage = kShared < kTile ? kShared : kTile;
  static constexpr int kSpan = kRows > kPage ? kRows : kPage;  // rows for which a thread looks into the table once
  static constexpr int kBusy = kRows * kPieces;                // threads
  static constexpr int kCodes = kTile * kHeadDim;              // of K, and of V

  const Attention& at;
  const PrefillWork& work;
  float* scales;  // of Shape::kScaleTiles tiles

  // A thread's row and piece, the first of those that it copies. Of eight neighbours, four have a row's, so that their
  // numbers, twice as wide, meet each bank once.
  struct Place {
    int row, piece;

    INGOT_DEVICE explicit Place(unsigned thread) {
      if constexpr (kPieces % 4 == 0) {
        constexpr unsigned kGroups = kPieces / 4;
        row = thread / 8 / kGroups * 2 + thread / 4 % 2, piece = thread / 8 % kGroups * 4 + thread % 4;
      } else {
        row = thread / kPieces, piece = thread % kPieces;
      }
    }
  };

  // Of K, then of V: behind the scales.
  INGOT_DEVICE unsigned char* codes() const {
    return reinterpret_cast<unsigned char*>(scales + Shape::kScaleTiles * 2 * kTile);
  }

  // Where the KV head of a token's block begins in the pool, in bytes; `there`: the block is there.
  INGOT_DEVICE int64_t head(int position, bool there) const {
    const int64_t block = there ? work.table[static_cast<unsigned>(position) / kBlockTokens] : 0;
    return (block * at.kv_heads + work.kv_head) * kHead;
  }
  INGOT_DEVICE bool is_there(int position) const { return position >= work.begin && position < work.end; }

  // Begins to copy a tile's codes and their scales, if some row sees the tile. Zeros for tokens that no row sees: their
  // blocks may not be there any more, or not yet.
  template <bool kKeys, bool kValues>
  INGOT_DEVICE void fetch(int tile) const {
    const unsigned thread = thread_anew();
    const int first = tile * kTile;
    if (first >= work.end) return;
    if (thread < kBusy) {
      const Place place(thread);
      const bool all = first >= work.begin && first + kTile <= work.end;
      unsigned char* to = codes() + thread * 16;
#pragma unroll
      for (int i = 0; i < kTile; i += kSpan) {
        const int position = first + i + place.row, page = kSpan > kPage ? position : first + i;
        const bool some = all || (page < work.end && page + kPage > work.begin);
        const unsigned token = static_cast<unsigned>(page) % kBlockTokens + (kSpan > kPage ? 0 : place.row);
        const int64_t from = head(page, some) + (token * kHeadDim + place.piece * 16);
#pragma unroll
        for (int next = 0; next < kSpan; next += kRows) {
          const bool there = all || is_there(position + next);
          if constexpr (kKeys) copy_async(to + (i + next) * kHeadDim, at.keys + from + next * kHeadDim, there);
          if constexpr (kValues)
            copy_async(to + kCodes + (i + next) * kHeadDim, at.values + from + next * kHeadDim, there);
        }
      }
    }
    if (!kKeys || thread >= 2 * kTile) return;  // all scales come with the keys
    const int position = first + static_cast<int>(thread % kTile);
    const bool there = is_there(position);
    const unsigned token = static_cast<unsigned>(position) % kBlockTokens;
    const int64_t from = head(position, there) + (kBlockTokens * kHeadDim + token * kScaleBytes);
    copy_word_async(of_scales(tile) + thread, (thread < kTile ? at.keys : at.values) + from, there);
  }

  // The scales of a tile's keys, then of its values. Those of two more tiles may be under way.
  INGOT_DEVICE float* of_scales(int tile) const {
    return scales + static_cast<int>(static_cast<unsigned>(tile) % Shape::kScaleTiles) * 2 * kTile;
  }

  template <bool kKeys, bool kValues>
  INGOT_DEVICE void begin(Kv*, Kv*, int tile) const {
    fetch<true, kValues>(tile);
    copy_commit();
    if constexpr (kValues) return;
    fetch<false, true>(tile);
    copy_commit();
  }
  template <bool kKeys, bool kValues>
  INGOT_DEVICE void finish_first(Kv* keys, Kv* values, int tile) const {
    load<kKeys, kValues>(keys, values, tile);
    copy_commit();
  }
  INGOT_DEVICE static void wait() {}  // `load` does

  // Makes bf16 of the codes of the tile, and begins to copy those of the next one to their place.
  template <bool kKeys, bool kValues>
  INGOT_DEVICE void load(Kv* keys, Kv* values, int tile) const {
    copy_wait<kKeys && kValues ? 0 : 1>();  // K and V have a group of copies each, or one together
    if constexpr (kKeys) convert(keys, codes());
    if constexpr (kValues) convert(values, codes() + kCodes);
    fetch<kKeys, kValues>(tile + 1);
  }

  INGOT_DEVICE static void convert(Kv* to, const unsigned char* from) {
    const unsigned thread = thread_anew();
    if (thread >= kBusy) return;
    const Place place(thread);
    to += place.row * Shape::kStride + place.piece * 16, from += thread * 16;
#pragma unroll
    for (int row = 0; row < kTile; row += kRows) {
      const auto own = *reinterpret_cast<const SixteenCodes*>(from + row * kHeadDim);
      auto* numbers = reinterpret_cast<EightNumbers*>(to + row * Shape::kStride);
      numbers[0] = eight_numbers(own.words[0], own.words[1]), numbers[1] = eight_numbers(own.words[2], own.words[3]);
    }
  }
};
#endif
