// Residual streams side by side (AltUp), parts of rows, and gates that are cut off. Bound by memory: 16 bytes at an
// access where rows are of whole fours.
#include "device.cuh"

constexpr int kStreamThreads = 256;

// Calls f with the first of four neighbours, then with single columns, of a strip of 4 * 256.
template <class Fours, class Single>
INGOT_DEVICE void for_strip(int columns, bool fours, Fours of_four, Single of_one) {
  const int strip = blockIdx.y * 4 * kStreamThreads;
  if (fours) {
    const int column = strip + 4 * threadIdx.x;
    if (column < columns) of_four(column);
    return;
  }
  for (int column = strip + threadIdx.x; column < min(columns, strip + 4 * kStreamThreads); column += kStreamThreads) {
    of_one(column);
  }
}

// y[r, g * count + i] = x[r, g * of + first + i]. Grid: (rows, strips of y)
INGOT_KERNEL(kStreamThreads)
take_columns(float* y, const float* x, int cols, int of, int first, int count) {
  wait_for_previous();
  const float* from = x + static_cast<int64_t>(blockIdx.x) * (cols / count) * of + first;
  float* to = y + static_cast<int64_t>(blockIdx.x) * cols;
  const auto place = [of, count](int column) { return column / count * of + column % count; };
  for_strip(
      cols, of % 4 == 0 && first % 4 == 0 && count % 4 == 0,
      [&](int column) { store_four(to + column, load_four(from + place(column))); },
      [&](int column) { to[column] = from[place(column)]; });
}

// y[r, i] = x[r, order[i]]. x has `columns` columns; a number outside them counts as the nearest column, NaN as the
// first. Grid: (rows, strips of y)
INGOT_KERNEL(kStreamThreads)
gather_columns(void* y, const float* x, const float* order, int cols, int columns, int narrow) {
  wait_for_previous();
  const float* from = x + static_cast<int64_t>(blockIdx.x) * columns;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * cols;
  const float last = static_cast<float>(columns - 1);
  const auto taken = [from, last](float place) { return from[static_cast<int>(fminf(fmaxf(place, 0.f), last))]; };
  for_strip(
      cols, cols % 4 == 0,
      [&](int column) {
        Four<float> values = load_four(order + column);
#pragma unroll
        for (int k = 0; k < 4; ++k) values.at[k] = taken(values.at[k]);
        store_activations(y, begin + column, values, narrow);
      },
      [&](int column) { store_activation(y, begin + column, taken(order[column]), narrow); });
}

// y = (a, b, c), column after column; `first` and `second` are the columns of a and b. Grid: (rows, strips of y)
INGOT_KERNEL(kStreamThreads)
join_columns(float* y, const float* a, const float* b, const float* c, int cols, int first, int second) {
  wait_for_previous();
  const int64_t row = blockIdx.x;
  const auto from = [=](int column) {
    if (column < first) return a + row * first + column;
    if (column < first + second) return b + row * second + (column - first);
    return c + row * (cols - first - second) + (column - first - second);
  };
  for_strip(
      cols, cols % 4 == 0 && first % 4 == 0 && second % 4 == 0,
      [&](int column) { store_four(y + row * cols + column, load_four(from(column))); },
      [&](int column) { y[row * cols + column] = *from(column); });
}

// y[i] = x[i] + sum over j of coefs[i][j] * x[j], of the streams of a row. Grid: (rows, strips of a stream)
INGOT_KERNEL(kStreamThreads)
mix_streams(float* y, const float* x, const float* coefs, int columns, int streams) {
  wait_for_previous();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * streams * columns;
  const float* own = coefs + static_cast<int64_t>(blockIdx.x) * streams * streams;
  for (int i = 0; i < streams; ++i) {
    for_strip(
        columns, columns % 4 == 0,
        [&](int column) {
          Four<float> sum = load_four(x + begin + i * columns + column);
          for (int j = 0; j < streams; ++j) {
            const Four<float> other = load_four(x + begin + j * columns + column);
#pragma unroll
            for (int k = 0; k < 4; ++k) sum.at[k] = fmaf(own[i * streams + j], other.at[k], sum.at[k]);
          }
          store_four(y + begin + i * columns + column, sum);
        },
        [&](int column) {
          float sum = x[begin + i * columns + column];
          for (int j = 0; j < streams; ++j) sum = fmaf(own[i * streams + j], x[begin + j * columns + column], sum);
          y[begin + i * columns + column] = sum;
        });
  }
}

