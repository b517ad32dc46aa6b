"""Tells vLLM that no device is its to use: it schedules and speaks HTTP here, the executor runs the model.

Found through the entry point ``rankbus`` of the group ``vllm.platform_plugins``, which wins over vLLM's own detection:
a machine with `libtpu`, a CPU build of vLLM, or both, behaves the same, with none of vLLM's environment variables set.
"""


def register() -> str:
    """Name the platform class. Called while vLLM is being imported, so it must not import vLLM itself."""
    return "frontend.vllm_platform.BusPlatform"
