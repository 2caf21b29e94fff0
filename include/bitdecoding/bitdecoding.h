/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI of bitdecoding: the three verbs over raw pointers and explicit strides.
 *
 * Conventions
 *   - Every function returns bd_status (0 = ok) unless stated; bd_last_error() is the sentence of
 *     the calling thread's last failure. No C++ exception crosses this boundary.
 *   - Every options and params struct begins with `struct_size`; set it to sizeof(the struct). A
 *     caller built against another layout is refused with BD_INVALID_ARGUMENT.
 *   - Handles: create returns them, the matching destroy ends them (NULL is allowed). A layer and
 *     steps keep what they need of their runtime: destroy them in any order.
 *   - Thread safety: bd_runtime, bd_layer and bd_counters_get may be used from any thread;
 *     a bd_steps is one thread's at a time, and must not be built while bd_write or bd_attend use
 *     it.
 *   - Pointers in params are borrowed for the call. Strides of tensors are in elements, strides of
 *     pages in bytes.
 */
#ifndef BITDECODING_BITDECODING_H_
#define BITDECODING_BITDECODING_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define BD_API __declspec(dllexport)
#else
#define BD_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define BD_ABI_VERSION 1

typedef enum bd_status {
  BD_OK = 0,
  BD_INVALID_ARGUMENT = 1,
  BD_OUT_OF_RANGE = 2,
  BD_UNSUPPORTED = 3,
  BD_NOT_FOUND = 4,
  BD_CORRUPT = 5,
  BD_IO = 6,
  BD_RESOURCE_EXHAUSTED = 7,
  BD_INTERNAL = 8
} bd_status;

typedef enum bd_dtype { BD_F32 = 1, BD_BF16 = 2, BD_F16 = 3 } bd_dtype;

BD_API int bd_abi_version(void);        /* BD_ABI_VERSION of the library that was loaded */
BD_API const char* bd_version(void);    /* "0.1.0" */
BD_API const char* bd_last_error(void); /* never NULL; valid until the thread's next call */

/* ---- runtime: one a process: recipe, backend, sidecar, counters ---- */

typedef struct bd_runtime bd_runtime;

typedef struct bd_runtime_options {
  size_t struct_size;
  const char* recipe_json; /* NULL = recipe_file, or bitdecoding-nvfp4 without key shift */
  const char* recipe_file; /* read when recipe_json is NULL; its relative paths are its folder's */
  const char* origin;      /* begins error messages about the recipe; nullable */
  const char* backend;     /* "cpu", "reference", "cuda"; NULL = "cpu" */
  const char* isa;         /* NULL = best of this machine */
  const char* model;       /* name written into sidecars and compared with theirs; nullable */
  int32_t num_threads;     /* 0 = CPUs of the calling thread's affinity mask */
  int32_t device;          /* "cuda": ordinal of the GPU; else 0 */
} bd_runtime_options;

BD_API bd_status bd_runtime_create(const bd_runtime_options* options, bd_runtime** runtime);
BD_API void bd_runtime_destroy(bd_runtime* runtime);
/* JSON: version, backend, isa, threads, recipe (resolved), sidecar (path, layers, heads, head_dim),
 * outer_scales (path, layers, heads, key, value), warnings (sentences to log). Never NULL. Valid
 * until the next bd_runtime_load_key_shift or the runtime's end.
 */
BD_API const char* bd_runtime_describe(const bd_runtime* runtime);
/* Replaces the sidecar key means, and tau where the recipe leaves it to calibration; the path is
 * the recipe's key_shift_file otherwise. Refused while the runtime has layers: pages written under
 * other means would be read wrongly. A refusal leaves the runtime as it was. */
BD_API bd_status bd_runtime_load_key_shift(bd_runtime* runtime, const char* path);
/* One key of the resolved recipe as text ("format" -> "nvfp4"); NULL for an unknown key. Valid
 * until the next bd_runtime_load_key_shift or the runtime's end. */
