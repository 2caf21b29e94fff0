# SPDX-License-Identifier: Apache-2.0
"""Which CPUs the library's threads may use inside a vLLM worker.

vLLM hands a worker its CPUs through the OpenMP environment, and OpenMP then pins the main thread to
the first of them. Threads inherit the mask of the thread that makes them, so the library's would
all sit on one CPU: while they are made, the main thread takes the whole list.
"""

import contextlib
import os
import re

OPENMP_LISTS = (
    ("KMP_AFFINITY", r"proclist=\[([\d,-]+)\]"),
    ("OMP_PLACES", r"^\{([\d,]+)\}$"),
)


class ThreadsError(ValueError):
    """A thread count that cannot be used."""


def _expand(words):
    cpus = set()
    for word in words:
        first, _, last = word.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def openmp_cpus(environment=os.environ):
    """The CPUs named by GOMP_CPU_AFFINITY, KMP_AFFINITY or OMP_PLACES as vLLM writes them."""
    gomp = environment.get("GOMP_CPU_AFFINITY", "")
    if re.fullmatch(r"[\d\s,-]+", gomp):
        return _expand(re.split(r"[\s,]+", gomp.strip()))
    for name, pattern in OPENMP_LISTS:
        match = re.search(pattern, environment.get(name, ""))
        if match:
            return _expand(match.group(1).split(","))
    return set()


@contextlib.contextmanager
def all_worker_cpus():
    """Widens the calling thread's mask to the worker's CPUs; yields how many there are."""
    if not hasattr(os, "sched_getaffinity"):
        yield 0
        return
    own = os.sched_getaffinity(0)
    cpus = openmp_cpus() or own
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        cpus = own  # the list names CPUs that this container does not have
    try:
        yield len(cpus)
    finally:
        os.sched_setaffinity(0, own)


def requested(variable, default):
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdigit() or int(text) < 1:
        raise ThreadsError(f"{variable} is '{text}', but it is a number of threads: 1 or more.")
    return int(text)
