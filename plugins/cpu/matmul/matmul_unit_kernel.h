// Products of weights whose groups have whole numbers of units (w2ks, w3k, w4ks, w5ks, w6k). plugins/unit_rows.py says
// what they mean.
//
// Rows that are rounded to int8: the sum over kUnitK columns of scale * code * x is exact in int32, and so is that of
// offset * x; each joins the others in float32 by one fma, units ascending. So every blocking, instruction set and
// number of rows gives the same bits. Scales multiply sums that fit 16 bits, those of 16 columns, or of 8 (see
// add_codes); where a CPU multiplies 32 bits as quickly, the sum of a whole group, or two of them at once if they fit
// 16 bits. Floors: the bytes of codes and numbers over the bandwidth of memory. Per 256 codes of a column, VPDPBUSD
// takes 64 operations for each row; scales add 16 or 32, or one for each group or two groups, offsets and units 6 to 8.
#pragma once

#include "isa/cpu_isa.h"
#include "matmul/matmul_int8_kernel.h"
#include "matmul/matmul_kernel.h"

namespace ingot {
namespace {

constexpr int64_t kUnitRun = 16;  // columns that have one scale
constexpr int kRunQuads = kUnitRun / 4;
template <typename Format>
constexpr int kRuns = Format::kLineK / kUnitRun;  // whose codes share lines

// Where registers are few, or rows many, the first of several groups of rows leaves a byte for each code to the others.
template <typename I, typename Stored, bool kMany = false>
struct UnitProducts {
  using Format = Stored;
  using Total = float;
  using Short = typename I::Short;
  static constexpr bool kShift = Format::kValues > 1;
  static constexpr int64_t kBits = Format::kBits, kLineK = Format::kLineK, kLineQuads = kLineK / 4;
  static constexpr int kRows = I::kUnitRows, kPanels = I::kBytePanels, kVectors = kPanel / I::kWidth;
  static constexpr bool kLeaves = kMany || I::kRegisters < 32;
  static constexpr int64_t kPart = kLeaves ? 1024 : 2048;
  static constexpr int64_t kUnpackedBytes = kLeaves ? kPart * kPanel : 0;
  static constexpr int64_t kBlockRows = I::kBlockRows / kRows * kRows, kBlockPanels = I::kBlockPanels;
  static constexpr bool kWholeOnce = true;
  static constexpr int kMostStreamed = kBits == 5 ? 1 : 2;  // rows; more take longer than memory does
  static_assert(kPart % kUnitK == 0);

  // Sums that are multiplied by scales: of runs, in 16 bits; of whole groups, in 16 or in 32 bits; or of two groups at
  // once, in 16 bits each. What takes 16 bits of whole groups is for rows whose sums fit. Codes of two and three bits
  // would gain nothing by whole groups: 16 bits hold the sums of theirs.
  enum Sums { kOfRuns, kShort, kWide, kPaired };
  static constexpr bool kMayBeWide = I::kMultiplies32 && kBits > 3;
  static bool are_wide() { return kMayBeWide && quick_multiply_32; }

