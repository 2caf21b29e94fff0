# SPDX-License-Identifier: Apache-2.0
"""The attention backend for GPUs: the same files as the CPU side's, over device memory."""