// y[i] = x[i] + (1 + coefs[i]) * (made - x[active]); without coefs the stream `active` stays, and the others are
// y[i] = x[i] + made. Grid: (rows, strips of a stream)
INGOT_KERNEL(kStreamThreads)
add_to_streams(float* y, const float* x, const float* made, const float* coefs, int columns, int streams, int active) {
  wait_for_previous();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * streams * columns;
  const float* own = made + static_cast<int64_t>(blockIdx.x) * columns;
  const auto sum = [&](int i, float value, float added, float now) {
    if (coefs) return fmaf(1.f + coefs[static_cast<int64_t>(blockIdx.x) * streams + i], added - now, value);
    return i == active ? value : value + added;
  };
  for (int i = 0; i < streams; ++i) {
    for_strip(
        columns, columns % 4 == 0,
        [&](int column) {
          Four<float> values = load_four(x + begin + i * columns + column);
          const Four<float> added = load_four(own + column), now = load_four(x + begin + active * columns + column);
#pragma unroll
          for (int k = 0; k < 4; ++k) values.at[k] = sum(i, values.at[k], added.at[k], now.at[k]);
          store_four(y + begin + i * columns + column, values);
        },
        [&](int column) {
          y[begin + i * columns + column] =
              sum(i, x[begin + i * columns + column], own[column], x[begin + active * columns + column]);
        });
  }
}

INGOT_DEVICE float mean_of_squares(const float* row, int columns, float (&scratch)[kWarp]) {
  float squares = 0.f;
  for (int i = threadIdx.x; i < columns; i += kStreamThreads) squares += row[i] * row[i];
  return block_sum_once(squares, scratch) / columns;
}

// y[i] = x[i] * sqrt(mean(like^2)) / sqrt(max(mean(x[i]^2), least)); joins: `like` comes first in y, as it is. Grid:
// (rows, streams of y)
INGOT_KERNEL(kStreamThreads)
match_magnitude(float* y, const float* x, const float* like, int columns, int streams, int joins, float least) {
  wait_for_previous();
  __shared__ float scratch[2][kWarp];
  const int stream = static_cast<int>(blockIdx.y) - joins;
  const float* own = like + static_cast<int64_t>(blockIdx.x) * columns;
  float* to = y + (static_cast<int64_t>(blockIdx.x) * (streams + joins) + blockIdx.y) * columns;
  if (stream < 0) {
    for (int i = threadIdx.x; i < columns; i += kStreamThreads) to[i] = own[i];
    return;
  }
  const float* from = x + (static_cast<int64_t>(blockIdx.x) * streams + stream) * columns;
  const float wanted = sqrtf(mean_of_squares(own, columns, scratch[0]));
  const float factor = wanted / sqrtf(fmaxf(mean_of_squares(from, columns, scratch[1]), least));
  for (int i = threadIdx.x; i < columns; i += kStreamThreads) to[i] = from[i] * factor;
}

// y = max(0, x - mean(x) - deviations * std(x)) of each row; y may be x. Grid: (rows)
INGOT_KERNEL(kStreamThreads)
cut_below(float* y, const float* x, int columns, float deviations) {
  wait_for_previous();
  __shared__ float scratch[2][kWarp];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * columns;
  float sum = 0.f, squares = 0.f;
  for (int i = threadIdx.x; i < columns; i += kStreamThreads) sum += x[begin + i];
  const float mean = block_sum_once(sum, scratch[0]) / columns;
  for (int i = threadIdx.x; i < columns; i += kStreamThreads) {
    squares += (x[begin + i] - mean) * (x[begin + i] - mean);
  }
  const float cut = mean + deviations * sqrtf(block_sum_once(squares, scratch[1]) / columns);
  for (int i = threadIdx.x; i < columns; i += kStreamThreads) y[begin + i] = fmaxf(x[begin + i] - cut, 0.f);
}
