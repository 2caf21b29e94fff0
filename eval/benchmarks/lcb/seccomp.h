// SPDX-License-Identifier: Apache-2.0
// The system calls that a program in the sandbox is refused.
#pragma once

#include <string>

namespace bitdecoding::eval {

// A filter as bubblewrap's --seccomp reads it: an array of struct sock_filter. Empty on an
// architecture that it is not written for.
//
// Refused with EPERM: new processes (fork, vfork, clone without threads), sockets, tracing, mounts,
// namespaces, keys, modules, BPF, io_uring, performance counters. clone3 does not exist for it
// (ENOSYS), since its flags lie in memory that a filter cannot read; libraries fall back to clone.
std::string seccomp_filter();

}  // namespace bitdecoding::eval
