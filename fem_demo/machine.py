"""What a measurement was made on, for the record."""

import os
import platform
import re
from datetime import date
from importlib.metadata import version
from pathlib import Path

import jax


def machine() -> str:
    """The device, the processors that this process may use, the versions and the date."""
    device = jax.devices()[0]
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxmagma"))
    cores = f"{len(os.sched_getaffinity(0))} CPU cores"
    kind = processor() if device.platform == "cpu" else device.device_kind
    return f"{kind} ({device.platform}), {cores}, {versions}, {date.today()}"


def processor() -> str:
    """The name of the CPU."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.machine()
