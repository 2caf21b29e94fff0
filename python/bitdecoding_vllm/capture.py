# SPDX-License-Identifier: Apache-2.0
"""Writes the logits of prompt tokens to a file, for exact KL divergence between two engines.

Works with and without a recipe: it hooks the one place where vLLM computes logits of prompt
tokens, so it sees requests that ask for prompt_logprobs. docs/vllm.md describes the file.
"""

import json
import os
from functools import wraps

import numpy as np

from bitdecoding_vllm import runtime

ENV_PATH = "BITDECODING_LOGITS_CAPTURE"
ENV_DTYPE = "BITDECODING_LOGITS_DTYPE"
ENV_FIRST = "BITDECODING_LOGITS_FIRST"

FORMAT = "bitdecoding-logits"
VERSION = 1
HEADER_BYTES = 16
RECORD_ALIGNMENT = 16
DTYPES = {"float32": "<f4", "float16": "<f2"}


class CaptureError(ValueError):
    """The capture was asked for in a way it cannot be done."""


def record_type(vocab_size, dtype):
    """One row of the file: request, position, target token, 0, then the logits, padded."""
    bytes_used = HEADER_BYTES + vocab_size * np.dtype(DTYPES[dtype]).itemsize
    record_bytes = -(-bytes_used // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
    return np.dtype(
        {
            "names": ["request", "position", "token", "zero", "logits"],
            "formats": ["<i4", "<i4", "<i4", "<i4", (DTYPES[dtype], (vocab_size,))],
            "offsets": [0, 4, 8, 12, HEADER_BYTES],
            "itemsize": record_bytes,
        }
    )


class LogitsCapture:
    """One file. It is begun anew when its first row arrives, and flushed after each chunk."""

    def __init__(self, path, dtype="float32", first_position=0):
        if dtype not in DTYPES:
            raise CaptureError(
                f"{ENV_DTYPE} is '{dtype}', but rows can be stored as: {', '.join(DTYPES)}."
            )
        self.path = path
        self.dtype = dtype
        self.first_position = first_position
        self.rows = 0
        self._file = None
        self._record = None
        self._requests = {}

    def _open(self, vocab_size, model):
        self._record = record_type(vocab_size, self.dtype)
        header = {
            "format": FORMAT,
            "version": VERSION,
            "vocab_size": vocab_size,
            "dtype": self.dtype,
            "header_bytes": HEADER_BYTES,
            "record_bytes": self._record.itemsize,
            "first_position": self.first_position,
            "model": model,
            "mode": runtime.current_mode(),
        }
        self._file = open(self.path, "wb")
        with open(f"{self.path}.json", "w", encoding="utf-8") as file:
            json.dump(header, file, indent=2)
            file.write("\n")

    def add(self, request_id, start, tokens, logits, model=""):
        """Rows of one chunk: logits[i] belongs to position start + i and predicts tokens[i]."""
        skip = max(0, self.first_position - start)
        request = self._requests.setdefault(request_id, len(self._requests))
        if skip >= len(tokens):
            return
        logits = logits[skip:]
        if self._file is None:
            self._open(logits.shape[-1], model)
        records = np.zeros(len(logits), dtype=self._record)
        records["request"] = request
        records["position"] = np.arange(start + skip, start + skip + len(logits))
        records["token"] = tokens[skip:]
        records["logits"] = logits.float().numpy()
        self._file.write(records.tobytes())
        self._file.flush()
        self.rows += len(records)

    def close(self):
        if self._file is not None:
            self._file.close()
            self._file = None


_active = None
_hooked = False


def active():
    return _active


def start(path, dtype="float32", first_position=0):
    """Begins a capture in this process; an earlier one ends. An empty path only ends it."""
    global _active
    stop()
    if path:
        _hook()
        _active = LogitsCapture(path, dtype, first_position)


def stop():
    """Ends the capture and returns the rows it wrote."""
    global _active
    if _active is None:
        return 0
    _active.close()
    rows, _active = _active.rows, None
    return rows


def start_from_environment(vllm_config):
    """Called once per engine by the worker. Only the first rank writes: its logits are complete."""
    path = os.environ.get(ENV_PATH)
    if not path or vllm_config.parallel_config.rank != 0:
        return
    if vllm_config.use_v2_model_runner:
        raise CaptureError(
            f"{ENV_PATH} is set, but logits can be captured from vLLM's V1 model runner only; set "
            "VLLM_USE_V2_MODEL_RUNNER=0."
        )
    if _active is not None and _active.path == path and _active.rows == 0:
        return
    first = os.environ.get(ENV_FIRST, "0")
    if not first.isdigit():
        raise CaptureError(f"{ENV_FIRST} is '{first}', but it is a position: 0 or more.")
    start(path, os.environ.get(ENV_DTYPE, "float32"), int(first))


def _hook():
    """Wraps the runner's method that computes logits of prompt tokens; once a process."""
    global _hooked
    if _hooked:
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._get_prompt_logprobs_dict

    @wraps(original)
    def with_capture(runner, hidden_states, num_scheduled_tokens):
        if _active is None or not runner.num_prompt_logprobs:
            return original(runner, hidden_states, num_scheduled_tokens)
        model = runner.model
        compute = model.compute_logits

        def recording(rows, *arguments, **options):
            logits = compute(rows, *arguments, **options)
            if logits is not None:
                _take(runner, hidden_states, rows, logits)
            return logits

        model.compute_logits = recording
        try:
            return original(runner, hidden_states, num_scheduled_tokens)
        finally:
            del model.compute_logits

    GPUModelRunner._get_prompt_logprobs_dict = with_capture
    _hooked = True


def _take(runner, hidden_states, rows, logits):
    """Finds the request by where its rows lie in the step's hidden states."""
    row_bytes = hidden_states.stride(0) * hidden_states.element_size()
    offset = (rows.data_ptr() - hidden_states.data_ptr()) // row_bytes
    num_requests = len(runner.input_batch.req_ids)
    starts = runner.query_start_loc.np[:num_requests].tolist()
    request_id = runner.input_batch.req_ids[starts.index(offset)]
    request = runner.requests[request_id]
    first = request.num_computed_tokens
    tokens = request.prompt_token_ids[first + 1 : first + 1 + len(rows)]
    _active.add(request_id, first, tokens, logits, runner.model_config.model)
