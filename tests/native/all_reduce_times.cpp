// What the sum of all ranks' parts takes: the kernel of shared memory, and MPI_Allreduce, in turn. For mpirun, on one
// machine; tests/programs/all_reduce_alone.py compiles and starts it.
//
//   all_reduce_times ROUNDS FILE   FILE: in /dev/shm, made and removed by rank 0
//
// Before each sum, every rank writes its part and meets the others. A line of output has the KiB of a part, what was
// timed and its microseconds on the slowest rank, the median of the rounds and the best tenth.
#include <fcntl.h>
#include <mpi.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ranks/all_reduce_kernel.h"
#include "ranks/window.h"

namespace ingot {

void Team::barrier() const {}  // there is one thread

namespace {

constexpr int64_t kMost = 4096, kSizes[] = {8, 64, 512, kMost};  // KiB of a part
constexpr double kTimeout = 30.0;

struct HugePages {  // as a session's memory
  explicit HugePages(int64_t numbers) : bytes(static_cast<size_t>(numbers) * sizeof(float)) {
    void* const found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) std::abort();
    madvise(found, bytes, MADV_HUGEPAGE);
    data = static_cast<float*>(found);
    std::fill_n(data, numbers, 1.0f);
  }
  size_t bytes;
  float* data;
};

struct Form {
  const char* name;
  bool in_slot;                              // where the part lies
  std::function<const float*(int64_t)> sum;  // of so many numbers, and where they are
};

struct Times {
  std::vector<double> sum, with_reader;  // microseconds

  static double at(std::vector<double>& times, size_t tenths) {
    std::ranges::sort(times);
    return times[times.size() * tenths / 10];
  }
};

class Ranks {
 public:
  Ranks(int rank, int count, const std::string& path)
      : rank_(rank), window_(path, rank, shape(count), kTimeout), x_(kNumbers), y_(kNumbers), residual_(kNumbers) {}

  static WindowShape shape(int count) { return {count, kMost * 1024, 8}; }

  void measure(int64_t kib, int rounds) {
    const int64_t numbers = kib * 256;
    const std::vector<Form> forms{
        {"ingot, sums left where the ranks meet", true, [&](int64_t n) { return reduce(n, true); }},
        {"ingot, sums on every rank", true, [&](int64_t n) { return reduce(n, false); }},
        {"MPI_Allreduce", false,
         [&](int64_t n) {
           MPI_Allreduce(x_.data, y_.data, static_cast<int>(n), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
           return y_.data;
         }},
        {"MPI_Allreduce in place", false,
         [&](int64_t n) {
           MPI_Allreduce(MPI_IN_PLACE, x_.data, static_cast<int>(n), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
           return x_.data;
         }},
    };
    std::vector<Times> times(forms.size());
    for (int round = 0; round < rounds; ++round)
      for (size_t i = 0; i < forms.size(); ++i) once(forms[i], numbers, times[i]);
    for (size_t i = 0; i < forms.size() && rank_ == 0; ++i)
      std::printf("%ld|%s|%.2f|%.2f|%.2f|%.2f\n", static_cast<long>(kib), forms[i].name, Times::at(times[i].sum, 5),
                  Times::at(times[i].sum, 1), Times::at(times[i].with_reader, 5), Times::at(times[i].with_reader, 1));
  }

 private:
  static constexpr int64_t kNumbers = kMost * 256;

  const float* reduce(int64_t n, bool common) {
    auto* const y = common ? reinterpret_cast<float*>(window_.common(0)) : y_.data;
    all_reduce({&window_, {1, 0, "sum"}, nullptr, y, 1, n, common}, Team{});
    return y;
  }

  void once(const Form& form, int64_t n, Times& times) {
    auto* const part = form.in_slot ? reinterpret_cast<float*>(window_.own(0)) : x_.data;
    ++step_;
    for (int64_t i = 0; i < n; ++i) part[i] = static_cast<float>((step_ + i) % 64 + rank_);
    MPI_Barrier(MPI_COMM_WORLD);  // no rank sleeps when the others come
    begin();
    const double start = MPI_Wtime();
    const float* const sums = form.sum(n);
    const double made = MPI_Wtime();
    for (int64_t i = 0; i < n; ++i) residual_.data[i] += sums[i];
    const double end = MPI_Wtime();
    for (int64_t i = 0; i < n; ++i)
      if (sums[i] != expected(i)) MPI_Abort(MPI_COMM_WORLD, 3);
    double own[] = {made - start, end - start}, slowest[2];
    MPI_Allreduce(own, slowest, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    times.sum.push_back(1e6 * slowest[0]);
    times.with_reader.push_back(1e6 * slowest[1]);
  }

  float expected(int64_t i) const {
    const int ranks = window_.count();
    return static_cast<float>(ranks * ((step_ + i) % 64) + ranks * (ranks - 1) / 2);
  }

  void begin() {
    if (rank_ == 0) {
      const int32_t nothing = 0;
      window_.announce({&nothing, 1});
      window_.begin_step();
    } else {
      std::vector<int32_t> batch;
      if (window_.next_step(batch, [] { return false; }) != NextStep::kBegun) MPI_Abort(MPI_COMM_WORLD, 4);
    }
  }

  int rank_;
  int64_t step_ = 0;
  Window window_;
  HugePages x_, y_, residual_;
};

}  // namespace
}  // namespace ingot

int main(int count, char** given) {
  MPI_Init(&count, &given);
  if (count != 3) MPI_Abort(MPI_COMM_WORLD, 2);
  int rank = 0, ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const std::string path = given[2];
  if (rank == 0) {
    const int file = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file < 0 || ftruncate(file, static_cast<off_t>(ingot::Ranks::shape(ranks).bytes())) != 0)
      MPI_Abort(MPI_COMM_WORLD, 5);
    close(file);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  auto all = std::make_unique<ingot::Ranks>(rank, ranks, path);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) unlink(path.c_str());
  for (const int64_t kib : ingot::kSizes) all->measure(kib, std::max(1, std::atoi(given[1])));
  MPI_Finalize();
  return 0;
}