  // Runs are pairs of int16: sums of x of two groups, or what sums of codes of two halves of a run begin at, -kBias *
  // (sum of x). Where one sum of 16 bits has both halves, it begins at the first number, and the second is 0; one of 32
  // bits begins at an int32.
  static int64_t run_k(int64_t group) { return kShift ? 2 * group : kUnitRun; }
  static void round(const RoundedRows& to, int64_t first, int64_t count, const float* const* x) {
    std::fill_n(to.runs(first), count * to.run_stride(), 0);  // pairs of a unit may lie beyond the codes
    const bool several = count > 1;                           // one row alone does not ask (kOnce)
    std::fill_n(to.are_short(first), count, several ? 1 : 0);
    round_group<I, kRows, kPart, 0>(to, first, count, x, [&](int64_t row, int64_t k, const int8_t* line) {
      store_runs(to, first + row, k, line);
      if constexpr (kMayBeWide)
        if (several && !sums_are_short(line)) *to.are_short(first + row) = 0;
    });
  }
  // Those of the 64 codes from k on.
  static void store_runs(const RoundedRows& to, int64_t row, int64_t k, const int8_t* line) {
    int16_t sums[kTileK / 8];
    const int count = sum_codes<I>(line, to.run_k / 2, sums);
    if constexpr (!kShift && !CodeLines<kBits>::kEights)
      for (int i = 0; i < count; i += 2) {
        sums[i] = static_cast<int16_t>(sums[i] + sums[i + 1]);
        sums[i + 1] = 0;
      }
    if constexpr (!kShift)
      for (int16_t& sum : sums) sum = static_cast<int16_t>(-Format::kBias * sum);
    if constexpr (!kShift && kMayBeWide)
      if (are_wide()) {
        for (int i = 0; i < count; i += 2) to.runs(row)[(k / kTileK * count + i) / 2] = sums[i] + sums[i + 1];
        return;
      }
    std::byte* const runs = reinterpret_cast<std::byte*>(to.runs(row)) + k / kTileK * count * int64_t{sizeof(int16_t)};
    for (int i = 0; i < count; ++i) std::memcpy(runs + i * int64_t{sizeof(int16_t)}, sums + i, sizeof(int16_t));
  }

  // Whether 16 bits hold the sum of code * x of each group of 64 x, whatever the codes are.
  static bool sums_are_short(const int8_t* line) {
    constexpr int32_t kLargestCode = kShift ? (1 << kBits) - 1 : Format::kBias;
    int8_t sizes[kTileK];
    int16_t sums[kTileK / 8], of_sizes[kTileK / 8];
    for (int64_t i = 0; i < kTileK; ++i) sizes[i] = static_cast<int8_t>(std::abs(line[i]));
    const int count = sum_codes<I>(line, Format::kShortestGroup, sums);
    sum_codes<I>(sizes, Format::kShortestGroup, of_sizes);
    int32_t most = 0;  // of x with the same sign, twice; codes with signs can meet any x
    for (int i = 0; i < count; ++i) most = std::max(most, kShift ? of_sizes[i] + std::abs(sums[i]) : 2 * of_sizes[i]);
    return kLargestCode * most <= 2 * INT16_MAX;
  }

  // f<r, p>() one by one: constants find their sums in registers.
  template <int kR, int kP, typename F>
  [[gnu::always_inline]] static inline void each(F f) {
    for_each(std::make_integer_sequence<int, kR * kP>(),
             [f]<int kI>() __attribute__((always_inline)) { f.template operator()<kI / kP, kI % kP>(); });
  }

  enum Codes { kStored, kLeft, kFound };  // as they lie in panels; left to other rows too; left by the first ones

  // A step of the codes that share lines, or of a run where that is longer.
  template <Sums kSums>
  struct Step {
    static constexpr int64_t kRunK = kSums == kOfRuns ? kUnitRun : Format::kShortestGroup;
    static constexpr int64_t kK = std::max(kLineK, kRunK);
    static constexpr int kRuns = kK / kRunK, kPairs = kRunK / 8, kQuads = kK / 4;  // pairs of quads in a run
    static constexpr int kCodeBytes = kK / kLineK * Format::kCodeBytes, kCodeLines = kCodeBytes / kLineBytes;
  };

  // Sums of a run begin, the first or the second one of a pair. start_of(row): int32, where codes have signs.
  template <int v, int kR, int kP, typename StartOf>
  [[gnu::always_inline]] static inline void begin_of_pair(Short (&run)[kR][kP][kVectors], bool second,
                                                          const StartOf& start_of) {
    if (second) {
      for_each(std::make_integer_sequence<int, kR>(), [&]<int r>() __attribute__((always_inline)) {
        Short start = I::set_short(I::kSecondStart);
        if constexpr (!kShift) start = I::add_shorts(start, I::set_short(*start_of(r)));
#pragma GCC unroll 2
        for (int p = 0; p < kP; ++p) run[r][p][v] = I::begin_second(run[r][p][v], start);
      });
    } else {
      each<kR, kP>([&]<int r, int p>()
                       __attribute__((always_inline)) { run[r][p][v] = I::set_short(kShift ? 0 : *start_of(r)); });
    }
  }

