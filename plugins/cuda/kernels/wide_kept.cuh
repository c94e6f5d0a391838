// Products of more than a few rows on sm_90a with a weight that keeps the codes of a quantised checkpoint.
//
// The warpgroup that copies also makes the numbers of a step, which the two others multiply as they multiply floats:
//
//   global memory ─ cp.async ▶ codes ─ unpack ▶ numbers ─ wgmma ▶ sums
//                   cp.async ▶ x ──────────────────┘
//
// Codes come kCodeStages steps ahead. While the matrix units multiply a step, the next one's numbers are made. A thread
// makes 64 numbers of a step, so a block makes each number once for all of its rows of x.
#pragma once

// What a block keeps of a step of eight panels of codes.
template <class Row>
struct KeptStep {
  static constexpr int kPanel = Row::kBits * 128;   // bytes of a panel's codes
  static constexpr int kPanelLine = kPanel + 64;    // from a panel to the next: the halves of a warp meet other banks
  static constexpr int kGroups = Row::kStepGroups;  // bytes of what a panel has of groups, at most
  static constexpr int kBytes = kWidePanels * (kPanelLine + kGroups);

  INGOT_DEVICE static const unsigned char* panel(const unsigned char* codes, int number) {
    return codes + number * kPanelLine;
  }
  INGOT_DEVICE static const unsigned char* groups(const unsigned char* codes, int number) {
    return codes + kWidePanels * kPanelLine + number * kGroups;
  }
};

// Shared memory: kStages steps of x, then the tiles of numbers, then the codes of kCodeStages steps.
template <class Row, int kTokens, int kStages, int kCodeStages>
struct KeptTile {
  static constexpr int kAhead = kStages - 2;  // steps of x under way
  static constexpr int kInputs = kTokens * kWideLine, kNumbers = kWideRows * kWideLine;
  static constexpr int kNumberStages = 3;  // being made, multiplied, and perhaps still read by the matrix units
  static_assert(kCodeStages > kAhead, "the codes of the next step are there when x of this one is");

  INGOT_DEVICE static unsigned char* inputs(unsigned char* tiles, int step) { return tiles + step % kStages * kInputs; }
  INGOT_DEVICE static unsigned char* numbers(unsigned char* tiles, int step) {
    return tiles + kStages * kInputs + step % kNumberStages * kNumbers;
  }
  INGOT_DEVICE static unsigned char* codes(unsigned char* tiles, int step) {
    constexpr int kFirst = kStages * kInputs + kNumberStages * kNumbers;
    return tiles + kFirst + step % kCodeStages * KeptStep<Row>::kBytes;
  }
};

// Where a row of a panel lies in a tile of numbers.
INGOT_DEVICE int kept_line(int panel, int column) {
  return panel / 2 * kPairRows + column / 8 * 16 + panel % 2 * 8 + column % 8;
}

struct alignas(16) EightAtOnce {
  Eight of;
};
INGOT_DEVICE void store_numbers(unsigned char* to, const Eight& numbers) {
  *reinterpret_cast<EightAtOnce*>(to) = EightAtOnce{numbers};
}

// Where 16 bytes of a panel's codes go.
template <class Row>
INGOT_DEVICE int kept_place(int piece) {
  return piece * 16;
}
// Of FP8 these are one k of 16 rows: threads that read the same k of several eights meet other banks.
template <>
INGOT_DEVICE int kept_place<RowF8<true>>(int piece) {
  return wide_place(piece / 8, piece % 8);
}

// The codes and groups of a thread's row in a step: 64 numbers.
template <class Codes, bool kShifts>
struct StepOfRow {
  using Row = GroupRow<true, Codes, kShifts>;
  using Raw = typename Row::Raw;

  const unsigned char* lines;
  const uint16_t* groups;
  int column, eights, line;

