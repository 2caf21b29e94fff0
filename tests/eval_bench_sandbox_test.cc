// SPDX-License-Identifier: Apache-2.0
// Attacks on the sandbox. Each ends within its limits and changes nothing outside.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "benchmarks/benchmark.h"
#include "benchmarks/lcb/sandbox.h"
#include "eval_bench_files.h"

namespace bitdecoding::eval {
namespace {

class SandboxAttack : public testing::Test {
 protected:
  void SetUp() override {
    const auto made = Sandbox::make("");
    if (!made.ok()) GTEST_SKIP() << made.status().message();
  }

  static SandboxRun run(const std::string& code, const SandboxLimits& limits = quick()) {
    const auto begin = std::chrono::steady_clock::now();
    const auto result = Sandbox::make("").value().run({"-c", code}, {}, "", limits);
    EXPECT_TRUE(result.ok()) << result.status().message();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, limits.time + std::chrono::seconds(10));
    return result.ok() ? result.value() : SandboxRun();
  }

  static SandboxLimits quick() {
    SandboxLimits limits;
    limits.time = std::chrono::milliseconds(2500);
    limits.memory = std::size_t{512} << 20;
    limits.disk = std::size_t{8} << 20;
    limits.output = std::size_t{1} << 20;
    return limits;
  }
};

TEST_F(SandboxAttack, ForkBomb) {
  const SandboxRun bomb =
      run("import os\n"
          "n = 0\n"
          "while True:\n"
          "    try:\n        os.fork()\n        n += 1\n"
          "    except OSError as e:\n        print(n, e.errno)\n        break\n");
  EXPECT_EQ(bomb.output, "0 1\n");  // EPERM at the first
  EXPECT_NE(run("import subprocess\nsubprocess.run(['/usr/bin/python3', '-c', 'print(1)'])").code,
            0);
  EXPECT_NE(run("import os\nos.posix_spawn('/usr/bin/env', ['env'], {})").code, 0);
  EXPECT_EQ(
      run("import threading\nt = threading.Thread(target=print, args=(7,))\nt.start()\nt.join()")
          .output,
      "7\n");
}

TEST_F(SandboxAttack, ThreadBombAndMemory) {
  EXPECT_NE(run("import threading, time\nwhile True:\n"
                "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n")
                .end,
            SandboxEnd::kOutput);
  const SandboxRun memory = run("x = bytearray(2 * 1024**3)");
  EXPECT_NE(memory.errors.find("MemoryError"), std::string::npos) << memory.errors;
}

TEST_F(SandboxAttack, FillsTheDisk) {
  const SandboxRun full =
      run("import os\n"
          "def fill(folder):\n"
          "    total = 0\n"
          "    try:\n"
          "        for i in range(1000):\n"
          "            with open(f'{folder}/f{i}', 'wb', buffering=0) as f:\n"
          "                total += f.write(bytes(1 << 20))\n"
          "    except OSError:\n        pass\n"
          "    return total\n"
          "for folder in ('/tmp', '/dev/shm', '/dev', '/', '/case', '/usr', '/var/tmp'):\n"
          "    total = fill(folder)\n"
          "    print(folder, total <= 8 << 20, total > 0)\n");
  EXPECT_EQ(full.output,
            "/tmp True True\n/dev/shm True False\n/dev True False\n/ True False\n"
            "/case True False\n/usr True False\n/var/tmp True False\n")
      << full.errors;
}

TEST_F(SandboxAttack, HasNoNetwork) {
  const SandboxRun sockets =
      run("import socket\n"
          "for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):\n"
          "    try:\n        socket.socket(family, socket.SOCK_STREAM)\n        print('made')\n"
          "    except PermissionError:\n        print('refused')\n");
  EXPECT_EQ(sockets.output, "refused\nrefused\nrefused\n") << sockets.errors;
}

TEST_F(SandboxAttack, ReadsNoAnswers) {
  const TemporaryFolder folder;
  const std::string secret = folder.write("lcb_v6/prompts.jsonl", "the answers");
  const SandboxRun files =
      run("import os\n"
          "for path in ('" +
          secret +
          "', '/etc/passwd', '/root', '/home', '/work', '/proc/1/environ'):\n"
          "    try:\n"
          "        print(os.listdir(path) if os.path.isdir(path) else open(path).read()[:20])\n"
          "    except OSError as e:\n        print('no')\n"
          "print(sorted(os.environ.get('SECRET', 'none')))\n"
          "print(len([p for p in os.listdir('/proc') if p.isdigit()]) <= 3)\n");
  EXPECT_EQ(files.output.find("the answers"), std::string::npos);
  EXPECT_TRUE(files.output.starts_with("no\nno\n")) << files.output << files.errors;
  EXPECT_TRUE(files.output.ends_with("True\n")) << files.output;
}

TEST_F(SandboxAttack, InheritsNoOpenFile) {
  const TemporaryFolder folder;
  const std::string secret = folder.write("records", "the answers");
  const int open_file = open(secret.c_str(), O_RDONLY);  // a careless one: goes on over exec
  ASSERT_GE(open_file, 0);
  const SandboxRun files =
      run("import os\n"
          "for fd in range(3, 256):\n"
          "    try: print(fd, os.pread(fd, 20, 0))\n"
          "    except OSError: pass\n");
  close(open_file);
  EXPECT_EQ(files.output, "") << files.errors;
}

TEST_F(SandboxAttack, EndlessOutputAndEndlessTime) {
  EXPECT_EQ(run("while True: print('x' * 10000)").end, SandboxEnd::kOutput);
  EXPECT_EQ(run("import sys\nwhile True: sys.stderr.write('x' * 10000)").end, SandboxEnd::kTime);
  EXPECT_NE(run("while True: pass").end, SandboxEnd::kExited);
  // Closed output does not hide a program that goes on.
  EXPECT_EQ(run("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(600)").end,
            SandboxEnd::kTime);
  EXPECT_EQ(run("import signal, time\n"
                "for s in range(1, 32):\n"
                "    try: signal.signal(s, signal.SIG_IGN)\n"
                "    except Exception: pass\n"
                "time.sleep(600)")
                .end,
            SandboxEnd::kTime);
}

TEST_F(SandboxAttack, KillsOnlyItself) {
  const SandboxRun parent =
      run("import os, signal\n"
          "for pid in (os.getppid(), 1, " +
          std::to_string(getpid()) +
          "):\n"
          "    try: os.kill(pid, signal.SIGKILL)\n"
          "    except OSError: pass\n"
          "print('alive')\n"
          "os.kill(-1, signal.SIGKILL)\n"
          "os.kill(os.getpid(), signal.SIGKILL)\n");
  EXPECT_NE(parent.end, SandboxEnd::kTime);
  EXPECT_EQ(kill(getpid(), 0), 0);
}

TEST_F(SandboxAttack, RefusedCallsOfTheKernel) {
  const SandboxRun calls =
      run("import ctypes, errno\n"
          "libc = ctypes.CDLL(None, use_errno=True)\n"
          "def refused(result): return result == -1 and ctypes.get_errno() in (errno.EPERM, "
          "errno.ENOSYS)\n"
          "print(refused(libc.unshare(0x10000000)), refused(libc.ptrace(0, 0, 0, 0)),\n"
          "      refused(libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0)), "
          "refused(libc.chroot(b'/tmp')))\n");
  EXPECT_EQ(calls.output, "True True True True\n") << calls.errors;
}

TEST_F(SandboxAttack, NothingIsLeftRunning) {
  const SandboxRun left = run("import time\ntime.sleep(987654)", [] {
    SandboxLimits limits = quick();
    limits.time = std::chrono::milliseconds(1500);
    return limits;
  }());
  EXPECT_EQ(left.end, SandboxEnd::kTime);
  bool running = true;
  for (int i = 0; i < 100 && running; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    running = false;
    for (const auto& process : std::filesystem::directory_iterator("/proc")) {
      std::ifstream file(process.path() / "cmdline");
      const std::string line((std::istreambuf_iterator<char>(file)), {});
      running = running || line.find("sleep(987654)") != std::string::npos;
    }
  }
  EXPECT_FALSE(running);
}

// PATH for the length of a test.
class PathOf {
 public:
  explicit PathOf(const std::string& path) : before_(std::getenv("PATH")) {
    setenv("PATH", path.c_str(), 1);
  }
  ~PathOf() { setenv("PATH", before_.c_str(), 1); }

