// The two steps that may take the place of the last one where nothing but its best tokens is wanted: a product with
// 4-bit codes, and the choice of the tokens. Where that does not decide every row, the last step is computed after all.
#pragma once

#include <cstdint>
#include <vector>

#include "execution/bind.h"
#include "sampling/screen_args.h"

namespace ingot {

class Screen {
 public:
  // How often a screen was tried and in how many of these steps it did not decide, rows and candidates of all others.
  struct Counts {
    int64_t steps, undecided, rows, candidates;
  };

  Screen() = default;  // none
  // Throws std::invalid_argument for a plan whose screen does not fit its last step.
  Screen(const PlanSpec& plan, const PlanMemory& memory, const Batch& batch);

  bool exists() const { return !steps_.empty(); }
  bool takes(const Batch& batch) const { return exists() && batch.rows >= 1 && batch.rows <= kScreenRows; }
  void set_counts(const Batch& batch);
  const BoundStep& product() const { return steps_[0]; }
  const BoundStep& choice() const { return steps_[1]; }
  size_t scratch_bytes() const;  // of as many rows as it ever takes

  // After the choice, on every thread alike.
  bool decided() const;
  int32_t token(int32_t row) const { return ids_[static_cast<size_t>(row)]; }
  void count();
  const Counts& counts() const { return counts_; }

 private:
  std::vector<BoundStep> steps_;
  std::vector<int32_t> ids_;  // of the rows of the step
  std::vector<int64_t> candidates_;
  size_t rows_ = 0;
  Counts counts_{};
};

}  // namespace ingot
