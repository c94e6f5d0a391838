// A session's KV memory, as tests, comparisons and other servers read and write it: a layer's part of a block, or a
// block as it lies in the pool, of this rank or of all.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "execution/session.h"

namespace ingot {
namespace {

constexpr int32_t kReadBlock = -1, kWriteBlock = -2;  // in place of a number of tokens: no batch, but a block's move

}  // namespace

void Session::fill_kv(float value) {
  const auto held = lock();
  require_open();
  for (size_t group = 0; group < kv_.size(); ++group) {
    if (kv_sizes_[group].itemsize == 2) {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      std::fill_n(reinterpret_cast<uint16_t*>(kv_[group].data()), kv_[group].bytes() / 2,
                  static_cast<uint16_t>(bits >> 16));
    } else {  // the scales of an int8 cache lie on multiples of 4; its codes hold the number's bytes
      std::fill_n(reinterpret_cast<float*>(kv_[group].data()), kv_[group].bytes() / 4, value);
    }
  }
}

void Session::read_kv(int64_t layer, int64_t block, bool values, std::span<std::byte> to) {
  const auto held = lock();
  std::memcpy(to.data(), kv_block(layer, block, values, to.size()), to.size());
}

void Session::write_kv(int64_t layer, int64_t block, bool values, std::span<const std::byte> from) {
  const auto held = lock();
  std::memcpy(kv_block(layer, block, values, from.size()), from.data(), from.size());
}

std::byte* Session::kv_block(int64_t layer, int64_t block, bool values, size_t bytes) const {
  require_open();
  const auto [number, place] = find_layer(plan_.caches, layer);
  const auto group = static_cast<size_t>(number);
  if (block < 0 || block >= plan_.caches[group].num_blocks) throw std::invalid_argument("there is no such KV block");
  if (bytes != kv_block_bytes(layer, values)) throw std::invalid_argument("a KV block has another size");
  return kv_[group].data() + block * kv_sizes_[group].block + kv_sizes_[group].offset(place, values);
}

size_t Session::kv_block_bytes(int64_t layer, bool values) const {
  const auto [group, place] = find_layer(plan_.caches, layer);
  const CacheSizes& sizes = kv_sizes_[static_cast<size_t>(group)];
  const std::vector<int64_t>& state = plan_.caches[static_cast<size_t>(group)].state;
  if (!state.empty()) return values ? 0 : static_cast<size_t>(state[static_cast<size_t>(place)]) * sizeof(float);
  return static_cast<size_t>(values ? sizes.v_block : sizes.k_block);
}

size_t Session::block_bytes(int64_t group) const {
  if (group < 0 || group >= static_cast<int64_t>(kv_sizes_.size()))
    throw std::invalid_argument("there is no such cache group");
  return static_cast<size_t>(kv_sizes_[static_cast<size_t>(group)].block);
}

void Session::read_block(int64_t group, int64_t block, std::span<std::byte> to) {
  const auto held = lock();
  std::memcpy(to.data(), whole_block(group, block, to.size()), to.size());
}

void Session::write_block(int64_t group, int64_t block, std::span<const std::byte> from) {
  const auto held = lock();
  std::memcpy(whole_block(group, block, from.size()), from.data(), from.size());
}

// Tells the other ranks of a move, once all is checked that could be wrong with it; gives the own block.
template <class Byte>
std::byte* Session::begin_move(int32_t kind, int64_t group, int64_t block, std::span<const std::span<Byte>> parts) {
  require_open();
  if (group_ == nullptr || group_->rank() != 0)
    throw std::invalid_argument("blocks of all ranks are moved by the first of several");
  if (!announced_.empty()) throw std::invalid_argument("blocks of all ranks move while no announced step is under way");
  if (parts.empty() || group_->count() % std::ssize(parts) != 0)
    throw std::invalid_argument("a block has a part for each rank, or for as many ranks each");
  for (const auto& each : parts)
    if (each.size() > group_->slot_bytes()) throw std::invalid_argument("a KV block has another size");
  std::byte* const own = whole_block(group, block, parts[0].size());
  packed_ = {kind, static_cast<int32_t>(group), static_cast<int32_t>(block),
             static_cast<int32_t>(group_->count() / std::ssize(parts))};
  group_->announce(packed_);
  group_->begin_step();
  return own;
}

void Session::read_ranks_block(int64_t group, int64_t block, std::span<const std::span<std::byte>> parts) {
  const auto held = lock();
  const std::byte* const own = begin_move(kReadBlock, group, block, parts);
  std::ranges::copy_n(own, std::ssize(parts[0]), parts[0].begin());
  if (!group_->gather({}, parts, packed_[3])) throw RankError(group_->failure());
}

void Session::write_ranks_block(int64_t group, int64_t block, std::span<const std::span<const std::byte>> parts) {
  const auto held = lock();
  std::byte* const own = begin_move(kWriteBlock, group, block, parts);
  std::ranges::copy(parts[0], own);
  if (!group_->scatter({}, parts, packed_[3])) throw RankError(group_->failure());
}

// Whether the step that has begun is a move of a block.
bool Session::follow_move() {
  if (packed_.size() != 4 || packed_[0] >= 0) return false;
  const size_t bytes = block_bytes(packed_[1]);
  std::byte* const own = whole_block(packed_[1], packed_[2], bytes);
  const bool moved = packed_[0] == kReadBlock ? group_->gather(std::span<const std::byte>(own, bytes), {}, packed_[3])
                                              : group_->scatter(std::span(own, bytes), {}, packed_[3]);
  if (!moved) throw RankError(group_->failure());
  return true;
}

std::byte* Session::whole_block(int64_t group, int64_t block, size_t bytes) const {
  require_open();
  if (bytes != block_bytes(group)) throw std::invalid_argument("a KV block has another size");
  const auto at = static_cast<size_t>(group);
  if (block < 0 || block >= plan_.caches[at].num_blocks) throw std::invalid_argument("there is no such KV block");
  return kv_[at].data() + block * kv_sizes_[at].block;
}

int64_t Session::kv_bytes() const {
  int64_t bytes = 0;
  for (const CacheSizes& sizes : kv_sizes_) bytes += sizes.total;
  return bytes;
}

}  // namespace ingot