BD_API const char* bd_runtime_recipe_value(const bd_runtime* runtime, const char* key);

typedef struct bd_page_info {
  size_t struct_size;
  int64_t head_bytes;   /* one KV head of one page, K and V */
  int32_t group_tokens; /* tokens of a shadow group */
  int32_t groups_per_page;
  int64_t slot_bytes_per_head;   /* BF16 bytes of one slot of one layer and KV head */
  int32_t min_slots;             /* that max_requests requests need at the least */
  int32_t bytes_per_token_x1000; /* of one KV head, K and V, in thousandths */
} bd_page_info;

BD_API bd_status bd_page_info_get(const bd_runtime* runtime, int32_t head_dim, int32_t page_size,
                                  int32_t max_requests, bd_page_info* info);

/* ---- layers ------------------------------------------------------------------------------------
 */

typedef struct bd_layer bd_layer;

typedef struct bd_layer_options {
  size_t struct_size;
  int32_t layer_index;    /* row of the sidecar */
  int32_t num_layers;     /* of the model, all ranks and groups: checked against the sidecar */
  int32_t num_q_heads;    /* of this rank */
  int32_t num_kv_heads;   /* of this rank */
  int32_t first_kv_head;  /* this rank's first head within the model */
  int32_t total_kv_heads; /* of the model: checked against the sidecar */
  int32_t head_dim;
  int32_t page_size;
  float sm_scale;      /* 2^-16 to 2^16 */
  float softcap;       /* 0 = off; else 2^-16 to 2^16 */
  int32_t window_left; /* -1 = off */
  int32_t reserved;
  const float* attn_sink; /* [num_q_heads], copied; nullable */
  /* Exponents of the outer scales, -64 to 64, [num_kv_heads], copied; NULL = those of the recipe's
   * outer_scale_file, else 0. Not together with that file. */
  const int8_t* key_outer;
  const int8_t* value_outer;
} bd_layer_options;

BD_API bd_status bd_layer_create(bd_runtime* runtime, const bd_layer_options* options,
                                 bd_layer** layer);
BD_API void bd_layer_destroy(bd_layer* layer);

/* ---- steps: the shadow directory and the plan of the current step; one a group of layers -------
 */

typedef struct bd_steps bd_steps;

typedef struct bd_steps_options {
  size_t struct_size;
  int32_t head_dim; /* any of the group's layers: only page_size and the format matter */
  int32_t page_size;
  int64_t num_pages;
  int32_t num_slots;
  int32_t max_requests;
} bd_steps_options;

typedef struct bd_step_input {
  size_t struct_size;
  int32_t num_requests;
  int32_t reserved;
  const int32_t* block_table;  /* [num_requests][block_table_stride], page numbers */
  int64_t block_table_stride;  /* elements */
  const int32_t* query_start;  /* [num_requests + 1], rows of the step's tensors */
  const int32_t* seq_lens;     /* [num_requests], tokens after this step */
  const int64_t* slot_mapping; /* [num_tokens], page * page_size + row; < 0 = skip */
  int64_t num_tokens;
} bd_step_input;

BD_API bd_status bd_steps_create(bd_runtime* runtime, const bd_steps_options* options,
                                 bd_steps** steps);
BD_API void bd_steps_destroy(bd_steps* steps);
BD_API bd_status bd_steps_build(bd_steps* steps, const bd_step_input* input);
/* Drops the BF16 rows of a page whose bytes the caller has replaced (an imported page, say): they
 * would be read in place of its codes. The steps have no plan until the next bd_steps_build. */
BD_API bd_status bd_steps_forget(bd_steps* steps, int64_t page);

/* ---- the verbs ---------------------------------------------------------------------------------
 */

typedef struct bd_tensor {
  const void* data; /* [tokens][heads][head_dim], head_dim contiguous */
  int64_t stride_token;
  int64_t stride_head;
  int32_t dtype; /* bd_dtype */
  int32_t reserved;
} bd_tensor;

