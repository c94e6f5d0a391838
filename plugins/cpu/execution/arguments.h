// What a step's kernel is called with: the struct of its op, and what a session does with every such struct alike.
#pragma once

#include <any>
#include <typeinfo>
#include <utility>

#include "execution/batch.h"
#include "execution/registry.h"

namespace ingot {

class Arguments {
 public:
  Arguments() = default;
  template <typename Args>
  Arguments(Args args) : value_(std::move(args)), kind_(&kKind<Args>) {}

  template <typename Args>
  const Args* as() const {  // null for another struct
    return std::any_cast<Args>(&value_);
  }
  template <typename Args>
  Args* as() {
    return std::any_cast<Args>(&value_);
  }
  const void* data() const { return kind_->data(value_); }
  const std::type_info& type() const { return value_.type(); }

  // The counts of a batch: rows of a step, and where the struct has them, how its work is shared, and the KV blocks.
  void set_counts(const Batch& batch, int64_t rows, int32_t tactic) { kind_->set_counts(value_, batch, rows, tactic); }
  // The kernel, with x in another place.
  void run_on(const float* x, const Kernel& kernel, const Team& team) const { kind_->run_on(value_, x, kernel, team); }

 private:
  struct Kind {
    const void* (*data)(const std::any& value);
    void (*set_counts)(std::any& value, const Batch& batch, int64_t rows, int32_t tactic);
    void (*run_on)(const std::any& value, const float* x, const Kernel& kernel, const Team& team);
  };

  template <typename Args>
  static void set_counts_of(std::any& value, const Batch& batch, int64_t rows, int32_t tactic) {
    Args& args = *std::any_cast<Args>(&value);
    if constexpr (requires { args.rows = rows; }) args.rows = rows;
    if constexpr (requires { args.tactic = tactic; }) args.tactic = tactic;
    if constexpr (requires { args.kv.block_tables; }) {
      args.kv.tokens = batch.tokens;
      args.kv.sequences = batch.sequences;
      args.kv.block_tables = batch.block_tables.data() + args.kv.group * batch.sequences * batch.table_width;
      args.kv.table_width = batch.table_width;
    }
  }
  template <typename Args>
  static void run_on_of(const std::any& value, const float* x, const Kernel& kernel, const Team& team) {
    Args args = *std::any_cast<Args>(&value);
    if constexpr (requires { args.x = x; }) args.x = x;
    kernel.run(&args, team);
  }
  template <typename Args>
  static constexpr Kind kKind{
      [](const std::any& value) -> const void* { return std::any_cast<Args>(&value); },
      set_counts_of<Args>,
      run_on_of<Args>,
  };

  std::any value_;
  const Kind* kind_ = nullptr;
};

}  // namespace ingot
