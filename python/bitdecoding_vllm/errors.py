# SPDX-License-Identifier: Apache-2.0
"""The error that every refusal of the plugin is."""


class UnsupportedEngine(RuntimeError):
    """This engine cannot be served by the plugin; the text says why and what to do."""