typedef struct bd_cache {
  void* pages; /* (page, head) begins at pages + page * stride_page + head * stride_head */
  int64_t num_pages;
  int64_t stride_page; /* bytes */
  int64_t stride_head; /* bytes */
  void* shadow;        /* BF16 [num_slots][num_kv_heads][2][group_tokens][head_dim]; nullable when
                          num_slots is 0 */
  int64_t num_slots;
} bd_cache;

typedef struct bd_write_params {
  size_t struct_size;
  bd_layer* layer;
  bd_steps* steps;
  bd_cache cache;
  bd_tensor key;
  bd_tensor value;
  int64_t num_tokens; /* rows of key and value; at least the step's num_tokens */
} bd_write_params;

typedef struct bd_attend_params {
  size_t struct_size;
  bd_layer* layer;
  bd_steps* steps;
  bd_cache cache;
  bd_tensor query;
  bd_tensor key;
  bd_tensor value;
  bd_tensor output; /* written; data is not const here */
  float* lse;       /* [num_tokens][num_q_heads]; nullable */
  int64_t num_tokens;
} bd_attend_params;

/* bd_write stores the step's rows of one layer, bd_attend reads them back: write first. Every
 * pointer, count and stride is checked before memory is touched. */
BD_API bd_status bd_write(const bd_write_params* params);
BD_API bd_status bd_attend(const bd_attend_params* params);

/* Asks the kernel for huge pages behind [data, data + bytes) (Linux madvise); BD_OK where it cannot
 * be had. `advised_bytes` is nullable. */
BD_API bd_status bd_advise_huge_pages(void* data, int64_t bytes, int64_t* advised_bytes);

/* ---- CUDA: the verbs on device memory -----------------------------------------------------------
 */

/* For a runtime whose backend is "cuda"; any other is refused, and a library that was built without
 * CUDA (BITDECODING_BUILD_CUDA) answers BD_UNSUPPORTED. Layers, page sizes and params structs are
 * those of the verbs above, with device pointers: pages, BF16 rows, tensors, lse, and in
 * bd_step_input block_table, query_start, seq_lens and slot_mapping. `stream` is a cudaStream_t,
 * NULL the default one. Recipes: nvfp4 and mxfp4 pages; arithmetic int8, which is a CPU's, runs as
 * wide; value means are not subtracted.
 *
 * The calls that take a stream only enqueue: no synchronisation, no allocation, no look at device
 * data. A step may be captured in a CUDA graph and replayed after further bd_cuda_steps_build with
 * the same numbers of requests and tokens and the same pointers: padding is requests without query
 * rows and tokens with slot -1.
 */

typedef struct bd_cuda_steps_options {
  size_t struct_size;
  bd_steps_options steps; /* its struct_size, too */
  int32_t num_q_heads;    /* of each layer of the group */
  int32_t num_kv_heads;
  int64_t max_step_tokens;
  int64_t max_pages_per_request; /* the longest row of a block table */
  const int32_t* windows;        /* window_left of the group's layers, without repeats; host */
  int32_t num_windows;           /* 1 to 4 */
  int32_t reserved;
} bd_cuda_steps_options;

typedef struct bd_cuda_memory {
  size_t struct_size;
  int64_t steps_bytes;  /* of device memory, that bd_cuda_steps_create takes */
  int64_t attend_bytes; /* that the runtime's first layer of this head_dim takes */
} bd_cuda_memory;

typedef struct bd_gather_params {
  size_t struct_size;
  bd_layer* layer;
  bd_steps* steps;
  bd_cache cache;
  int32_t request;
  int32_t with_shadow; /* not 0: positions that are in BF16 come from their BF16 rows */
  int64_t begin;       /* positions [begin, end) of the request */
  int64_t end;
  bd_tensor key; /* written: [end - begin][num_kv_heads][head_dim], as the rows once came */
  bd_tensor value;
} bd_gather_params;