  template <Sums kSums, Codes kCodes, int kR, int kP>
  [[gnu::noinline]] static void tile(const Int8Tile& t) {
    // few rows of one panel read codes once, one after the other
    constexpr bool kStreams = kCodes == kStored && kR <= kRowsOfStreams<I, kMostStreamed> && kP == 1;
    constexpr bool kOnce = kStreams && kR == 1;
    // One row waits for memory; few rows of codes of six bits, for ports that unpack them.
    constexpr bool kMayPair = kBits < 6 || kR > 4 || kCodes == kFound;
    if constexpr (kMayBeWide && !kOnce && (kSums == kOfRuns || (kSums == kWide && kMayPair)))
      if (std::all_of(t.are_short, t.are_short + kR, std::identity()))
        return tile<kSums == kWide ? kPaired : kShort, kCodes, kR, kP>(t);
    using Step = UnitProducts::Step<kSums>;
    static_assert(kSums != kPaired || Step::kK == Step::kRunK);
    const int64_t unit_bytes = Format::unit_bytes(t.group_bits), end = t.tiles * kTileK;
    const std::byte *line[kP], *next[kP];
    std::byte* to[kP];
    for (int p = 0; p < kP; ++p) {
      if (t.first) std::fill_n(reinterpret_cast<float*>(t.sums) + p * t.panel_stride, kR * kPanel, 0.0f);
      line[p] = t.lines[p];
      next[p] = t.next[p];
      to[p] = t.unpacked + p * kUnpackedBytes;
    }
    const int8_t* x = t.x;
    for (int64_t k = 0; k < end; k += kUnitK) {
      const int64_t unit = k / kUnitK, columns = std::min(kUnitK, end - k);
      Short sum[kR][kP][kVectors];
      each<kR, kP>([&]<int r, int p>() __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[r][p][v] = I::set_short(0);
      });
      Short run[kR][kP][kVectors];
      for (int64_t at = 0; at < columns; at += Step::kK, x += Step::kK * kR) {
        [[maybe_unused]] const bool second = (at & Step::kRunK) != 0;  // of a pair
        const int32_t* const starts = t.runs + (k + at) / kUnitRun;
        if constexpr (kStreams)  // before lines of upper bits are read out of turn
          for (int l = 0; l < Step::kCodeLines; ++l)
            prefetch_codes_once<I, kR>(line[0] + l * kLineBytes, unit * unit_bytes);
        for_each(std::make_integer_sequence<int, kVectors>(), [&]<int v>() __attribute__((always_inline)) {
          constexpr int64_t kAt = v * I::kWidth * 4;  // bytes
          const auto made = [&]<int q>(int p) __attribute__((always_inline)) {
            if constexpr (kCodes == kFound)
              return I::load_short(reinterpret_cast<const int32_t*>(line[p] + q * kLineBytes + kAt));
            const Short codes =
                I::template line_codes<kBits, q % kLineQuads>(line[p] + q / kLineQuads * Format::kCodeBytes + kAt);
            if constexpr (kCodes == kLeft)
              I::store_short(reinterpret_cast<int32_t*>(to[p] + q * kLineBytes + kAt), codes);
            return codes;
          };
          const auto scales_at = [&](int p, int64_t column) __attribute__((always_inline)) {
            const UnitNumbers<Format> numbers(t.multipliers[p] + unit * unit_bytes, t.group_bits);
            return numbers.scales + (column >> t.group_bits) * kPanel + v * I::kWidth;
          };
          for_each(std::make_integer_sequence<int, Step::kRuns>(), [&]<int kRun>() __attribute__((always_inline)) {
            Short scales[kP];
#pragma GCC unroll 2
            for (int p = 0; p < kP; ++p) {
              const int64_t column = at + kRun * Step::kRunK;
              if constexpr (kSums == kOfRuns || kSums == kShort)
                scales[p] = I::template unit_scales<kBits>(scales_at(p, column));
              if constexpr (kSums == kWide) scales[p] = I::short_multipliers(scales_at(p, column));
            }
            const auto start_of = [&](int r) __attribute__((always_inline)) {
              return starts + r * t.run_stride + kRun * (Step::kRunK / kUnitRun);
            };
            if constexpr (kSums == kWide || kSums == kShort) {
              for_each(std::make_integer_sequence<int, kR>(), [&]<int r>() __attribute__((always_inline)) {
                Short start = I::set_short(kShift ? 0 : *start_of(r));
                if constexpr (kSums == kShort && !kShift) start = I::sum_pairs(start);
#pragma GCC unroll 2
                for (int p = 0; p < kP; ++p) run[r][p][v] = start;
              });
            } else if constexpr (kSums == kPaired) {
              begin_of_pair<v>(run, second, start_of);
            }
            for_each(std::make_integer_sequence<int, Step::kPairs>(), [&]<int kPair>() __attribute__((always_inline)) {
              constexpr int q = (kRun * Step::kPairs + kPair) * 2;
              Short first[kP], last[kP];
#pragma GCC unroll 2
              for (int p = 0; p < kP; ++p) {
                first[p] = made.template operator()<q>(p);
                last[p] = made.template operator()<q + 1>(p);
              }
              each<kR, kP>([&]<int r, int p>() __attribute__((always_inline)) {
                const Short from = I::load_x(x + (q * kR + r) * 4), next_from = I::load_x(x + ((q + 1) * kR + r) * 4);
                Short own = run[r][p][v];  // a reference to an array of so many would keep it in memory
                if constexpr (kSums == kOfRuns) {
                  I::template add_codes<kBits, kPair>(sum[r][p][v], own, first[p], from, last[p], next_from, scales[p],
                                                      start_of(r));
                } else {
                  I::dot(own, first[p], from);
                  I::dot(own, last[p], next_from);
                }
                run[r][p][v] = own;
              });
            });
            if constexpr (kSums == kWide || kSums == kShort) {
              each<kR, kP>([&]<int r, int p>() __attribute__((always_inline)) {
                Short own = sum[r][p][v];
                if constexpr (kSums == kWide)
                  I::add_short(own, run[r][p][v], scales[p]);
                else
                  I::add_pairs(own, run[r][p][v], scales[p]);
                sum[r][p][v] = own;
              });
            } else if constexpr (kSums == kPaired) {
              if (!second) return;
#pragma GCC unroll 2
              for (int p = 0; p < kP; ++p) scales[p] = I::scale_pairs(scales_at(p, at - Step::kRunK), scales_at(p, at));
              each<kR, kP>([&]<int r, int p>() __attribute__((always_inline)) {
                Short own = sum[r][p][v];
                I::add_pairs(own, I::end_second(run[r][p][v]), scales[p]);
                sum[r][p][v] = own;
              });
            }
          });
        });
#pragma GCC unroll 2
        for (int p = 0; p < kP; ++p) {
#pragma GCC unroll 5
          for (int l = 0; l < Step::kCodeLines; ++l) {
            if constexpr (!kStreams) {
              if constexpr (kCodes == kStored) prefetch_panel<I, kR>(line[p] + l * kLineBytes);
              I::prefetch_far(next[p] + l * Step::kQuads * t.next_step / Step::kCodeLines);
            }
          }
          next[p] += Step::kQuads * t.next_step;
          line[p] += kCodes == kFound ? Step::kQuads * kLineBytes : Step::kCodeBytes;
          to[p] += Step::kQuads * kLineBytes;
        }
      }
      if constexpr (kStreams)
        for (int64_t l = 0; l < unit_bytes; l += kLineBytes)
          prefetch_beside_codes<I, kR>(line[0] + l, unit * unit_bytes);
      for_each(std::make_integer_sequence<int, kVectors * kP>(), [&]<int kI>() __attribute__((always_inline)) {
        constexpr int p = kI / kVectors, v = kI % kVectors;
        join<kR, p, v>(t, unit, [&]<int r>() __attribute__((always_inline)) { return sum[r][p][v]; });
      });
    }
  }

