// SPDX-License-Identifier: Apache-2.0
// The plan of a step, by one block of threads: see common/directory.h.
#include "any/slots.cuh"
#include "common/directory.h"

namespace bitdecoding::cuda {
namespace {

// The rest of the plan: requests, writes, spans and work.
struct Builder : Slots {
  __device__ int group() const { return a.plan.group_tokens; }

  // ---- rules of one request (page/shadow_directory.cc) ----
  __device__ static int first_query(const Request& r) { return max(r.seq_len - r.query_len, 0); }
  __device__ static bool is_short(const Request& r) { return r.query_len <= kMaxDecodeQueries; }
  __device__ int tail_of(const Request& r, int n) const {
    return a.plan.tail_tokens < 0 ? r.seq_len : min(tail_begin(a.plan, n), r.seq_len);
  }
  __device__ int read_tail(const Request& r) const {
    return tail_of(r, r.query_len > 0 ? first_query(r) + 1 : r.seq_len);
  }
  __device__ int keep_tail(const Request& r) const {
    return tail_of(r, is_short(r) ? first_query(r) + 1 : r.seq_len);
  }

  __device__ int page_at(int request, int position) const {
    const int page = position / a.plan.page_size;
    if (page >= a.plan.page_stride) return -1;
    const int id = a.plan.pages[request * a.plan.page_stride + page];
    return id < 0 || id >= a.plan.num_pages ? -1 : id;
  }
  __device__ int key_at(int request, int position) const {
    const int page = page_at(request, position);
    if (page < 0) return -1;
    return page * a.groups_per_page + position % a.plan.page_size / group();
  }
  __device__ int slot_at(int request, int position) const {
    const int key = key_at(request, position);
    return key < 0 ? -1 : a.index[key];
  }

  // ---- phases ----
  __device__ void read_requests() const {
    for (int i = threadIdx.x; i < a.plan.num_requests; i += kPlanThreads) {
      Request r;
      const int begin = max(a.query_start[i], 0);
      const int end = min(a.query_start[i + 1], a.num_tokens);
      const long long most = static_cast<long long>(a.plan.page_stride) * a.plan.page_size;
      r.seq_len = max(a.seq_lens[i], 0);
      r.query_begin = begin;
      r.query_len = max(end - begin, 0);
      if (r.seq_len > most) {
        r.seq_len = static_cast<int>(most);
        atomicAdd(&a.state->bad_lengths, 1ULL);
      }
      a.requests[i] = r;
    }
  }

  __device__ int request_of(int token) const {
    int low = 0;
    int high = a.plan.num_requests - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (a.requests[middle].query_begin <= token) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    // Empty requests may begin at the same row.
    while (low > 0 && a.requests[low].query_len == 0) --low;
    return low;
  }

  // Position of a token that is to be written, or -1.
  __device__ int written_position(int token, int request) const {
    const Request r = a.requests[request];
    if (token < r.query_begin || token >= r.query_begin + r.query_len) return -1;
    if (a.slot_mapping[token] < 0) return -1;
    const int position = r.seq_len - r.query_len + (token - r.query_begin);
    if (position < 0) return -1;
    const int page = page_at(request, position);
    const long long expected =
        static_cast<long long>(page) * a.plan.page_size + position % a.plan.page_size;
    return page < 0 || a.slot_mapping[token] != expected ? -1 : position;
  }

  __device__ void collect_writes() {
    int done = 0;
    for (int base = 0; base < a.num_tokens; base += kPlanThreads) {
      const int token = base + static_cast<int>(threadIdx.x);
      int position = -1;
      int request = 0;
      bool head = false;
      if (token < a.num_tokens && a.plan.num_requests > 0) {
        request = request_of(token);
        position = written_position(token, request);
        if (position < 0 && a.slot_mapping[token] >= 0) atomicAdd(&a.state->bad_slots, 1ULL);
        head =
            position >= 0 && (position % group() == 0 || token == a.requests[request].query_begin ||
                              written_position(token - 1, request) < 0);
      }
      int index = 0;
      int total = 0;
      Scan(s.scan).ExclusiveSum(head ? 1 : 0, index, total);
      __syncthreads();
      if (head) add_write(done + index, token, position, request);
      done += total;
    }
    if (threadIdx.x == 0) a.state->num_writes = done;
  }

  __device__ void add_write(int index, int token, int position, int request) const {
    Write w;
    w.first_row = position % group();
    w.num_rows = 1;
    while (w.first_row + w.num_rows < group() &&
           written_position(token + w.num_rows, request) >= 0) {
      ++w.num_rows;
    }
    w.page = page_at(request, position);
    w.group = position % a.plan.page_size / group();
    w.source = token;
    a.writes[index] = w;
    a.wants[index] = want_of(index, w, position, request);
  }