/* Two partial results of the same queries; every tensor contiguous. */
typedef struct bd_merge_params {
  size_t struct_size;
  bd_runtime* runtime;
  int64_t num_tokens;
  int32_t num_heads;
  int32_t head_dim;
  int32_t dtype; /* bd_dtype of a, b and out */
  int32_t reserved;
  const void* a; /* [num_tokens][num_heads][head_dim] */
  const void* b;
  const float* lse_a; /* [num_tokens][num_heads] */
  const float* lse_b;
  void* out;  /* may be a or b */
  float* lse; /* nullable; may be lse_a or lse_b */
} bd_merge_params;

/* How much device memory such steps will take; nothing is allocated. */
BD_API bd_status bd_cuda_memory_get(const bd_runtime* runtime, const bd_cuda_steps_options* options,
                                    bd_cuda_memory* memory);
/* Ended by bd_steps_destroy. */
BD_API bd_status bd_cuda_steps_create(bd_runtime* runtime, const bd_cuda_steps_options* options,
                                      bd_steps** steps);
/* One launch. No request has more than max_query_len rows. The input's device memory stays borrowed
 * until the step's last launch has run. */
BD_API bd_status bd_cuda_steps_build(bd_steps* steps, const bd_step_input* input,
                                     int32_t max_query_len, void* stream);
BD_API bd_status bd_cuda_steps_forget(bd_steps* steps, int64_t page, void* stream);
BD_API bd_status bd_cuda_write(const bd_write_params* params, void* stream);
/* Requests of at most 8 query rows; the rows of longer ones are left alone: their chunk attends to
 * itself and to bd_cuda_gather's rows elsewhere, and bd_cuda_merge joins the two. */
BD_API bd_status bd_cuda_attend(const bd_attend_params* params, void* stream);
BD_API bd_status bd_cuda_gather(const bd_gather_params* params, void* stream);
BD_API bd_status bd_cuda_merge(const bd_merge_params* params, void* stream);

/* ---- pages that leave the process --------------------------------------------------------------
 */

/* A page of one layer as bytes: a tag of 32 bytes, then the page of each of the layer's KV heads,
 * the same bytes from every backend (docs/format.md). BF16 rows, key means and outer scales are no
 * part of it: it means the same only to a layer that has the same key means and outer scales. The
 * caller keeps bd_write and bd_attend away from the page meanwhile.
 */

/* What the tag of an exported page says. */
typedef struct bd_page_tag {
  size_t struct_size;
  const char* format; /* as the recipe's key `format`; never freed */
  int32_t version;    /* of the byte layout */
  int32_t head_dim;
  int32_t page_size;
  int32_t num_kv_heads;
  int32_t first_kv_head;
  int32_t reserved;
} bd_page_tag;

/* Bytes of an exported page of this layer. */
BD_API bd_status bd_page_export_bytes(const bd_layer* layer, int64_t* num_bytes);
/* Writes page `page` of the cache to [bytes, bytes + num_bytes); num_bytes must be what
 * bd_page_export_bytes says. A page whose rows are not all written holds what the memory held:
 * clear pages before their first write if such pages are exported, or an import may refuse them. */
BD_API bd_status bd_page_export(const bd_layer* layer, const bd_cache* cache, int64_t page,
                                void* bytes, int64_t num_bytes);
/* The reverse. Damaged bytes are BD_CORRUPT, another version BD_UNSUPPORTED, and a page of another
 * layout or of other heads BD_INVALID_ARGUMENT; nothing is written then. Call bd_steps_forget for
 * the page afterwards. */
BD_API bd_status bd_page_import(const bd_layer* layer, const bd_cache* cache, int64_t page,
                                const void* bytes, int64_t num_bytes);
/* Reads the tag of an exported page, all of whose bytes must be there. */
BD_API bd_status bd_page_tag_read(const void* bytes, int64_t num_bytes, bd_page_tag* tag);

/* ---- counters ----------------------------------------------------------------------------------
 */

