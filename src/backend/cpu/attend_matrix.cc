// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/attend_matrix.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "backend/cpu/aligned_buffer.h"
#include "backend/cpu/corrupt_tile.h"
#include "backend/cpu/query.h"
#include "backend/cpu/value_shift.h"
#include "backend/tensor.h"

namespace bitdecoding::cpu {
namespace {

// Buffers of one thread; they grow to the largest item seen and stay.
struct MatrixScratch {
  FloatTileBuffer tile;
  AlignedBuffer<float> rows;  // the query in float, [rows][head_dim]
  AlignedBuffer<float> scale, offset;
  AlignedBuffer<std::uint64_t> masks;  // [kMatrixTiles][padded rows]
  AlignedBuffer<std::uint16_t> query, key, value;
};

MatrixScratch& matrix_scratch() {
  thread_local const auto scratch = std::make_unique<MatrixScratch>();
  return *scratch;
}

// The unit's registers are the thread's while this lives.
class MatrixUnit {
 public:
  explicit MatrixUnit(const MatrixKernels& kernels) : kernels_(kernels) { kernels_.begin(&saved_); }
  ~MatrixUnit() { kernels_.end(&saved_); }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;

 private:
  const MatrixKernels& kernels_;
  MatrixSaved saved_;
};

// One pass over the item's tiles: its pages, or its BF16 rows.
class MatrixPass {
 public:
  MatrixPass(const AttendParams& params, const AttendKernels& kernels, const RequestRows& rows,
             const TileSource& source, const AttendGroup& group, const PartialView& partial,
             bool pages);

  // Returns the first tile that is visible but has no page, or -1.
  std::int64_t run(std::int64_t tile_begin, std::int64_t tile_end);

 private:
  void prepare();
  // Returns the tokens that some row sees.
  std::uint64_t fill_masks(std::int64_t tile, std::uint64_t available, std::uint64_t* masks) const;
  bool is_plain(std::int64_t tile, std::uint64_t seen) const;
  void take(std::int64_t tile, std::uint64_t available, std::uint64_t seen, std::uint64_t* masks);
  void attend_corrupt(std::int64_t tile, const std::uint64_t* masks);
  void flush();

