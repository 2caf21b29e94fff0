/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI from C: writes a prompt, decodes one token, and compares every number with attention
 * computed here in double over the same keys and values. */
#include <bitdecoding/bitdecoding.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  kKvHeads = 2,
  kQHeads = 4,
  kHeadDim = 64,
  kPageSize = 128,
  kPages = 4,
  kTokens = 200,
  kRow = (kQHeads + 2 * kKvHeads) * kHeadDim /* one fused row of Q, K and V, as engines have it */
};

static int failures = 0;

#define CHECK(condition)                                                                    \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, bd_last_error()); \
      ++failures;                                                                           \
    }                                                                                       \
  } while (0)

/* A fixed sequence of roughly normal numbers: the sum of twelve uniform ones. */
static float next_normal(unsigned* state) {
  double sum = 0;
  for (int i = 0; i < 12; ++i) {
    *state = *state * 1664525u + 1013904223u;
    sum += (double)(*state >> 8) / (double)(1u << 24);
  }
  return (float)(sum - 6.0);
}

/* Attention of the last token's head over all tokens. */
static void exact_attention(const float* rows, int q_head, double* out) {
  const int kv_head = q_head / (kQHeads / kKvHeads);
  const float* query = rows + (kTokens - 1) * kRow + q_head * kHeadDim;
  double score[kTokens];
  double max = -1e300, sum = 0;
  for (int t = 0; t < kTokens; ++t) {
    const float* key = rows + t * kRow + (kQHeads + kv_head) * kHeadDim;
    score[t] = 0;
    for (int d = 0; d < kHeadDim; ++d) score[t] += (double)query[d] * key[d];
    score[t] *= 0.125;
    if (score[t] > max) max = score[t];
  }
  memset(out, 0, kHeadDim * sizeof(double));
  for (int t = 0; t < kTokens; ++t) {
    const float* value = rows + t * kRow + (kQHeads + kKvHeads + kv_head) * kHeadDim;
    const double p = exp(score[t] - max);
    sum += p;
    for (int d = 0; d < kHeadDim; ++d) out[d] += p * value[d];
  }
  for (int d = 0; d < kHeadDim; ++d) out[d] /= sum;
}

static bd_tensor tensor(const float* data, int64_t stride_token) {
  bd_tensor t;
  memset(&t, 0, sizeof(t));
  t.data = data;
  t.stride_token = stride_token;
  t.stride_head = kHeadDim;
  t.dtype = BD_F32;
  return t;
}

/* Builds a step of `count` tokens that end a sequence of `seq_len`; pages 2 and 0 hold it. */
static bd_status build_step(bd_steps* steps, int seq_len, int count) {
  const int32_t table[2] = {2, 0};
  const int32_t query_start[2] = {0, count};
  const int32_t seq_lens[1] = {seq_len};
  int64_t slots[kTokens];
  for (int i = 0; i < count; ++i) {
    const int position = seq_len - count + i;
    slots[i] = (int64_t)table[position / kPageSize] * kPageSize + position % kPageSize;
  }
  bd_step_input input;
  memset(&input, 0, sizeof(input));
  input.struct_size = sizeof(input);
  input.num_requests = 1;
  input.block_table = table;
  input.block_table_stride = 2;
  input.query_start = query_start;
  input.seq_lens = seq_lens;
  input.slot_mapping = slots;
  input.num_tokens = count;
  return bd_steps_build(steps, &input);
}

static bd_layer* make_layer(bd_runtime* runtime) {
  bd_layer_options options;
  memset(&options, 0, sizeof(options));
  options.struct_size = sizeof(options);
  options.num_layers = 1;
  options.num_q_heads = kQHeads;
  options.num_kv_heads = kKvHeads;
  options.total_kv_heads = kKvHeads;
  options.head_dim = kHeadDim;
  options.page_size = kPageSize;
  options.sm_scale = 0.125f;
  options.window_left = -1;
  bd_layer* layer = NULL;
  CHECK(bd_layer_create(runtime, &options, &layer) == BD_OK);
  return layer;
}

static bd_steps* make_steps(bd_runtime* runtime, int32_t num_slots) {
  bd_steps_options options;
  memset(&options, 0, sizeof(options));
  options.struct_size = sizeof(options);
  options.head_dim = kHeadDim;
  options.page_size = kPageSize;
  options.num_pages = kPages;
  options.num_slots = num_slots;
  options.max_requests = 1;
  bd_steps* steps = NULL;
  CHECK(bd_steps_create(runtime, &options, &steps) == BD_OK);
  return steps;
}

