# SPDX-License-Identifier: Apache-2.0
"""Methods that vLLM adds to its workers.

Added by --worker-extension-cls bitdecoding_vllm.worker.WorkerExtension and called by name:
llm.collective_rpc("bitdecoding_counters"), or over HTTP when VLLM_SERVER_DEV_MODE=1, where all
arguments are strings.
"""

from bitdecoding_vllm import capture, runtime
from bitdecoding_vllm.errors import UnsupportedEngine


def _engine_runtime():
    current = runtime.current()
    if current is None:
        raise UnsupportedEngine(
            "this engine keeps vLLM's own KV cache: it was started without a recipe and without "
            "--kv-cache-dtype nvfp4."
        )
    return current


class WorkerExtension:
    def bitdecoding_counters(self):
        """The library's counters since the engine started."""
        return _engine_runtime().counters()

    def bitdecoding_status(self):
        """What runs: the library's own description and the BF16 pools."""
        current = _engine_runtime()
        pools = [
            {
                "num_slots": pool.num_slots,
                "group_tokens": pool.group_tokens,
                "num_layers": pool.num_layers,
                "bytes": pool.total_bytes,
            }
            for pool in current.pools
        ]
        return {"library": current.described, "mode": current.mode, "pools": pools}

    def bitdecoding_save_calibration(self, path=""):
        """Writes the key means observed so far; an empty path means the recipe's file."""
        written, tokens = _engine_runtime().save_calibration(path or None)
        return {"path": written, "tokens": tokens}

    def bitdecoding_calibrate(self, phase="", state_path="", note=""):
        """Sets the phase of a calibration in steps, or with a path saves what was observed so far;
        `bitdecoding calibrate` drives both. The answer says what was observed."""
        current = _engine_runtime()
        if phase:
            current.set_calibration_phase(phase)
        if state_path:
            current.save_calibration_state(state_path, note)
        return current.describe_calibration()

    def bitdecoding_resume_calibration(self, state_path):
        """Takes up what an interrupted calibration had observed."""
        current = _engine_runtime()
        current.load_calibration_state(state_path)
        return current.describe_calibration()

    def bitdecoding_probe(self, recipe_json="", layers=""):
        """Keeps another recipe's cache beside this engine's from the next request on, and lets it
        answer in the layers named (by commas, or "all"); an empty recipe ends it."""
        current = _engine_runtime()
        total = self.model_config.get_total_num_hidden_layers()
        chosen = range(total) if layers == "all" else [int(n) for n in layers.split(",") if n]
        current.start_probe(recipe_json, chosen)

    def bitdecoding_probe_report(self):
        """What the probe has compared so far."""
        return _engine_runtime().describe_probe()

    def bitdecoding_capture_logits(self, path="", dtype="float32", first_position="0"):
        """Ends the current capture, returns its rows, and begins another one if a path is given."""
        rows = capture.stop()
        if path and self.rank == 0:
            capture.start(path, dtype, int(first_position))
        return rows
