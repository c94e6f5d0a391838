// What the kernels of experts share.
#pragma once

// Rows that take the same expert: see `group_by_expert`.
struct ExpertTile {
  int expert;
  int first;  // of `pairs`
  int count;  // 0: nothing to do
  int unused;
};
