// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bitdecoding/backend.h"
#include "bitdecoding/bitdecoding.h"
#include "commands.h"
#include "cuda_build.h"
#include "gpu.h"
#include "machine.h"
#include "output.h"

namespace bitdecoding::cli {
namespace {

enum class Verdict { kGood, kNote, kMissing };

struct Finding {
  std::string name;
  Verdict verdict;
  std::string value;
  std::string advice;  // how to get what is missing, or what follows; may be empty
};

const char* verdict_name(Verdict verdict) {
  return verdict == Verdict::kGood ? "good" : (verdict == Verdict::kNote ? "note" : "missing");
}

Finding backend_finding() {
  const Result<std::unique_ptr<Backend>> backend = make_backend("cpu", {});
  if (!backend.ok()) {
    return {"cpu backend", Verdict::kMissing, backend.status().message(),
            "build the library with the CPU backend, for x86-64 with AVX2 or for arm64"};
  }
  return {"cpu backend", Verdict::kGood, fmt::format("runs {}", backend.value()->isa()), ""};
}

void add_cpu(std::vector<Finding>* findings) {
  const CpuFacts cpu = cpu_facts();
  findings->push_back({"processor", Verdict::kGood, cpu.model, ""});
  const bool all = cpu.usable == cpu.online;
  findings->push_back({"cores", all ? Verdict::kGood : Verdict::kNote,
                       fmt::format("{} usable of {} online", cpu.usable, cpu.online),
                       all ? "" : "the affinity mask keeps the others away; see `taskset -p`"});
  findings->push_back(
      {"instruction sets", Verdict::kGood, fmt::format("{}", fmt::join(cpu.isas, ", ")), ""});
  findings->push_back(
      {"BF16 matrix instructions", cpu.bf16_matrix ? Verdict::kGood : Verdict::kNote,
       cpu.bf16_matrix ? "present" : "none",
       cpu.bf16_matrix ? ""
                       : "vLLM's BF16 products are slow here, so `serve` chooses --dtype float32; "
                         "the KV cache is not affected"});
}

void add_memory(std::vector<Finding>* findings) {
  const double gib = static_cast<double>(memory_bytes()) / (1 << 30);
  findings->push_back({"memory", gib >= 4.0 ? Verdict::kGood : Verdict::kNote,
                       fmt::format("{:.1f} GiB", gib),
                       gib >= 4.0 ? "" : "vLLM itself needs about 3 GiB"});
  const std::string setting = huge_page_setting();
  const bool works = setting == "always" || setting == "madvise";
  findings->push_back({"huge pages", works ? Verdict::kGood : Verdict::kNote,
                       setting.empty() ? "unknown" : setting,
                       works ? ""
                             : "decoding reads the cache faster with them: echo madvise | sudo tee "
                               "/sys/kernel/mm/transparent_hugepage/enabled"});
}

void add_python(const std::string& wanted, std::vector<Finding>* findings) {
  const PythonFacts python = python_facts(wanted);
  if (python.python.empty()) {
    findings->push_back({"python", Verdict::kMissing, wanted.empty() ? "none" : wanted + ": none",
                         "install python3 (3.10 or later) with venv: sudo apt-get install "
                         "python3-venv, then tools/setup/venv.sh"});
    return;
  }
  findings->push_back({"python", Verdict::kGood, python.python, ""});
  if (python.vllm_version.empty()) {
    findings->push_back({"vllm", Verdict::kMissing, "not installed there",
                         "run tools/setup/venv.sh in the source tree, or name another Python with "
                         "--python or BITDECODING_PYTHON"});
  } else {
    findings->push_back({"vllm", Verdict::kGood, python.vllm_version, ""});
  }
  findings->push_back({"plugin", python.plugin ? Verdict::kGood : Verdict::kMissing,
                       python.plugin ? "bitdecoding-vllm is installed" : "not installed there",
                       python.plugin ? "" : "run tools/setup/plugin.sh in the source tree"});
}

Finding no_gpu_finding(const GpuReport& report) {
  if (!report.driver) {
    const std::string device = cuda_device();
    if (device.empty()) {
      return {"CUDA", Verdict::kNote, "no NVIDIA driver", "not needed: serving works on the CPU"};
    }
    return {"CUDA", Verdict::kNote, "a device is there (" + device + "), but not libcuda.so.1",
            "install the libraries of the NVIDIA driver to use it; serving works on the CPU"};
  }
  return {"CUDA", Verdict::kNote, "the NVIDIA driver is installed, but: " + report.trouble,
          "not needed: serving works on the CPU"};
}

void add_gpus(std::vector<Finding>* findings) {
  const GpuReport report = gpu_report();
  if (report.gpus.empty()) {
    findings->push_back(no_gpu_finding(report));
    return;
  }
  findings->push_back(
      {"CUDA", Verdict::kGood,
       fmt::format("driver {}, CUDA {}",
                   report.driver_version.empty() ? "of unknown version" : report.driver_version,
                   report.cuda_version),
       report.trouble});
  for (std::size_t i = 0; i < report.gpus.size(); ++i) {
    const GpuFacts& gpu = report.gpus[i];
    const GpuUse use = gpu_use(gpu.name, gpu.major, gpu.minor);
    findings->push_back(
        {fmt::format("GPU {}", i), use.decodes ? Verdict::kGood : Verdict::kNote,
         fmt::format("{}, compute capability {}.{}, {:.1f} GiB", gpu.name, gpu.major, gpu.minor,
                     static_cast<double>(gpu.memory_bytes) / (1 << 30)),
         use.words});
  }
}

void print_finding(const Finding& finding) {
  const Style style = finding.verdict == Verdict::kGood
                          ? Style::kGood
                          : (finding.verdict == Verdict::kNote ? Style::kWarn : Style::kBad);
  print(fmt::format("{}  {:<25} {}\n",
                    styled(style, fmt::format("{:<7}", verdict_name(finding.verdict))),
                    finding.name, finding.value));
  if (!finding.advice.empty()) print(fmt::format("{:9}{}\n", "", finding.advice));
}

int run(const std::string& python, bool json) {
  std::vector<Finding> findings;
  add_cpu(&findings);
  findings.push_back(backend_finding());
  add_memory(&findings);
  add_python(python, &findings);
  add_gpus(&findings);
  bool missing = false;
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Finding& finding : findings) {
    missing = missing || finding.verdict == Verdict::kMissing;
    list.push_back({{"name", finding.name},
                    {"verdict", verdict_name(finding.verdict)},
                    {"value", finding.value},
                    {"advice", finding.advice}});
    if (!json) print_finding(finding);
  }
  if (json) {
    const nlohmann::ordered_json object = {
        {"version", bd_version()}, {"ready", !missing}, {"findings", list}};
    print(object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
  } else {
    print(missing ? styled(Style::kBad, "This machine cannot serve yet.") + "\n"
                  : styled(Style::kGood,
                           "This machine can serve: bitdecoding serve MODEL --mode "
                           "bitdecoding-nvfp4") +
                        "\n");
  }
  return missing ? kExitNotFound : kExitOk;
}

}  // namespace

void add_doctor(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand(
      "doctor", "Say what this machine can run, what is missing and how to get it");
  auto json = std::make_shared<bool>(false);
  auto python = std::make_shared<std::string>();
  command->add_flag("--json", *json, "Print one JSON object");
  command->add_option("--python", *python, "The Python that has vLLM");
  command->callback([json, python, exit_code] { *exit_code = run(*python, *json); });
}

}  // namespace bitdecoding::cli