static bd_status write_tokens(bd_layer* layer, bd_steps* steps, bd_cache cache, const float* rows,
                              int count) {
  bd_write_params params;
  memset(&params, 0, sizeof(params));
  params.struct_size = sizeof(params);
  params.layer = layer;
  params.steps = steps;
  params.cache = cache;
  params.key = tensor(rows + kQHeads * kHeadDim, kRow);
  params.value = tensor(rows + (kQHeads + kKvHeads) * kHeadDim, kRow);
  params.num_tokens = count;
  return bd_write(&params);
}

static bd_status attend_last(bd_layer* layer, bd_steps* steps, bd_cache cache, const float* row,
                             float* output, float* lse) {
  bd_attend_params params;
  memset(&params, 0, sizeof(params));
  params.struct_size = sizeof(params);
  params.layer = layer;
  params.steps = steps;
  params.cache = cache;
  params.query = tensor(row, kRow);
  params.key = tensor(row + kQHeads * kHeadDim, kRow);
  params.value = tensor(row + (kQHeads + kKvHeads) * kHeadDim, kRow);
  params.output = tensor(output, kQHeads * kHeadDim);
  params.lse = lse;
  params.num_tokens = 1;
  return bd_attend(&params);
}

/* Relative L2 error of the decoded token, all heads together. */
static double decode_error(const float* rows, const float* output) {
  double error = 0, norm = 0;
  for (int h = 0; h < kQHeads; ++h) {
    double exact[kHeadDim];
    exact_attention(rows, h, exact);
    for (int d = 0; d < kHeadDim; ++d) {
      const double e = output[h * kHeadDim + d] - exact[d];
      error += e * e;
      norm += exact[d] * exact[d];
    }
  }
  return sqrt(error / norm);
}

/* Page 2, whose 128 tokens are all written, leaves the process, its memory is lost, and it returns:
 * the same bytes. */
static void exchange_page(bd_layer* layer, bd_cache cache, const char* format) {
  int64_t num_bytes = 0;
  CHECK(bd_page_export_bytes(layer, &num_bytes) == BD_OK);
  CHECK(num_bytes == 32 + cache.stride_page);
  unsigned char* file = malloc((size_t)num_bytes);
  CHECK(bd_page_export(layer, &cache, 2, file, num_bytes) == BD_OK);
  bd_page_tag tag;
  memset(&tag, 0, sizeof(tag));
  tag.struct_size = sizeof(tag);
  CHECK(bd_page_tag_read(file, num_bytes, &tag) == BD_OK);
  CHECK(strcmp(tag.format, format) == 0 && tag.version == 1);
  CHECK(tag.head_dim == kHeadDim && tag.page_size == kPageSize);
  CHECK(tag.num_kv_heads == kKvHeads && tag.first_kv_head == 0);

  unsigned char* page = (unsigned char*)cache.pages + 2 * cache.stride_page;
  unsigned char* kept = malloc((size_t)cache.stride_page);
  memcpy(kept, page, (size_t)cache.stride_page);
  memset(page, 0xFF, (size_t)cache.stride_page);
  CHECK(bd_page_import(layer, &cache, 2, file, num_bytes - 1) == BD_CORRUPT);
  CHECK(page[0] == 0xFF);
  CHECK(bd_page_import(layer, &cache, 2, file, num_bytes) == BD_OK);
  CHECK(memcmp(page, kept, (size_t)cache.stride_page) == 0);
  free(kept);
  free(file);
}