  __device__ Want want_of(int index, const Write& w, int position, int request) const {
    const Request r = a.requests[request];
    const int begin = position - w.first_row;
    Want want;
    want.write = index;
    want.key = w.page * a.groups_per_page + w.group;
    want.distance = r.seq_len - begin;
    want.sink = begin < a.plan.sink_tokens ? 1 : 0;
    want.asked = want.sink != 0 || begin >= tail_of(r, r.seq_len) ? 1 : 0;
    if (begin + group() > r.seq_len) {
      want.pin = kPartial;
    } else if (want.sink != 0) {
      want.pin = kSink;
    } else if (want.asked != 0 || begin >= keep_tail(r)) {
      want.pin = kTail;
    }
    return want;
  }

  // One warp a request: what the step reads is touched and pinned.
  __device__ void touch() const {
    const int lane = threadIdx.x & 31;
    for (int i = threadIdx.x >> 5; i < a.plan.num_requests; i += kPlanThreads / 32) {
      const Request r = a.requests[i];
      for (int p = keep_tail(r) + lane * group(); p < read_tail(r); p += 32 * group()) {
        const int slot = slot_at(i, p);
        if (slot >= 0) a.slots[slot].stamp = max(a.slots[slot].stamp, 2 * step);
      }
      const int sink_end = min(a.plan.sink_tokens, r.seq_len);
      for (int p = lane * group(); p < sink_end; p += 32 * group()) pin_read(i, r, p, true);
      const int tail = max(read_tail(r), sink_end);
      for (int p = tail / group() * group() + lane * group(); p < r.seq_len; p += 32 * group()) {
        pin_read(i, r, p, p < a.plan.sink_tokens);
      }
    }
  }
  __device__ void pin_read(int request, const Request& r, int position, bool sink) const {
    const int slot = slot_at(request, position);
    if (slot < 0) return;
    a.slots[slot].sink = sink ? 1 : 0;
    pin(slot, sink ? kSink : kTail, r.seq_len - position);
  }

  __device__ void pin_and_drop_written() const {
    for (int i = threadIdx.x; i < a.state->num_writes; i += kPlanThreads) {
      const Want want = a.wants[i];
      const int slot = a.index[want.key];
      if (slot < 0) continue;
      if (a.writes[i].first_row > 0) {
        a.slots[slot].sink = want.sink;
        pin(slot, kPartial, want.distance);
      } else if (want.pin == kNone) {
        release(slot);
      } else {
        a.slots[slot].sink = want.sink;
        pin(slot, want.pin, want.distance);
      }
    }
  }

  __device__ void finish_writes() const {
    for (int i = threadIdx.x; i < a.state->num_writes; i += kPlanThreads) {
      const Want want = a.wants[i];
      Write& w = a.writes[i];
      w.slot = a.index[want.key];
      if (w.slot >= 0) {
        SlotEntry& e = a.slots[w.slot];
        w.prefix_in_slot =
            w.first_row > 0 && e.valid_begin == 0 && e.valid_end >= w.first_row ? 1 : 0;
        const bool joins = e.valid_begin < e.valid_end && w.first_row >= e.valid_begin &&
                           w.first_row <= e.valid_end;
        if (!joins) e.valid_begin = static_cast<std::int16_t>(w.first_row);
        e.valid_end = static_cast<std::int16_t>(w.first_row + w.num_rows);
      } else if (want.asked != 0) {
        atomicAdd(&a.state->refused_groups, 1ULL);
      }
      if (w.first_row > 0 && w.prefix_in_slot == 0) {
        atomicAdd(&a.state->lost_partial_groups, 1ULL);
      }
    }
  }

  // One warp a request: its BF16 rows, sixteen at a time, ascending.
  __device__ void make_units() const {
    const int lane = threadIdx.x & 31;
    for (int i = threadIdx.x >> 5; i < a.plan.num_requests; i += kPlanThreads / 32) {
      const Request r = a.requests[i];
      const int sink_end = min(a.plan.sink_tokens, r.seq_len);
      const int tail = max(read_tail(r), sink_end);
      const int from_cache = a.plan.reproducible != 0 || !is_short(r) ? first_query(r) : r.seq_len;
      int made = 0;
      for (int part = 0; part < 2; ++part) {
        const int begin = part == 0 ? 0 : tail;
        const int end = part == 0 ? sink_end : r.seq_len;
        for (int base = begin / kUnitRows * kUnitRows; base < end; base += 32 * kUnitRows) {
          const int p = base + lane * kUnitRows;
          ShadowUnit unit;
          bool exists = false;
          int missing = 0;
          if (p < end) {
            const int from = max(p, begin);
            const int to = min(p + kUnitRows, end);
            const int key = key_at(i, p);
            if (key >= 0) {
              missing = max(min(to, from_cache) - from, 0);
              const int slot = a.index[key];
              if (slot >= 0) {
                const int origin = p / group() * group();
                const SlotEntry e = a.slots[slot];
                unit.begin = max(from, origin + e.valid_begin);
                unit.end = min(to, origin + e.valid_end);
                unit.slot = slot;
                unit.row = unit.begin - origin;
                exists = unit.begin < unit.end;
                if (exists) missing -= max(min(unit.end, from_cache) - unit.begin, 0);
              }
            }
          }
          const unsigned all = __ballot_sync(0xFFFFFFFFU, exists);
          const int at = made + __popc(all & ((1U << lane) - 1));
          if (exists && at < a.plan.unit_stride) {
            a.units[static_cast<std::int64_t>(i) * a.plan.unit_stride + at] = unit;
          }
          made += __popc(all);
          if (missing > 0) {
            atomicAdd(&a.state->missing_tokens, static_cast<unsigned long long>(missing));
          }
        }
      }
      if (lane == 0) a.requests[i].num_units = min(made, a.plan.unit_stride);
    }
  }