  INGOT_DEVICE StepOfRow(const Row& row, const unsigned char* codes) : column(row.column), eights(row.eights) {
    const int panel = threadIdx.x % kGroup / 16;
    line = kept_line(panel, column);
    lines = KeptStep<Row>::panel(codes, panel);
    groups = reinterpret_cast<const uint16_t*>(KeptStep<Row>::groups(codes, panel)) + column;
  }
  INGOT_DEVICE uint32_t scale(int eight) const {
    const uint16_t* group = groups + (eight / 2 * 2 >> eights) * 16 * Row::kNumbers;  // two eights share it
    return kShifts ? group[0] | static_cast<uint32_t>(group[16]) << 16 : group[0];
  }
  INGOT_DEVICE void load(uint32_t (&stored)[Codes::kStored], int eight) const {
    Codes::load(stored, lines, eight, column);
  }
  INGOT_DEVICE bool begins_group(int eight) const { return (eight & ((1 << eights) - 1)) == 0; }
  INGOT_DEVICE void store(unsigned char* numbers, int eight, const Eight& found) const {
    store_numbers(numbers + wide_place(line, eight), found);
  }
};

// kAtOnce times eight numbers side by side.
template <int kAtOnce, class Codes, bool kShifts>
INGOT_DEVICE void unpack_row(const GroupRow<true, Codes, kShifts>& row, unsigned char* numbers,
                             const unsigned char* codes) {
  const StepOfRow<Codes, kShifts> step(row, codes);
#pragma unroll kAtOnce
  for (int eight = 0; eight < 8; ++eight) {
    typename StepOfRow<Codes, kShifts>::Raw raw;
    step.load(raw.words, eight);
    raw.scale = step.scale(eight);
    step.store(numbers, eight, row.value(raw));
  }
}

// The lanes of a warp make numbers in the same way, because barriers come behind.
INGOT_DEVICE bool all_of_warp(bool each) { return !__any_sync(kAllLanes, !each); }

template <class Way, bool kShifts>
INGOT_DEVICE void unpack_by(const GroupRow<true, TableCodes, kShifts>& row, unsigned char* numbers,
                            const unsigned char* codes) {
  const StepOfRow<TableCodes, kShifts> step(row, codes);
  const float first = row.codes.first();
  uint32_t table[4];
  row.codes.less_sixty_four(table);
  Way way;
#pragma unroll
  for (int eight = 0; eight < 8; ++eight) {
    if (eight % 2 == 0 && step.begins_group(eight)) {
      const uint32_t scale = step.scale(eight);
      const float shift = kShifts ? f16_to_float(static_cast<uint16_t>(scale >> 16)) : 0.f;
      way = Way::of(f16_to_float(static_cast<uint16_t>(scale)), shift, first);
    }
    uint32_t words[1];
    step.load(words, eight);
    step.store(numbers, eight, way.numbers(words[0], table));
  }
}

// By a shorter way, if all rows of the warp have the same.
template <bool kShifts>
INGOT_DEVICE bool unpack_short(const GroupRow<true, TableCodes, kShifts>& row, unsigned char* numbers,
                               const unsigned char* codes) {
  const PanelWay way = row.way();
  if (all_of_warp(way == PanelWay::kShort)) {
    unpack_by<ShortWay>(row, numbers, codes);
  } else if (kShifts && all_of_warp(way == PanelWay::kOffset)) {
    unpack_by<OffsetWay>(row, numbers, codes);
  } else if (!kShifts && all_of_warp(way == PanelWay::kTable)) {
    unpack_by<TableWay>(row, numbers, codes);
  } else {
    return false;
  }
  return true;
}

// Of two and three bits.
template <int kBits>
INGOT_DEVICE void unpack_step(const GroupRow<true, FewCodes<kBits>, false>& row, unsigned char* numbers,
                              const unsigned char* codes) {
  const StepOfRow<FewCodes<kBits>, false> step(row, codes);
  float number[4 * FewCodes<kBits>::kTable];
  row.codes.numbers(number);
  FewWay<kBits> way;
  uint32_t stored[FewCodes<kBits>::kStored];
#pragma unroll
  for (int eight = 0; eight < 8; ++eight) {
    FewCodes<kBits>::load_next(stored, step.lines, eight, step.column);
    if (eight % 2 == 0 && step.begins_group(eight)) {
      way = FewWay<kBits>::of(number, f16_to_float(static_cast<uint16_t>(step.scale(eight))));
    }
    uint32_t words[1];
    FewCodes<kBits>::unpack(words, stored, eight);
    step.store(numbers, eight, way.numbers(words[0]));
  }
}