static void run_mode(const char* backend, const char* recipe, double tolerance) {
  bd_runtime_options options;
  memset(&options, 0, sizeof(options));
  options.struct_size = sizeof(options);
  options.recipe_json = recipe;
  options.backend = backend;
  options.num_threads = 1;
  bd_runtime* runtime = NULL;
  CHECK(bd_runtime_create(&options, &runtime) == BD_OK);
  if (runtime == NULL) return;
  CHECK(strstr(bd_runtime_describe(runtime), backend) != NULL);

  bd_page_info info;
  memset(&info, 0, sizeof(info));
  info.struct_size = sizeof(info);
  CHECK(bd_page_info_get(runtime, kHeadDim, kPageSize, 1, &info) == BD_OK);
  const int32_t num_slots = info.min_slots > 0 ? info.min_slots + 8 : 0;

  bd_cache cache;
  memset(&cache, 0, sizeof(cache));
  cache.num_pages = kPages;
  cache.stride_head = info.head_bytes;
  cache.stride_page = info.head_bytes * kKvHeads;
  cache.pages = malloc((size_t)(cache.stride_page * kPages));
  cache.num_slots = num_slots;
  cache.shadow = malloc((size_t)(info.slot_bytes_per_head * kKvHeads * num_slots + 2));
  memset(cache.pages, 0xFF, (size_t)(cache.stride_page * kPages)); /* stale bytes: NaN everywhere */
  memset(cache.shadow, 0xFF, (size_t)(info.slot_bytes_per_head * kKvHeads * num_slots + 2));

  float* rows = malloc(sizeof(float) * kTokens * kRow);
  unsigned seed = 12345;
  for (int i = 0; i < kTokens * kRow; ++i) rows[i] = next_normal(&seed);

  bd_layer* layer = make_layer(runtime);
  bd_steps* steps = make_steps(runtime, num_slots);
  CHECK(build_step(steps, kTokens - 1, kTokens - 1) == BD_OK);
  CHECK(write_tokens(layer, steps, cache, rows, kTokens - 1) == BD_OK);
  CHECK(build_step(steps, kTokens, 1) == BD_OK);
  const float* last = rows + (kTokens - 1) * kRow;
  CHECK(write_tokens(layer, steps, cache, last, 1) == BD_OK);

  float output[kQHeads * kHeadDim];
  float lse[kQHeads];
  memset(output, 0xFF, sizeof(output));
  memset(lse, 0xFF, sizeof(lse));
  CHECK(attend_last(layer, steps, cache, last, output, lse) == BD_OK);
  const double error = decode_error(rows, output);
  printf("%s %s: relative error %.5f (tolerance %.5f)\n", backend, recipe, error, tolerance);
  CHECK(error <= tolerance);
  for (int h = 0; h < kQHeads; ++h) CHECK(isfinite(lse[h]));

  exchange_page(layer, cache, bd_runtime_recipe_value(runtime, "format"));

  bd_counters counters;
  memset(&counters, 0, sizeof(counters));
  counters.struct_size = sizeof(counters);
  CHECK(bd_counters_get(runtime, &counters) == BD_OK);
  CHECK(counters.steps == 2);
  CHECK(counters.non_finite == 0 && counters.corrupt_scales == 0);

  /* Handles may end in any order. */
  bd_runtime_destroy(runtime);
  bd_layer_destroy(layer);
  bd_steps_destroy(steps);
  free(rows);
  free(cache.pages);
  free(cache.shadow);
}

static void check_errors(void) {
  bd_runtime* runtime = NULL;
  bd_runtime_options options;
  memset(&options, 0, sizeof(options));
  CHECK(bd_runtime_create(NULL, &runtime) == BD_INVALID_ARGUMENT);
  CHECK(bd_runtime_create(&options, &runtime) == BD_INVALID_ARGUMENT);
  CHECK(strstr(bd_last_error(), "struct_size is 0") != NULL);
  options.struct_size = sizeof(options);
  options.backend = "gpu";
  CHECK(bd_runtime_create(&options, &runtime) == BD_INVALID_ARGUMENT);
  CHECK(strstr(bd_last_error(), "gpu") != NULL);
  options.backend = "reference";
  options.recipe_json = "{\"mode\": \"nvfp5\"}";
  options.origin = "the test";
  CHECK(bd_runtime_create(&options, &runtime) == BD_INVALID_ARGUMENT);
  CHECK(strncmp(bd_last_error(), "the test: ", 10) == 0);
  CHECK(runtime == NULL);
  bd_runtime_destroy(NULL);
  bd_layer_destroy(NULL);
  bd_steps_destroy(NULL);
}

int main(int argc, char** argv) {
  const char* backend = argc > 1 ? argv[1] : "reference";
  CHECK(bd_abi_version() == BD_ABI_VERSION);
  check_errors();
  /* BF16 pages round each of K and V once: 2^-9 relative at most for an element; V's error averages
   * over the tokens, K's moves the scores by about 2^-9 * |q||k| / 8. */
  run_mode(backend, "{\"mode\": \"bf16\"}", 0.01);
  /* E4M3 has 3 mantissa bits: an error of 2.6 % of an element, a little over that of the result. */
  run_mode(backend, "{\"mode\": \"fp8\"}", 0.06);
  /* NVFP4: .095 for V (amax6 on Gaussian values) and about as much through the scores, which are of
   * unit variance here: sqrt(2) * .095 = .13, less what sink and tail keep in BF16. */
  run_mode(backend, "{\"mode\": \"nvfp4\"}", 0.2);
  run_mode(backend, "{\"mode\": \"bitdecoding-nvfp4\", \"key_shift\": false}", 0.16);
  /* MXFP4's relative error is .112 by search. */
  run_mode(backend, "{\"mode\": \"bitdecoding-mxfp4\", \"key_shift\": false}", 0.18);
  if (failures > 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures > 0 ? 1 : 0;
}