  // Requests that are prefilled elsewhere get no work.
  __device__ void make_work() {
    for (int w = 0; w < a.num_work; ++w) {
      const Work& work = a.work[w];
      const int units = sum_up(work, [](int of_row) { return of_row; });
      const int most = find_most(work, units);
      if (most > 0) sum_up(work, [&](int of_row) { return parts_of_row(of_row, most); });
      if (threadIdx.x == 0) work.prefix[a.plan.num_requests + 1] = most;
    }
  }
  __device__ int rows_of(const Request& r) const {
    return a.num_kv_heads * row_blocks(r.query_len, a.num_q_per_kv, a.plan.columns);
  }
  // Where each request's share of the list begins; `size` says what a row's units count for.
  template <class Size>
  __device__ int sum_up(const Work& work, Size size) {
    int done = 0;
    for (int base = 0; base < a.plan.num_requests; base += kPlanThreads) {
      const int i = base + static_cast<int>(threadIdx.x);
      int share = 0;
      if (i < a.plan.num_requests) {
        const Request r = a.requests[i];
        share = size(decoded_units(r, work.window_left)) * rows_of(r);
      }
      int before = 0;
      int total = 0;
      Scan(s.scan).ExclusiveSum(share, before, total);
      __syncthreads();
      if (i < a.plan.num_requests) work.prefix[i] = done + before;
      done += total;
    }
    if (threadIdx.x == 0) work.prefix[a.plan.num_requests] = done;
    __syncthreads();
    return done;
  }
  // The smallest size of parts of which there are not more than blocks; 0 when there is none. A
  // warp tries one.
  __device__ int find_most(const Work& work, int units) {
    if (threadIdx.x == 0) s.most = 0x7FFFFFFF;
    __syncthreads();
    static_assert(kPlanThreads / 32 == kMostTries);
    const int most = most_to_try(units, a.plan.num_blocks, static_cast<int>(threadIdx.x) >> 5);
    int parts = 0;
    for (int i = threadIdx.x & 31; i < a.plan.num_requests && most > 0; i += 32) {
      const Request r = a.requests[i];
      parts += parts_of_row(decoded_units(r, work.window_left), most) * rows_of(r);
    }
    __syncwarp();
    parts = __reduce_add_sync(0xFFFFFFFFU, parts);
    if ((threadIdx.x & 31) == 0 && units > 0 && parts <= a.plan.num_blocks) {
      atomicMin(&s.most, most);
    }
    __syncthreads();
    const int found = s.most;
    __syncthreads();
    return found == 0x7FFFFFFF ? 0 : found;
  }
};

__global__ void __launch_bounds__(kPlanThreads, 1)
    build_kernel(const __grid_constant__ BuildArgs a) {
  __shared__ Shared s;
  if (threadIdx.x == 0) ++a.state->step;
  __syncthreads();
  Builder b{{a, s, a.state->step}};
  b.read_requests();
  __syncthreads();
  b.touch();
  b.collect_writes();
  __syncthreads();
  b.pin_and_drop_written();
  __syncthreads();
  b.give_slots();
  __syncthreads();
  b.finish_writes();
  __syncthreads();
  b.make_units();
  __syncthreads();
  b.make_work();
}

__global__ void forget_kernel(const __grid_constant__ BuildArgs a, std::int64_t page) {
  for (int group = threadIdx.x; group < a.groups_per_page; group += blockDim.x) {
    const int slot = a.index[page * a.groups_per_page + group];
    if (slot >= 0) release_slot(a, slot);
  }
}

__global__ void reset_kernel(const __grid_constant__ BuildArgs a) {
  const std::int64_t first = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = first; i < a.plan.num_pages * a.groups_per_page; i += step) a.index[i] = -1;
  for (std::int64_t i = first; i < a.num_slots; i += step) {
    a.slots[i] = SlotEntry{};
    // The top of the stack is slot 0.
    a.free_slots[i] = static_cast<std::int32_t>(a.num_slots - 1 - i);
  }
  if (first == 0) {
    *a.state = DirectoryState{};
    a.state->free_count = a.num_slots;
  }
}

}  // namespace

void launch_build(const BuildArgs& args, void* stream) {
  build_kernel<<<1, kPlanThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
}

void launch_forget(const BuildArgs& args, std::int64_t page, void* stream) {
  forget_kernel<<<1, 64, 0, static_cast<cudaStream_t>(stream)>>>(args, page);
}

void launch_reset(const BuildArgs& args, void* stream) {
  reset_kernel<<<256, 256, 0, static_cast<cudaStream_t>(stream)>>>(args);
}

}  // namespace bitdecoding::cuda
