"""Energy counters, from folders and libraries made here."""

from types import SimpleNamespace

from jaxserve.bench.energy import Meter


class NVMLError(Exception):
    pass


def no_gpu():
    raise NVMLError("Driver Not Loaded")


NO_GPU = SimpleNamespace(nvmlInit=no_gpu, NVMLError=NVMLError)


def package(folder, number, name, microjoules, most=10_000_000):
    zone = folder / f"intel-rapl:{number}"
    zone.mkdir(exist_ok=True)
    for file, value in (
        ("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", most)
    ):  # fmt: skip
        (zone / file).write_text(f"{value}\n")


def test_packages_add_up_and_begin_anew(tmp_path):
    package(tmp_path, 0, "package-0", 9_000_000)
    package(tmp_path, 1, "package-1", 1_000_000)
    package(tmp_path, "0:0", "core", 500_000)  # a part of package 0
    meter = Meter(tmp_path, NO_GPU)
    before = meter.read()
    package(tmp_path, 0, "package-0", 500_000)  # past 10 J it began anew
    package(tmp_path, 1, "package-1", 3_500_000)
    assert meter.since(before) == 1.5 + 2.5
    assert meter.facts()["source"] == "RAPL package-0, RAPL package-1"
    assert meter.facts()["missing"] == "no NVML: Driver Not Loaded"


def test_gpus(tmp_path):
    millijoules = {0: 1000, 1: 5000}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, NVMLError=NVMLError,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetTotalEnergyConsumption=millijoules.__getitem__,
    )  # fmt: skip
    meter = Meter(tmp_path, nvml)
    before = meter.read()
    millijoules.update({0: 1500, 1: 8000})
    assert meter.since(before) == 3.5
    assert meter.facts()["source"] == "NVML GPU 0, NVML GPU 1"
    assert "no RAPL: nothing in" in meter.facts()["missing"]


def test_nothing_to_read_is_said(tmp_path):
    meter = Meter(tmp_path, NO_GPU)
    assert meter.since(meter.read()) is None and meter.facts()["source"] == ""
    package(tmp_path, 0, "package-0", "garbage")
    assert "does not read" in Meter(tmp_path, NO_GPU).facts()["missing"]
