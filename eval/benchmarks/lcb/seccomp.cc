// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/lcb/seccomp.h"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bitdecoding::eval {
namespace {

#if defined(__x86_64__)
constexpr std::uint32_t kArchitecture = AUDIT_ARCH_X86_64;
constexpr std::uint32_t kOtherAbi = 0x40000000;  // x32's numbers begin here
#elif defined(__aarch64__)
constexpr std::uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
constexpr std::uint32_t kOtherAbi = 0xffffffff;
#else
constexpr std::uint32_t kArchitecture = 0;
constexpr std::uint32_t kOtherAbi = 0xffffffff;
#endif

constexpr std::uint32_t kRefused[] = {
#ifdef SYS_fork
    SYS_fork,
    SYS_vfork,
#endif
    SYS_socket,
    SYS_socketpair,
    SYS_ptrace,
    SYS_mount,
    SYS_umount2,
    SYS_pivot_root,
    SYS_chroot,
    SYS_unshare,
    SYS_setns,
    SYS_add_key,
    SYS_request_key,
    SYS_keyctl,
    SYS_bpf,
    SYS_perf_event_open,
    SYS_userfaultfd,
    SYS_io_uring_setup,
    SYS_io_uring_enter,
    SYS_io_uring_register,
    SYS_init_module,
    SYS_finit_module,
    SYS_delete_module,
    SYS_kexec_load,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    SYS_open_by_handle_at,
    SYS_reboot,
    SYS_swapon,
    SYS_swapoff,
    SYS_personality,
    SYS_acct,
    SYS_quotactl,
    SYS_syslog};

sock_filter load(std::size_t offset) {
  return {BPF_LD | BPF_W | BPF_ABS, 0, 0, static_cast<std::uint32_t>(offset)};
}
sock_filter give(std::uint32_t action) { return {BPF_RET | BPF_K, 0, 0, action}; }
// Skips `yes` or `no` instructions.
sock_filter if_equal(std::uint32_t value, std::uint8_t yes, std::uint8_t no) {
  return {BPF_JMP | BPF_JEQ | BPF_K, yes, no, value};
}

}  // namespace

std::string seccomp_filter() {
  if (kArchitecture == 0) return "";
  const std::uint32_t refuse = SECCOMP_RET_ERRNO | EPERM;
  std::vector<sock_filter> program = {
      load(offsetof(seccomp_data, arch)),
      if_equal(kArchitecture, 1, 0),
      give(SECCOMP_RET_KILL_PROCESS),
      load(offsetof(seccomp_data, nr)),
      {BPF_JMP | BPF_JGE | BPF_K, 0, 1, kOtherAbi},
      give(SECCOMP_RET_KILL_PROCESS),
      if_equal(SYS_clone3, 0, 1),
      give(SECCOMP_RET_ERRNO | ENOSYS),
      if_equal(SYS_clone, 0, 4),
      load(offsetof(seccomp_data, args)),  // the flags' lower half, on both architectures
      {BPF_JMP | BPF_JSET | BPF_K, 1, 0, CLONE_THREAD},
      give(refuse),
      give(SECCOMP_RET_ALLOW),
  };
  for (const std::uint32_t call : kRefused) {
    program.push_back(if_equal(call, 0, 1));
    program.push_back(give(refuse));
  }
  program.push_back(give(SECCOMP_RET_ALLOW));
  return std::string(reinterpret_cast<const char*>(program.data()),
                     program.size() * sizeof(sock_filter));
}

}  // namespace bitdecoding::eval