// What kind of numbers the rows of a warp have is asked once for all of them.
template <class Codes, bool kShifts>
INGOT_DEVICE void unpack_step(const GroupRow<true, Codes, kShifts>& row, unsigned char* numbers,
                              const unsigned char* codes) {
  if constexpr (Codes::kBits == 4) {
    if (unpack_short(row, numbers, codes)) return;
  }
  const bool offsets = kShifts && all_of_warp(row.offsets);
  if (!all_of_warp(!row.codes.more) || (kShifts && !offsets && !all_of_warp(!row.offsets))) {
    unpack_row<1>(row, numbers, codes);
    return;
  }
  GroupRow<true, Codes, kShifts> usual = row;
  usual.codes = row.codes.of_eight_bits(), usual.offsets = false;
  if (offsets) {
    usual.offsets = true;
    unpack_row<8>(usual, numbers, codes);
  } else {
    unpack_row<8>(usual, numbers, codes);
  }
}

// Of codes whose scales are whole numbers of units.
template <int kBits, bool kOffsets>
INGOT_DEVICE void unpack_step(const UnitRow<true, kBits, kOffsets>& row, unsigned char* numbers,
                              const unsigned char* codes) {
  using Row = UnitRow<true, kBits, kOffsets>;
  using Codes = typename Row::Codes;
  const int panel = threadIdx.x % kGroup / 16, line = kept_line(panel, row.column);
  const unsigned char* lines = KeptStep<Row>::panel(codes, panel);
  const unsigned char* units = KeptStep<Row>::groups(codes, panel);
  const unsigned char* scales = units + Row::kUnits;
  const unsigned char* offsets = scales + (8 >> row.eights) * 16;
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(units) + row.column;
  const auto unit = Unit<false>::of(halves[0]), offset_unit = Unit<false>::of(halves[kOffsets ? 16 : 0]);
  Codes way;
  uint32_t stored[Codes::kStored];
#pragma unroll
  for (int eight = 0; eight < 8; ++eight) {
    Codes::load_next(stored, lines, eight, row.column);
    if (eight % 2 == 0 && (eight % 4 == 0 || row.eights == 1)) {
      const int group = eight >> row.eights;
      const float scale = unit.times(scales[group * 16 + row.column] ^ kSigns, 0);
      float offset = 0.f;
      if constexpr (kOffsets) {
        offset = offset_unit.times(offsets[(group / 2 * 16 + row.column) * 2 + group % 2] ^ kSigns, 0);
      }
      way = Codes::of(scale, offset);
    }
    uint32_t words[Codes::kWords];
    Codes::unpack(words, stored, eight);
    store_numbers(numbers + wide_place(line, eight), way.numbers(words));
  }
}

// Numbers of FP8 (E4M3), a byte each, of which none is NaN: two in a word, the first in its low half. Exact.
#ifdef __CUDACC__
INGOT_DEVICE void fp8_to_f16(uint32_t& first, uint32_t& second, uint32_t four) {
  asm("{\n.reg .b16 %%low;\n.reg .b16 %%high;\nmov.b32 {%%low, %%high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, %%low;\ncvt.rn.f16x2.e4m3x2 %1, %%high;\n\t}\n"
      : "=r"(first), "=r"(second)
      : "r"(four));
}
#else
inline void fp8_to_f16(uint32_t& first, uint32_t& second, uint32_t four) {
  uint32_t half[4];
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = four >> 8 * i & 255, exponent = byte >> 3 & 15;
    const float fraction = static_cast<float>(byte & 7) / 8 + (exponent ? 1.f : 0.f);
    const float number = fraction * exp2f(static_cast<float>(exponent ? exponent : 1) - 7);
    half[i] = float_to_f16(byte & 128 ? -number : number);
  }
  first = half[0] | half[1] << 16, second = half[2] | half[3] << 16;
}
#endif