  // The sums of a unit join the totals. sum<r>(): of scale * code * x.
  template <int kR, int p, int v, typename SumOf>
  [[gnu::always_inline]] static inline void join(const Int8Tile& t, int64_t unit, const SumOf& sum) {
    constexpr int64_t kColumn = v * I::kWidth;
    const UnitNumbers<Format> numbers(t.multipliers[p] + unit * Format::unit_bytes(t.group_bits), t.group_bits);
    const auto scale = I::load_f16(numbers.scale + kColumn);
    float* const totals = reinterpret_cast<float*>(t.sums) + p * t.panel_stride + kColumn;
    if constexpr (!kShift) {
      for_each(std::make_integer_sequence<int, kR>(), [&]<int r>() __attribute__((always_inline)) {
        float* const total = totals + r * kPanel;
        I::store(total, I::fma(I::short_floats(sum.template operator()<r>()), scale, I::load(total)));
      });
    } else {
      const auto unit_of_offsets = I::load_f16(numbers.offset + kColumn);
      const int64_t pairs = kUnitK >> (t.group_bits + 1);
      const int32_t* const of_unit = t.runs + unit * pairs;
      Short offsets[kR];
      for_each(std::make_integer_sequence<int, kR>(),
               [&]<int r>() __attribute__((always_inline)) { offsets[r] = I::set_short(0); });
      for (int64_t i = 0; i < pairs; ++i) {
        const Short both = I::pairs(numbers.offsets + (i * kPanel + kColumn) * 2);
        for_each(std::make_integer_sequence<int, kR>(), [&]<int r>() __attribute__((always_inline)) {
          I::add_pairs(offsets[r], both, I::set_short(of_unit[r * t.run_stride + i]));
        });
      }
      for_each(std::make_integer_sequence<int, kR>(), [&]<int r>() __attribute__((always_inline)) {
        float* const total = totals + r * kPanel;
        const auto scaled = I::fma(I::short_floats(sum.template operator()<r>()), scale, I::load(total));
        I::store(total, I::fma(I::short_floats(offsets[r]), unit_of_offsets, scaled));
      });
    }
  }

