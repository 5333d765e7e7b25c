"""Energy that a machine has used: of its processors by RAPL, of NVIDIA GPUs by NVML.

Both count upwards from some moment; only differences mean anything. The whole machine is counted,
whoever uses it. Sources: the Linux kernel's power capping framework (powercap/intel-rapl, which AMD
processors fill too), NVML's nvmlDeviceGetTotalEnergyConsumption.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping

POWERCAP = pathlib.Path("/sys/class/powercap")


class Meter:
    """Finds the counters that can be read here.

    facts() says what they are of, empty without any, and why others are not among them.
    """

    def __init__(self, powercap: pathlib.Path = POWERCAP, nvml=None):
        """nvml: the module pynvml, or something like it; default: the one installed, if any."""
        self._counters: dict[str, Callable[[], float]] = {}  # joules
        self._ranges: dict[str, float] = {}  # where a counter begins anew, joules
        self._missing = [*self._find_processors(powercap), *self._find_gpus(nvml)]

    def facts(self) -> dict[str, str]:
        return {"source": ", ".join(self._counters), "missing": "; ".join(self._missing)}

    def read(self) -> dict[str, float]:
        """Joules by counter."""
        return {name: read() for name, read in self._counters.items()}

    def since(self, before: Mapping[str, float]) -> float | None:
        """Joules used since read() gave `before`; None without counters. A counter that began anew
        on the way, as RAPL's do every few hours, is understood once."""
        if not self._counters:
            return None
        used = ((name, now - before[name]) for name, now in self.read().items())
        return sum(j if j >= 0 else j + self._ranges.get(name, 0.0) for name, j in used)

    def _find_processors(self, powercap: pathlib.Path) -> list[str]:
        packages = sorted(powercap.glob("intel-rapl:*"))
        packages = [zone for zone in packages if zone.name.count(":") == 1]  # the rest are parts
        for zone in packages:
            try:
                name = f"RAPL {(zone / 'name').read_text().strip()}"
                read = lambda file=zone / "energy_uj": int(file.read_text()) / 1e6
                read()
                self._ranges[name] = int((zone / "max_energy_range_uj").read_text()) / 1e6
                self._counters[name] = read
            except PermissionError:
                return [f"no RAPL: only root may read {zone}"]
            except (OSError, ValueError):
                return [f"no RAPL: {zone} does not read"]
        return [] if packages else [f"no RAPL: nothing in {powercap}"]

    def _find_gpus(self, nvml) -> list[str]:
        try:
            if nvml is None:
                import pynvml as nvml
            nvml.nvmlInit()
            for number in range(nvml.nvmlDeviceGetCount()):
                device = nvml.nvmlDeviceGetHandleByIndex(number)
                read = lambda device=device: nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3
                read()
                self._counters[f"NVML GPU {number}"] = read
        except ImportError:
            return ["no NVML: with an NVIDIA GPU, pip install nvidia-ml-py"]
        except nvml.NVMLError as error:
            return [f"no NVML: {error}"]
        return []