// A thread makes the numbers of four rows, eight k of each at a time: a word has one k of all four.
INGOT_DEVICE void unpack_step(const RowF8<true>& row, unsigned char* numbers, const unsigned char* codes) {
  using Step = KeptStep<RowF8<true>>;
  const int thread = threadIdx.x % kGroup, panel = thread / 16, first = (thread % 2 + thread / 8 % 2 * 2) * 4;
  const int eight = thread / 2 % 4;  // the first one; the second is four behind, which turns places around
  const unsigned char* from = Step::panel(codes, panel) + eight * kWideLine + first;
  unsigned char* to = numbers + kept_line(panel, first) * kWideLine;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t words[2][4];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int place = (eight ^ k ^ 4 * half) * 16;
      words[k / 4][k % 4] = *reinterpret_cast<const uint32_t*>(from + 4 * half * kWideLine + place);
    }
    const auto place_of = [&](int i) { return (eight ^ i ^ first % 8 ^ 4 * half) * 16; };  // in line `first + i`
    if (row.eights == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_numbers(to + i * kWideLine + place_of(i), RowF8<true>::widened_row(words, i));
      }
      continue;
    }
    turn_bytes(words[0]), turn_bytes(words[1]);
    const unsigned char* group =
        Step::groups(codes, panel) + (eight + 4 * half >> row.eights) * RowF8<true>::kGroupLine;
    const auto scales = load_four(reinterpret_cast<const float*>(group) + first);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t halves[4];
      fp8_to_f16(halves[0], halves[1], words[0][i]);
      fp8_to_f16(halves[2], halves[3], words[1][i]);
      float number[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        number[k] = __fmul_rn(f16_to_float(static_cast<uint16_t>(halves[k / 2] >> 16 * (k % 2))), scales.at[i]);
      }
      store_numbers(to + i * kWideLine + place_of(i), rounded(number));
    }
  }
}

// A step of x, as RowsInOrder. Behind the last row, the last one stands in the place: nobody reads these sums.
template <int kTokens>
struct RowsToLast {
  INGOT_DEVICE static RowsToLast of(const Product&) { return {}; }
  INGOT_DEVICE void copy(unsigned char* tile, const Product& p, int step) const {
    const int first = threadIdx.x % kGroup / 8;
    copy_rows<kTokens>(tile, p, step,
                       [&](int i) { return min(static_cast<int>(blockIdx.x) * kTokens + first + 16 * i, p.rows - 1); });
  }
};

// What a panel has of the groups of a step: how many pieces of 16 bytes, and where each lies behind the header.
template <class Row>
INGOT_DEVICE int pieces_of_groups(const Row& row) {
  const int lines = row.eights == 0 ? 0 : row.eights >= 3 ? 1 : 8 >> row.eights;
  return lines * Row::kGroupLine / 16;
}
template <class Row>
INGOT_DEVICE int piece_of_groups(const Row& row, int step, int piece) {
  return (8 * step >> row.eights) * Row::kGroupLine + piece * 16;
}

// Units, then scales of the groups of the step, then their offsets.
template <int kBits, bool kOffsets>
INGOT_DEVICE int pieces_of_groups(const UnitRow<true, kBits, kOffsets>& row) {
  return (row.kUnits / 16 + (8 >> row.eights) * row.kNumbers);
}
template <int kBits, bool kOffsets>
INGOT_DEVICE int piece_of_groups(const UnitRow<true, kBits, kOffsets>& row, int step, int piece) {
  constexpr int kUnits = UnitRow<true, kBits, kOffsets>::kUnits, kUnitPieces = kUnits / 16;
  const int each = 8 >> row.eights, block = step / 4 * row.block_bytes(row.eights);  // pieces of scales
  if (piece < kUnitPieces) return block + piece * 16;
  const int behind = piece - kUnitPieces < each ? 0 : row.numbers_bytes(row.eights) - each * 16;
  return block + behind + (step % 4 * each + piece) * 16;
}

