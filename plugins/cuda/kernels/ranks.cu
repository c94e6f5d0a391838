// What ranks have exchanged, put together: sums in a fixed order, and columns side by side. Bound by memory.
#include "device.cuh"

constexpr int kRankThreads = 256;

// Neighbours are added, then their sums, and so on, as in the op `all_reduce`. load: what a rank has brought
template <int kRanks, class Value, class Load>
INGOT_DEVICE Value sum_of_ranks(Load load, int first) {
  if constexpr (kRanks == 1) {
    return load(first);
  } else {
    const Value one = sum_of_ranks<kRanks / 2, Value>(load, first);
    const Value other = sum_of_ranks<kRanks / 2, Value>(load, first + kRanks / 2);
    return one + other;
  }
}

struct FourOfRanks {
  Four<float> values;
};
INGOT_DEVICE FourOfRanks operator+(const FourOfRanks& a, const FourOfRanks& b) {
  FourOfRanks sum;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum.values.at[i] = a.values.at[i] + b.values.at[i];
  return sum;
}

// The same of a multiple of eight, eight at a time, so that few registers are needed. ranks: a power of two
template <class Value, class Load>
INGOT_DEVICE Value sum_of_many(Load load, int ranks) {
  Value sum{}, ones{}, twos{}, fours{};  // of eights: not added to their neighbours yet
#pragma unroll 1
  for (int eight = 0; 8 * eight < ranks; ++eight) {
    sum = sum_of_ranks<8, Value>(load, 8 * eight);
    if (!(eight & 1)) {
      ones = sum;
      continue;
    }
    sum = ones + sum;
    if (!(eight & 2)) {
      twos = sum;
      continue;
    }
    sum = twos + sum;
    if (!(eight & 4)) {
      fours = sum;
      continue;
    }
    sum = fours + sum;
  }
  return sum;
}

template <class Value, class Load>
INGOT_DEVICE Value sum_of_all(Load load, int ranks) {
  if (ranks == 2) return sum_of_ranks<2, Value>(load, 0);
  if (ranks == 4) return sum_of_ranks<4, Value>(load, 0);
  return sum_of_many<Value>(load, ranks);
}

// Where the share of a rank begins, of numbers that ranks divide: at a multiple of four. See exchanges.py.
INGOT_DEVICE int64_t share_begin(int64_t numbers, int rank, int ranks) {
  return rank == ranks ? numbers : numbers / 4 * rank / ranks * 4;
}

// y[i] = the sum over ranks of x[rank][i], of *rows * cols numbers; rank >= 0: of this rank's share of them alone, in
// which x counts from 0. Grid: strips of 4 * 256 numbers
INGOT_KERNEL(kRankThreads)
add_ranks(float* y, const float* x, const int* rows, int cols, int ranks, int rank) {
  wait_for_previous();
  const int64_t numbers = static_cast<int64_t>(*rows) * cols;
  const int64_t begin = rank < 0 ? 0 : share_begin(numbers, rank, ranks);
  const int64_t count = (rank < 0 ? numbers : share_begin(numbers, rank + 1, ranks)) - begin;
  const int64_t first = 4 * (static_cast<int64_t>(blockIdx.x) * kRankThreads + threadIdx.x);
  y += begin;
  if (first >= count) return;
  if (count % 4 == 0) {
    const auto four = [=](int from) { return FourOfRanks{load_four(x + from * count + first)}; };
    store_four(y + first, sum_of_all<FourOfRanks>(four, ranks).values);
    return;
  }
  for (int64_t i = first; i < first + 4 && i < count; ++i) {
    y[i] = sum_of_all<float>([=](int from) { return x[from * count + i]; }, ranks);
  }
}

// Columns that ranks have brought side by side: rank r has [rows, own columns] of x, from column columns * r / ranks
// of y on, behind the numbers of all ranks before it. Grid: (rows, strips of 4 * 256 columns)
INGOT_KERNEL(kRankThreads)
join_ranks(float* y, const float* x, int columns, int ranks) {
  wait_for_previous();
  const int64_t rows = gridDim.x, row = blockIdx.x;
  const auto begin_of = [=](int rank) { return static_cast<int>(static_cast<int64_t>(columns) * rank / ranks); };
  const int strip = blockIdx.y * 4 * kRankThreads;
  for (int column = strip + threadIdx.x; column < min(columns, strip + 4 * kRankThreads); column += kRankThreads) {
    int rank = static_cast<int>(static_cast<int64_t>(column) * ranks / columns);
    if (rank + 1 < ranks && begin_of(rank + 1) <= column) rank += 1;
    const int begin = begin_of(rank), width = begin_of(rank + 1) - begin;
    y[row * columns + column] = x[rows * begin + row * width + (column - begin)];
  }
}
