"""Where nanorunner runs: Linux, and WSL2, which is one."""

from __future__ import annotations


def platform_problem(system: str) -> str:
    """Return why an operating system (sys.platform) cannot run nanorunner; "" when it can."""
    if system == "linux":
        return ""
    name = {"darwin": "macOS", "win32": "Windows"}.get(system, system)
    return (
        f"{name} is not supported: the ranks rely on Linux's shared memory and parent-death "
        f"signal; use Linux, or WSL2 on Windows"
    )