// Copies codes and x, and makes numbers, by one warpgroup.
template <class Row, class Inputs, int kTokens, int kStages, int kCodeStages>
struct KeptCopies {
  using Step = KeptStep<Row>;
  using Tile = KeptTile<Row, kTokens, kStages, kCodeStages>;

  const Product& p;
  Inputs inputs;
  unsigned char* tiles;
  int begin;                    // the first step
  Row row;                      // of this thread
  const unsigned char* groups;  // of the block's first panel
  int bytes;                    // from a panel to the next
  int codes;                    // where they lie behind the groups
  int pieces;                   // of 16 bytes of a panel's groups in a step
  int last_panel;               // of the block

  INGOT_DEVICE static KeptCopies of(const Product& p, unsigned char* tiles, int begin) {
    const int panel = threadIdx.x % kGroup / 16, first = blockIdx.y * kWidePanels;
    const int bytes = static_cast<int>(Row::panel_bytes(p.of)), behind = Row::group_bytes(p.of);
    const unsigned char* groups =
        static_cast<const unsigned char*>(p.weight) + static_cast<int64_t>(first) * bytes + kPanelHeader;
    const Row row = Row::at(p.weight, p.of, first / 2 + panel / 2, panel % 2 * 16 + threadIdx.x % 16);
    const int pieces = pieces_of_groups(row), last_panel = panels_of(p.of) - first - 1;
    return {p, Inputs::of(p), tiles, begin, row, groups, bytes, behind, pieces, last_panel};
  }
  // Of a panel behind the last, the last one stands in the place: nobody reads these sums.
  INGOT_DEVICE const unsigned char* panel(int number) const {
    return groups + static_cast<int64_t>(min(number, last_panel)) * bytes;
  }
  INGOT_DEVICE void copy_codes(int step) const {
    constexpr int kEach = Step::kPanel / 16;  // pieces of a panel
    const int thread = threadIdx.x % kGroup;
    unsigned char* to = Tile::codes(tiles, step - begin);
    if constexpr (kGroup % kEach == 0) {
      constexpr int kAtOnce = kGroup / kEach;  // panels
      const int first = thread / kEach, piece = thread % kEach, from = codes + step * Step::kPanel + piece * 16;
#pragma unroll
      for (int i = 0; i < kWidePanels; i += kAtOnce) {
        copy_async(to + (first + i) * Step::kPanelLine + kept_place<Row>(piece), panel(first + i) + from, true);
      }
    } else {
      const unsigned char* from = panel(thread / 16) + (codes + step * Step::kPanel);
#pragma unroll
      for (int i = 0; i < kEach; i += 16) {
        const int piece = i + thread % 16;
        if (piece >= kEach) break;
        copy_async(to + thread / 16 * Step::kPanelLine + piece * 16, from + piece * 16, true);
      }
    }
    if (thread % 16 < pieces) {
      copy_async(to + kWidePanels * Step::kPanelLine + thread / 16 * Step::kGroups + thread % 16 * 16,
                 panel(thread / 16) + piece_of_groups(row, step, thread % 16), true);
    }
  }
  INGOT_DEVICE void copy_inputs(int step) const { inputs.copy(Tile::inputs(tiles, step - begin), p, step); }
  // A barrier for each step, behind which its numbers and x are there, and one before, for the first codes.
  INGOT_DEVICE void run(int end) const {
    for (int i = 0; i < kCodeStages - 1; ++i) {
      if (begin + i < end) copy_codes(begin + i);
    }
    copy_commit();
    wait_for_previous();
    for (int i = 0; i < Tile::kAhead - 1; ++i) {
      if (begin + i < end) copy_inputs(begin + i);
      copy_commit();
    }
    for (int step = begin - 1; step < end; ++step) {
      copy_wait<Tile::kAhead - 1>();  // x of this step and the codes of the next are there
      let_units_see();
      meet_groups<kWideThreads>();
      if (step + Tile::kAhead < end) copy_inputs(step + Tile::kAhead);
      if (step + kCodeStages < end) copy_codes(step + kCodeStages);
      copy_commit();
      if (step + 1 < end) {
        unpack_step(row, Tile::numbers(tiles, step + 1 - begin), Tile::codes(tiles, step + 1 - begin));
      }
    }
  }
};