  const AttendParams& params_;
  const AttendKernels& kernels_;
  const RequestRows& rows_;
  const TileSource& source_;
  const AttendGroup& group_;
  MatrixScratch& scratch_;
  int head_dim_;
  bool pages_;
  // Tiled pages are read as they are stored, rotated and shifted: there their values are exact in
  // one term, and the query is rotated instead.
  bool stored_space_;
  float value_outer_;  // what `out` lacks while this lives
  MatrixState state_;
  MatrixTile batch_[kMatrixTiles];
  int batched_ = 0;
};

MatrixPass::MatrixPass(const AttendParams& params, const AttendKernels& kernels,
                       const RequestRows& rows, const TileSource& source, const AttendGroup& group,
                       const PartialView& partial, bool pages)
    : params_(params),
      kernels_(kernels),
      rows_(rows),
      source_(source),
      group_(group),
      scratch_(matrix_scratch()),
      head_dim_(params.layer->geometry.head_dim),
      pages_(pages),
      stored_space_(pages && is_tiled(params.layer->geometry.format)),
      value_outer_(stored_space_ ? outer_scale(params.layer->value_outer, group.kv_head) : 1.0F) {
  // 16 bits of FP32 and FP16 tensors are kept, all 8 of BF16 ones. Pages are exact in one term.
  const int terms = params.query.dtype == DType::kBf16 ? 1 : 2;
  state_.rows = group.capacity;
  state_.head_dim = head_dim_;
  state_.query_terms = stored_space_ ? 2 : terms;
  state_.key_terms = pages ? 1 : terms;
  state_.value_terms = pages ? 1 : terms;
  state_.probability_terms = terms;
  state_.softcap = params.softcap;
  state_.max = partial.max;
  state_.sum = partial.sum;
  state_.out = partial.out;
}

void MatrixPass::prepare() {
  const LayerConfig& layer = *params_.layer;
  const auto rows = static_cast<std::size_t>(group_.capacity);
  std::uint16_t* query =
      scratch_.query.reserve(matrix_left_values(group_.capacity, head_dim_, state_.query_terms));
  scratch_.key.reserve(kMatrixTiles * matrix_right_values(head_dim_, state_.key_terms));
  scratch_.value.reserve(kMatrixTiles * matrix_right_values(head_dim_, state_.value_terms));
  float* scale = scratch_.scale.reserve(rows);
  float* offset = scratch_.offset.reserve(rows);
  std::fill_n(scale, rows, 0.0F);
  std::fill_n(offset, rows, 0.0F);
  float* floats = scratch_.rows.reserve(static_cast<std::size_t>(group_.rows) * head_dim_);
  load_query_rows(params_, rows_.request(), group_.kv_head, group_.first_row, group_.rows, 1.0F,
                  floats);
  if (stored_space_ && layer.key_shift != nullptr) {
    const float* shift = layer.key_shift + std::int64_t{group_.kv_head} * head_dim_;
    for (int r = 0; r < group_.rows; ++r) {
      offset[r] = params_.sm_scale * dot(floats + std::int64_t{r} * head_dim_, shift, head_dim_);
    }
  }
  if (stored_space_ && layer.hadamard) kernels_.matrix->rotate(floats, group_.rows, head_dim_);
  kernels_.matrix->pack_query(floats, group_.rows, head_dim_, state_.query_terms, query, scale);
  const float unit =
      params_.sm_scale * (stored_space_ ? outer_scale(layer.key_outer, group_.kv_head) : 1.0F);
  // A scale flushed to 0 would make NaN of the -infinity of a hidden score.
  constexpr float kLeast = std::numeric_limits<float>::min();
  for (int r = 0; r < group_.rows; ++r) scale[r] = std::max(scale[r] * unit, kLeast);
  if (value_outer_ != 1.0F) {
    for (std::int64_t i = 0; i < std::int64_t{group_.rows} * head_dim_; ++i) {
      state_.out[i] /= value_outer_;
    }
  }
  state_.query = query;
  state_.scale = scale;
  state_.offset = offset;
}

std::uint64_t MatrixPass::fill_masks(std::int64_t tile, std::uint64_t available,
                                     std::uint64_t* masks) const {
  std::uint64_t any = 0;
  for (int r = 0; r < group_.rows;) {  // the rows of a token see the same
    const std::int64_t token = (group_.first_row + r) / rows_.group_size();
    const std::int64_t end = (token + 1) * rows_.group_size() - group_.first_row;
    const std::uint64_t mask =
        pages_ ? rows_.page_mask(token, tile, available) : rows_.bf16_mask(token, tile, available);
    for (; r < group_.rows && r < end; ++r) masks[r] = mask;
    any |= mask;
  }
  return any;
}

// A tile with invalid scales is attended to at once, in floats.
void MatrixPass::attend_corrupt(std::int64_t tile, const std::uint64_t* masks) {
  const int corrupt = source_.load_page_tile(tile, TileSpace::kOriginal, &scratch_.tile);
  for (std::int64_t i = 0; i < std::int64_t{kTileTokens} * head_dim_; ++i) {
    scratch_.tile.value[i] /= value_outer_;
  }
  std::vector<float> query(static_cast<std::size_t>(group_.rows) * head_dim_);
  load_query_rows(params_, rows_.request(), group_.kv_head, group_.first_row, group_.rows,
                  params_.sm_scale, query.data());
  FloatState state;
  state.query = query.data();
  state.max = state_.max;
  state.sum = state_.sum;
  state.out = state_.out;
  state.rows = group_.rows;
  state.head_dim = head_dim_;
  state.softcap = params_.softcap;
  if (attend_corrupt_tile(*kernels_.tile, &scratch_.tile, masks, state)) {
    count_corrupt(params_, corrupt);
  }
}

// Whether the tile's bytes can go to the unit as they are: all of them are of the sequence, all
// scales are valid, and nothing unseen is infinite, as an E8M0 scale that nobody wrote may make it.
bool MatrixPass::is_plain(std::int64_t tile, std::uint64_t seen) const {
  if (!stored_space_ || (tile + 1) * kTileTokens > rows_.request().seq_len) return false;
  const bool finite = params_.layer->geometry.format == Format::kNvfp4;
  if (!finite && seen != ~std::uint64_t{0}) return false;
  DecodeContext context;
  context.format = params_.layer->geometry.format;
  context.head_dim = head_dim_;
  return kernels_.decode->count_nan_scales(context, source_.page_tile(tile)) == 0;
}

// Loads the tile into the batch.
void MatrixPass::take(std::int64_t tile, std::uint64_t available, std::uint64_t seen,
                      std::uint64_t* masks) {
  const MatrixKernels& matrix = *kernels_.matrix;
  std::uint16_t* key =
      scratch_.key.data() + batched_ * matrix_right_values(head_dim_, state_.key_terms);
  std::uint16_t* value =
      scratch_.value.data() + batched_ * matrix_right_values(head_dim_, state_.value_terms);
  if (is_plain(tile, seen)) {
    matrix.unpack_tile(params_.layer->geometry.format, head_dim_, source_.page_tile(tile), key,
                       value);
  } else {
    if (pages_) {
      const TileSpace space = stored_space_ ? TileSpace::kStored : TileSpace::kOriginal;
      if (source_.load_page_tile(tile, space, &scratch_.tile) > 0) {
        return attend_corrupt(tile, masks);
      }
      clear_unseen_values(seen, head_dim_, &scratch_.tile);
    } else {
      source_.load_bf16_tile(tile, available, &scratch_.tile);
    }
    matrix.pack_right(scratch_.tile.key, head_dim_, kTileTokens, state_.key_terms, key);
    matrix.pack_right(scratch_.tile.value, kTileTokens, head_dim_, state_.value_terms, value);
  }
  batch_[batched_++] = {key, value, masks};
  if (batched_ == kMatrixTiles) flush();
}

void MatrixPass::flush() {
  if (batched_ > 0) kernels_.matrix->attend(batch_, batched_, state_);
  batched_ = 0;
}

std::int64_t MatrixPass::run(std::int64_t tile_begin, std::int64_t tile_end) {
  bool prepared = false;
  // Rows that pad the last block see nothing.
  const auto num_masks = static_cast<std::size_t>(group_.capacity) * kMatrixTiles;
  std::fill_n(scratch_.masks.reserve(num_masks), num_masks, 0);
  for (std::int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const std::uint64_t available = rows_.available(tile);
    if (!pages_ && available == 0) continue;
    std::uint64_t* masks = scratch_.masks.data() + std::int64_t{batched_} * group_.capacity;
    const std::uint64_t seen = fill_masks(tile, available, masks);
    if (seen == 0) continue;
    if (!prepared) prepare();
    prepared = true;
    if (pages_ && source_.page_tile(tile) == nullptr) return tile;
    take(tile, available, seen, masks);
  }
  flush();
  if (prepared && value_outer_ != 1.0F) {
    for (std::int64_t i = 0; i < std::int64_t{group_.rows} * head_dim_; ++i) {
      state_.out[i] *= value_outer_;
    }
  }
  return -1;
}

}  // namespace

std::int64_t attend_matrix(const AttendParams& params, const AttendKernels& kernels,
                           const RequestRows& rows, const TileSource& source,
                           const AttendGroup& group, const AttendItem& item,
                           const PartialView& partial) {
  const MatrixUnit unit(*kernels.matrix);
  for (const bool pages : {true, false}) {
    MatrixPass pass(params, kernels, rows, source, group, partial, pages);
    const std::int64_t missing = pass.run(item.tile_begin, item.tile_end);
    if (missing >= 0) return missing;
    // Before BF16 rows, which hold V as it came, join the sums.
    if (pages) add_value_shift(*params.layer, group.kv_head, group.rows, partial);
  }
  return -1;
}

}  // namespace bitdecoding::cpu
