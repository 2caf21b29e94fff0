// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/cpu_backend.h"

#include <fmt/format.h>

#include <exception>
#include <mutex>
#include <new>

#include "backend/cpu/attend.h"
#include "backend/cpu/gather.h"
#include "backend/cpu/isa.h"
#include "backend/cpu/thread_pool.h"
#include "backend/cpu/write.h"
#include "backend/validate.h"

namespace bitdecoding {
namespace {

// What a verb throws becomes a Status: memory may run out in any of its threads.
template <class F>
Status guarded(F&& verb) {
  try {
    return verb();
  } catch (const std::bad_alloc&) {
    return {StatusCode::kResourceExhausted,
            "no memory is left for the workspace of this step; give it fewer or shorter requests"};
  } catch (const std::exception& error) {
    return {StatusCode::kInternal, fmt::format("a thread of the step failed: {}", error.what())};
  }
}

// The caller's threads see no exception of an item; it is thrown when they are done.
void run_on_callers(
    const std::function<void(std::int64_t, const std::function<void(std::int64_t)>&)>& callers,
    std::int64_t n, const std::function<void(std::int64_t, int)>& body) {
  std::mutex mutex;
  std::exception_ptr first;
  callers(n, [&](std::int64_t item) {
    try {
      body(item, 0);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (first == nullptr) first = std::current_exception();
    }
  });
  if (first != nullptr) std::rethrow_exception(first);
}

class CpuBackend final : public Backend {
 public:
  CpuBackend(const cpu::Isa& isa, const BackendOptions& options, int num_threads)
      : isa_(isa),
        attend_kernels_{cpu::decode_kernels(isa.decode_target), cpu::dequantize_kernels(isa.target),
                        cpu::float_kernels(isa.target), isa.matrix ? cpu::amx_kernels() : nullptr},
        write_kernels_(cpu::write_kernels(isa.target)),
        threads_(options.parallel_for ? 1 : num_threads),
        num_threads_(num_threads) {
    if (options.parallel_for) {
      parallel_ = [callers = options.parallel_for](
                      std::int64_t n, const std::function<void(std::int64_t, int)>& body) {
        run_on_callers(callers, n, body);
      };
    } else {
      parallel_ = [this](std::int64_t n, const std::function<void(std::int64_t, int)>& body) {
        threads_.run(n, body);
      };
    }
  }

  std::string_view name() const override { return "cpu"; }
  std::string isa() const override { return isa_.name; }
  int num_threads() const override { return num_threads_; }
  FragmentOrder fragment_order() const override { return FragmentOrder::kQuad; }

  Status write(const WriteParams& params) override {
    if (Status status = validate_write(params); !status.ok()) return status;
    if (Status status = check_order(*params.layer); !status.ok()) return status;
    return guarded([&] { return cpu::cpu_write(params, *write_kernels_, parallel_); });
  }

  Status attend(const AttendParams& params) override {
    if (Status status = validate_attend(params); !status.ok()) return status;
    if (Status status = check_order(*params.layer); !status.ok()) return status;
    return guarded([&] { return cpu::cpu_attend(params, attend_kernels_, parallel_, scratch_); });
  }

  Status gather(const AttendParams& params, int request, int kv_head, std::int64_t begin,
                std::int64_t end, float* key, float* value) override {
    if (Status status = validate_gather(params, request, kv_head, begin, end, key, value);
        !status.ok()) {
      return status;
    }
    if (Status status = check_order(*params.layer); !status.ok()) return status;
    return guarded([&] {
      return cpu::cpu_gather(params, attend_kernels_, request, kv_head, begin, end, key, value);
    });
  }

 private:
  static Status check_order(const LayerConfig& layer) {
    if (layer.geometry.order == FragmentOrder::kQuad) return {};
    return {
        StatusCode::kUnsupported,
        fmt::format("the cpu backend reads and writes pages in '{}' order, not '{}'; convert them "
                    "with convert_fragment_order or import_page",
                    fragment_order_name(FragmentOrder::kQuad),
                    fragment_order_name(layer.geometry.order))};
  }

  cpu::Isa isa_;
  cpu::AttendKernels attend_kernels_;
  const cpu::WriteKernels* write_kernels_;
  cpu::ThreadPool threads_;
  int num_threads_;
  cpu::ParallelFor parallel_;
  cpu::AttendScratchPool scratch_;
};

}  // namespace

Result<std::unique_ptr<Backend>> make_cpu_backend(const BackendOptions& options) {
  constexpr int kMaxThreads = 1024;
  if (options.num_threads < 0 || options.num_threads > kMaxThreads) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("num_threads is {}; expected 0 (the CPUs of the affinity mask) to {}",
                              options.num_threads, kMaxThreads));
  }
  const Result<cpu::Isa> isa = cpu::choose_isa(options.isa);
  if (!isa.ok()) return isa.status();
  const int num_threads = options.num_threads == 0 ? cpu::affinity_cpus() : options.num_threads;
  return std::unique_ptr<Backend>(std::make_unique<CpuBackend>(isa.value(), options, num_threads));
}

std::vector<std::string> cpu_supported_isas() {
  std::vector<std::string> names;
  for (const cpu::Isa& isa : cpu::supported_isas()) names.emplace_back(isa.name);
  return names;
}

}  // namespace bitdecoding