  // Tiles of kLeast rows and more: groups of rows are of one size, so that one of several is no smaller than that.
  static constexpr int kLeast = kRows / 2;
  template <Sums kSums, Codes kCodes, int kFirst, int kP, size_t... kR>
  static constexpr std::array<Int8TileFn, sizeof...(kR)> table(std::index_sequence<kR...>) {
    return {tile<kSums, kCodes, kFirst + kR, kP>...};
  }
  template <Codes kCodes, int kFirst, int kP>
  static Int8TileFn tile_with(int64_t rows) {
    using Indices = std::make_index_sequence<kRows - kFirst + 1>;
    static constexpr auto kTiles = table<kOfRuns, kCodes, kFirst, kP>(Indices());
    if constexpr (kMayBeWide) {
      static constexpr auto kWideTiles = table<kWide, kCodes, kFirst, kP>(Indices());
      if (are_wide()) return kWideTiles[static_cast<size_t>(rows - kFirst)];
    }
    return kTiles[static_cast<size_t>(rows - kFirst)];
  }
  // Each group of rows unpacks the last panel of an odd number for itself.
  static bool unpacks(int64_t panels, int64_t) { return kLeaves && panels == kPanels; }
  static Int8TileFn tile_of(int64_t rows, int64_t panels, bool first, int64_t groups) {
    if constexpr (kLeaves)
      if (groups > 1 && unpacks(panels, groups))
        return first ? tile_with<kLeft, kLeast, kPanels>(rows) : tile_with<kFound, kLeast, kPanels>(rows);
    if constexpr (kMany) return UnitProducts<I, Format>::tile_of(rows, panels, first, 1);  // the same tiles
    return panels > 1 ? tile_with<kStored, 1, kPanels>(rows) : tile_with<kStored, 1, 1>(rows);
  }
  static int64_t panels_at_once(int64_t rows, int64_t groups) {
    return streams_grouped_codes<I, kMostStreamed>(rows, groups) ? 1 : kPanels;
  }
};

constexpr int64_t kFewUnitRows = 2;  // groups of rows that unpack codes for themselves

template <typename I, typename Format>
void matmul_units(const MatmulArgs& args, const Team& team) {
  if constexpr (I::kRegisters >= 32)
    if (args.rows > kFewUnitRows * I::kUnitRows)
      return matmul_int8<I, Format, UnitProducts<I, Format, true>>(args, team);
  matmul_int8<I, Format, UnitProducts<I, Format>>(args, team);
}

// With float rows: what codes stand for, as float32 lines.
template <typename I, typename Format>
struct UnitWeight {
  using Stream = PanelF32;
  using First = Stream;
  using Blocked = PanelF32;
  static constexpr bool kScaled = true;
  static constexpr int64_t kStreamRows = INT64_MAX, kStreamPart = kBlockedK;
  static constexpr int64_t kStreamBytes = kBlockedK * kLineBytes, kBlockedBytes = 0;
  Format format;