/* Since the runtime was created; all layers and steps together. */
typedef struct bd_counters {
  size_t struct_size;
  uint64_t non_finite;          /* NaN or infinity in K or V: stored as zero */
  uint64_t saturated_blocks;    /* blocks above what the largest scale can express */
  uint64_t flushed_blocks;      /* blocks that are not zero, but whose scale rounded to zero */
  uint64_t requantized_prefix;  /* groups continued from their own codes: BF16 rows were lost */
  uint64_t corrupt_scales;      /* invalid scale bytes met while attending */
  uint64_t steps;               /* successful bd_steps_build */
  uint64_t evicted_slots;       /* BF16 groups dropped for want of slots */
  uint64_t refused_groups;      /* groups that the recipe keeps in BF16 and that got no slot */
  uint64_t missing_tokens;      /* positions of them that are read from pages instead */
  uint64_t lost_partial_groups; /* groups entered in their middle without their BF16 rows */
  uint64_t used_slots;          /* now, over all bd_steps; 0 for "cuda" */
} bd_counters;

/* A "cuda" runtime's are on the device: the call waits for it. */
BD_API bd_status bd_counters_get(const bd_runtime* runtime, bd_counters* counters);

/* ---- calibration: observe keys while serving ----------------------------------------------------
 */

/* With the recipe's calibrate_file set, bd_write also accumulates per-channel sums of K. Writes the
 * means so far to `path` (NULL = the recipe's file): a temporary file, then a rename. */
BD_API bd_status bd_calibration_save(bd_runtime* runtime, const char* path, uint64_t* tokens);

/* What is observed from now on, for a calibration in steps; calibrate_file must be set:
 *   "all"            keys, and probabilities if probability_tau is "calibrate" (as created)
 *   "off"            nothing
 *   "keys"           keys alone
 *   "probabilities"  probabilities alone. With the recipe's key_shift on, the layers take the means
 *                    observed so far, so pages that are written already mean something else: the
 *                    caller begins with an empty cache, and no call for a layer runs meanwhile.
 * Keys at the recipe's first sink_tokens positions of a sequence are left out in every phase: they
 * are read in BF16, and their values are unlike all others'. */
BD_API bd_status bd_calibration_phase(bd_runtime* runtime, const char* phase);

/* Everything observed so far, exactly, to `path` (a rank of a tensor-parallel model adds its heads
 * to the name), with a note of the caller's; and the way back, into layers of the same shape. */
BD_API bd_status bd_calibration_state_save(bd_runtime* runtime, const char* path, const char* note);
BD_API bd_status bd_calibration_state_load(bd_runtime* runtime, const char* path);

/* {"phase", "tokens", "skipped_rows", "non_finite", "blocks"} as JSON; non_finite is null, or
 * {"layer", "kv_head"} of the first NaN or infinity in a key since the last call. Valid until the
 * next call with this runtime. */
BD_API const char* bd_calibration_describe(bd_runtime* runtime);

/* ---- probe: another recipe beside a running engine ---------------------------------------------
 */

/* From the next step on, every call for this runtime, whose mode must be bf16, also goes to a cache
 * of `recipe_json` that the library keeps beside the engine's: for sequences that begin after this
 * call. NULL or "" ends it. No call for a layer or steps runs meanwhile. */
BD_API bd_status bd_probe_start(bd_runtime* runtime, const char* recipe_json);
/* In these layers bd_attend gives the probe's output from now on. Without any, the probe compares:
 * its keys, scores and outputs with the exact ones. */
BD_API bd_status bd_probe_replace(bd_runtime* runtime, const int32_t* layers, int32_t num_layers);
/* {"layers": [{"layer", "bits", "key", "score", "output", ...}], "write_seconds", ...} as JSON,
 * with the relative error (L2) of each head; valid until the next call with this runtime. */
BD_API const char* bd_probe_describe(bd_runtime* runtime);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* BITDECODING_BITDECODING_H_ */
