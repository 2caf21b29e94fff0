# SPDX-License-Identifier: Apache-2.0
"""A bd_steps of the library, on either device: the shadow directory and the current plan of a group
of layers. What a step is made of is pointed to; vLLM's tensors are not copied."""

from ctypes import addressof

from bitdecoding_vllm import library


class StepsHandle:
    def __init__(self, runtime, create, options):
        self.runtime = runtime
        self.lib = runtime.lib
        self.handle = None
        self.handle = self.lib.create(create, runtime.handle, options)
        self._input = library.sized(library.StepInput)
        self._input_address = addressof(self._input)

    def __del__(self):
        handle, self.handle = getattr(self, "handle", None), None
        if handle:
            self.lib.bd_steps_destroy(handle)

    def point(self, common, query_start, num_tokens):
        """Returns the address of the step's input."""
        step = self._input
        step.num_requests = common.num_reqs
        step.block_table = common.block_table_tensor.data_ptr()
        step.block_table_stride = common.block_table_tensor.stride(0)
        step.query_start = query_start.data_ptr()
        step.seq_lens = common.seq_lens.data_ptr()
        step.slot_mapping = common.slot_mapping.data_ptr()
        step.num_tokens = num_tokens
        return self._input_address