// For gather_sums.
template <class Row>
struct KeptScale {
  static constexpr bool kCodes = true;

  INGOT_DEVICE static float scale(const Product& p, int number, int column) {
    return Row::at(p.weight, p.of, number / 2, number % 2 * 16 + column).scale();
  }
};

// parts: as in wide_product.
template <class Row, int kTokens, int kStages, int kCodeStages, template <int> class Inputs = RowsToLast>
INGOT_DEVICE void kept_product(const Product& p, unsigned char* tiles, float* parts) {
  using Tile = KeptTile<Row, kTokens, kStages, kCodeStages>;
  const int steps = (p.of.k + kStep - 1) / kStep;
  const int begin = static_cast<int>(static_cast<int64_t>(blockIdx.z) * steps / gridDim.z);
  const int end = static_cast<int>((static_cast<int64_t>(blockIdx.z) + 1) * steps / gridDim.z);
  float* sums = reinterpret_cast<float*>(tiles);
  if (threadIdx.x >= kMultiplying) {
    KeptCopies<Row, Inputs<kTokens>, kTokens, kStages, kCodeStages>::of(p, tiles, begin).run(end);
    meet_groups<kWideThreads>();
  } else {
    float sum[kTokens / 2] = {};
    meet_groups<kWideThreads>();  // the first codes are there
    for (int step = 0; step < end - begin; ++step) {
      meet_groups<kWideThreads>();  // this step is there, and all are done with the one before the last
      multiply_tiles<kTokens>(sum, Tile::numbers(tiles, step), Tile::inputs(tiles, step));
    }
    group_wait<0>(sum);
    wait_for_previous();          // of whose results the epilogue reads some
    meet_groups<kWideThreads>();  // nobody needs the tiles any more
    gather_sums<KeptScale<Row>, kTokens>(p, sum, sums);
  }
  __syncthreads();
  finish_tile<kTokens, kWideThreads>(p, sums, parts);
}

// kOfFour, kOfBytes: stages of codes of up to four bits, and of more.
#define INGOT_KEPT_PRODUCT(name, kTokens, kStages, kOfFour, kOfBytes, kBlocks, Row)                         \
  INGOT_KERNEL_TO_SHARE(kWideThreads, kBlocks)                                                              \
  name(INGOT_PRODUCT_PARAMETERS, float* parts) {                                                            \
    INGOT_SHARED_WIDE(tiles);                                                                               \
    if (kTokens <= 64) let_next_begin();                                                                    \
    kept_product<Row, kTokens, kStages, Row::kBits <= 4 ? kOfFour : kOfBytes>(INGOT_PRODUCT, tiles, parts); \
  }
#define INGOT_KEPT_OF_EXPERT(name, kTokens, kStages, kOfFour, kOfBytes, kBlocks, Row) \
  INGOT_WIDE_OF_EXPERT(                                                               \
      name, kBlocks, Row,                                                             \
      kept_product<Row<true>, kTokens, kStages, Row<true>::kBits <= 4 ? kOfFour : kOfBytes, RowsOfList>)
#define INGOT_KEPT_PRODUCTS(format, Row)                                      \
  INGOT_KEPT_PRODUCT(product_##format##_wide_64, 64, 4, 5, 3, 2, Row<true>)   \
  INGOT_KEPT_PRODUCT(product_##format##_wide_128, 128, 5, 8, 6, 1, Row<true>) \
  INGOT_KEPT_PRODUCT(product_##format##_wide_256, 256, 4, 6, 4, 1, Row<true>) \
  INGOT_KEPT_OF_EXPERT(experts_##format##_wide_64, 64, 4, 5, 3, 2, Row)       \
  INGOT_KEPT_OF_EXPERT(experts_##format##_wide_128, 128, 5, 8, 6, 1, Row)