  template <typename Args>
  explicit UnitWeight(const Args& args) : format(args) {}
  int64_t panel_bytes() const { return format.panel_bytes(); }
  const std::byte* stored(const std::byte* panel, int64_t at) const { return format.stored(panel, at); }
  static int64_t stored_bytes(int64_t part) { return code_bytes<Format>(tiles_of(part)); }
  static const std::byte* beside(const std::byte*, int64_t) { return nullptr; }
  template <typename S>
  ScaledSums<S> sums(const MatmulArgs& args) const {
    return {args, panel_bytes()};
  }

  // The lines of `part` values of k from `at` on, where units begin.
  const std::byte* lines(const std::byte* panel, int64_t at, int64_t part, std::byte* to) const {
    static_assert(kBlockedK % kUnitK == 0);
    const std::byte* codes = stored(panel, at);
    float* floats = reinterpret_cast<float*>(to);
    for (int64_t k = at; k < at + part; k += Format::kLineK, codes += Format::kCodeBytes)
      for_each(std::make_integer_sequence<int, kRuns<Format>>(), [&]<int kRun>() __attribute__((always_inline)) {
        run_lines<kRun>(panel, k + kRun * kUnitRun, codes, floats + (k - at + kRun * kUnitRun) * kPanel);
      });
    return to;
  }

 private:
  // Those of the kUnitRun values from k on, run kRun of those whose codes share lines.
  template <int kRun>
  [[gnu::always_inline]] inline void run_lines(const std::byte* panel, int64_t k, const std::byte* codes,
                                               float* floats) const {
    const UnitNumbers<Format> numbers(format.multipliers(panel, k), format.group_bits());
    const int64_t group = k % kUnitK >> format.group_bits();
    alignas(kLineBytes) int32_t quads[kRunQuads][kPanel];
    alignas(kLineBytes) int8_t offsets[kPanel] = {};
    if constexpr (Format::kValues > 1)
      for (int64_t i = 0; i < kPanel; ++i) offsets[i] = numbers.offsets[(group / 2 * kPanel + i) * 2 + group % 2];
    for (int64_t i = 0; i < kPanel; i += I::kWidth) {
      for_each(std::make_integer_sequence<int, kRunQuads>(), [&]<int q>() __attribute__((always_inline)) {
        constexpr int kQuad = kRun * kRunQuads + q;
        I::store_short(quads[q] + i, I::template line_codes<Format::kBits, kQuad>(codes + i * 4));
      });
      const auto scale = I::mul(I::load_f16(numbers.scale + i), I::load_i8(numbers.scales + group * kPanel + i));
      const auto bias = I::set1(static_cast<float>(Format::kBias));
      for (int64_t q = 0; q < kRunQuads; ++q)
        for_each(std::make_integer_sequence<int, 4>(), [&]<int kByte>() __attribute__((always_inline)) {
          const auto v = I::mul(I::sub(I::template load_quads<kByte>(quads[q] + i), bias), scale);
          float* const line = floats + (q * 4 + kByte) * kPanel + i;
          if constexpr (Format::kValues > 1)
            I::store(line, I::add(v, I::mul(I::load_f16(numbers.offset + i), I::load_i8(offsets + i))));
          else
            I::store(line, v);
        });
    }
  }
};

}  // namespace
}  // namespace ingot