 private:
  std::string before_;
};

TEST(SandboxRefusal, NamesTheReasonAndTheRemedy) {
  const TemporaryFolder folder;
  const auto refusal = [&](const std::string& path) {
    const PathOf changed(path);
    const auto made = Sandbox::make("/usr/bin/python3");
    EXPECT_FALSE(made.ok());
    EXPECT_EQ(made.status().code(), StatusCode::kUnsupported);
    return made.ok() ? std::string() : made.status().message();
  };
  EXPECT_EQ(refusal(folder.path()),
            "Programs that a model wrote are only run in a sandbox, and none can be set up here: "
            "bubblewrap is not installed. Install it: apt-get install bubblewrap.");
  const std::string fake = folder.write(
      "bin/bwrap",
      "#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n");
  chmod(fake.c_str(), 0755);
  const std::string off = refusal(folder.path() + "/bin:/usr/bin:/bin");
  EXPECT_NE(off.find("No permissions to create a new namespace"), std::string::npos) << off;
  EXPECT_NE(off.find("sysctl"), std::string::npos) << off;

  // And so does the benchmark, before anything runs.
  const PathOf changed(folder.path());
  LoadOptions options;
  options.data_folder = folder.path();
  options.python = "/usr/bin/python3";
  const Benchmark& benchmark = *find_benchmark("lcb").value();
  const auto items = benchmark.missing(options);
  ASSERT_EQ(items.size(), 2U);
  EXPECT_NE(items[1].how.find("apt-get install bubblewrap"), std::string::npos);
  EXPECT_FALSE(items[1].optional);
  BenchmarkRow row;
  EXPECT_EQ(benchmark.score(row, "```\nprint(1)\n```", options).status().code(),
            StatusCode::kUnsupported);
}

}  // namespace
}  // namespace bitdecoding::eval
